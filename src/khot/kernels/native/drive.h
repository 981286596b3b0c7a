// Forward and backward of one family over all rows of a call: short rows side by side, long ones by themselves.
#pragma once
#include <atomic>

#include "short.h"

#include "backward.h"

namespace {

template <class C> Row<C> row_of(const void* data, Stored type, int64_t at) { return Row<C>{const_cast<void*>(data), type}.from(at); }

// Rows from..to, at most kLanes of them; `which` has a bit for each. False if the sum of one misses k.
template <class F, class C>
__attribute__((noinline)) bool solve_rows(const KhotForward& a, Stored type, int64_t from, int64_t to, unsigned which, int threads, Memo& memo) {
  Solver<F, C> solver(a.n, threads, memo);
  for (int64_t r = from; r < to; r++) {
    if (!(which >> (r - from) & 1)) continue;
    solver.add_row(row_of<C>(a.x, type, r * a.n), row_of<C>(a.y, type, r * a.n), a.k[r * a.k_stride], a.tau[r * a.tau_stride]);
  }
  const bool right = solver.solve();
  int at = 0;
  for (int64_t r = from; a.shift && r < to; r++)
    if (which >> (r - from) & 1) a.shift[r] = solver.threshold(at++);
  return right;
}

// From `first` on, two blocks of rows at most.
template <class F> struct ShortPair {
  static constexpr int kRows = ShortRows<F>::kRows;
  ShortRows<F> block[2];
  bool set = false;

  explicit ShortPair(int64_t n) : block{ShortRows<F>(n), ShortRows<F>(n)} {}

  bool solve(const KhotForward& a, Stored type, int64_t first, int64_t to, Memo& memo) {
    Row<float> x[2 * kRows], y[2 * kRows];
    const int all = int(least<int64_t>(2 * kRows, to - first)), rows[2] = {least(all, kRows), all - least(all, kRows)}, blocks = 1 + (rows[1] > 0);
    for (int r = 0; r < all; r++) x[r] = row_of<float>(a.x, type, (first + r) * a.n), y[r] = row_of<float>(a.y, type, (first + r) * a.n);
    if (!set || a.k_stride || a.tau_stride) prepare(a, first, rows, blocks, memo);
    unsigned done[2];
    ShortRows<F>::solve(block, blocks, x, y, rows, done);
    bool right = true;
    for (int b = 0; b < blocks; b++) right &= finish(a, type, first + b * kRows, rows[b], block[b], done[b], memo);
    return right;
  }

 private:
  void prepare(const KhotForward& a, int64_t first, const int* rows, int blocks, Memo& memo) {
    for (int b = 0; b < blocks; b++) {
      const int64_t from = first + b * kRows;
      block[b].set(a.k + from * a.k_stride, a.k_stride, a.tau + from * a.tau_stride, a.tau_stride, rows[b], memo);
    }
    set = blocks == 2;
  }
  // Tells the thresholds, and leaves to the careful solver what is not done.
  static bool finish(const KhotForward& a, Stored type, int64_t first, int rows, const ShortRows<F>& solved, unsigned done, Memo& memo) {
    bool right = true;
    if (a.shift)
      for (int r = 0; r < rows; r++) a.shift[first + r] = solved.threshold(r);
    for (int part = 0; part < rows; part += kLanes) {
      unsigned left = ~(done >> part) & ((1u << least(kLanes, rows - part)) - 1);
      if (left) right &= solve_rows<F, float>(a, type, first + part, first + least(rows, part + kLanes), left, 1, memo);
    }
    return right;
  }
};

template <class F> __attribute__((noinline)) bool short_rows(const KhotForward& a, Stored type, int64_t from, int64_t to, Memo& memo) {
  bool right = true;
  ShortPair<F> pair(a.n);
  for (int64_t first = from; first < to; first += 2 * ShortPair<F>::kRows) right &= pair.solve(a, type, first, to, memo);
  return right;
}

template <class C> bool is_short(int64_t n) { return sizeof(C) == 4 && n <= kShortMost; }

template <class F, class C> int forward(const KhotForward& a, Stored type) {
  const int64_t lanes = a.n > kSampledFrom ? 1 : is_short<C>(a.n) ? most(kLanes, kWidth<float>) : kLanes;
  std::atomic<bool> right{true};
  over_rows(a.rows, a.n, a.threads, lanes, [&](int64_t from, int64_t to, int threads) {
    Memo memo;
    memo.curve = a.curve;
    bool here = true;
    if constexpr (sizeof(C) == 4) {
      if (is_short<C>(a.n) && to - from > 1) {
        if (!short_rows<F>(a, type, from, to, memo)) right = false;
        return;
      }
    }
    for (int64_t r = from; r < to; r += lanes) here &= solve_rows<F, C>(a, type, r, least(to, r + lanes), ~0u, threads, memo);
    if (!here) right = false;
  });
  return right ? kKhotDone : kKhotMissed;
}

template <class F, class C> void backward_rows(const KhotBackward& a, Stored type, int64_t from, int64_t to, int threads) {
  typename Backward<F, C>::Rows rows[kLanes];
  double tau[kLanes];
  for (int64_t r = from; r < to; r++) {
    int64_t at = r * a.n;
    rows[r - from] = {row_of<C>(a.y, type, at), row_of<C>(a.g, type, at), row_of<C>(a.x, type, at), row_of<C>(a.gx, type, at)};
    tau[r - from] = a.tau[r * a.tau_stride];
  }
  Backward<F, C>::solve(rows, int(to - from), a.n, tau, a.shift ? a.shift + from : nullptr, a.gk ? a.gk + from : nullptr,
                        a.gtau ? a.gtau + from : nullptr, threads, a.curve);
}

template <class F, class C> int backward(const KhotBackward& a, Stored type) {
  const int64_t lanes = a.n > kSampledFrom ? 1 : kLanes;
  over_rows(a.rows, a.n, a.threads, lanes, [&](int64_t from, int64_t to, int threads) {
    for (int64_t r = from; r < to; r += lanes) backward_rows<F, C>(a, type, r, least(to, r + lanes), threads);
  });
  return kKhotDone;
}

template <class F> int forward_of(int dtype, const KhotForward& a) {
  if (dtype < kFloat32 || dtype > kFloat16) return kKhotType;
  return dtype == kFloat64 ? forward<F, double>(a, kFloat64) : forward<F, float>(a, Stored(dtype));
}
template <class F> int backward_of(int dtype, const KhotBackward& a) {
  if (dtype < kFloat32 || dtype > kFloat16) return kKhotType;
  return dtype == kFloat64 ? backward<F, double>(a, kFloat64) : backward<F, float>(a, Stored(dtype));
}

}  // namespace

#define KHOT_STRING2(x) #x
#define KHOT_STRING(x) KHOT_STRING2(x)
#define KHOT_JOIN2(a, b) a##b
#define KHOT_JOIN(a, b) KHOT_JOIN2(a, b)
