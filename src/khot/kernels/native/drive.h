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

// Rows that will be wanted soon: they are read a piece of each at a time, which the processor does not foresee by itself.
inline void fetch_ahead(const KhotForward& a, Stored type, int64_t from, int64_t to) {
  const int64_t row = a.n * int64_t(Row<float>::bytes(type));
  const char *x = static_cast<const char*>(a.x), *y = static_cast<const char*>(a.y);
  for (int64_t at = from * row; at < to * row; at += 64) __builtin_prefetch(x + at, 0, 2), __builtin_prefetch(y + at, 1, 2);
}

template <class F>
__attribute__((noinline)) bool short_rows(const KhotForward& a, Stored type, int64_t from, int64_t to, Memo& memo) {
  constexpr int most_rows = ShortRows<F>::kRows;
  bool right = true;
  ShortRows<F> solver(a.n);
  for (int64_t first = from; first < to; first += most_rows) {
    int rows = int(least<int64_t>(most_rows, to - first));
    Row<float> x[most_rows], y[most_rows];
    for (int r = 0; r < rows; r++) x[r] = row_of<float>(a.x, type, (first + r) * a.n), y[r] = row_of<float>(a.y, type, (first + r) * a.n);
    if (first == from || a.k_stride || a.tau_stride)
      solver.set(a.k + first * a.k_stride, a.k_stride, a.tau + first * a.tau_stride, a.tau_stride, rows, memo);
    fetch_ahead(a, type, first + most_rows, least<int64_t>(to, first + 2 * most_rows));
    unsigned done = solver.solve(x, y, rows);
    if (a.shift)
      for (int r = 0; r < rows; r++) a.shift[first + r] = solver.threshold(r);
    for (int part = 0; part < rows; part += kLanes) {
      unsigned left = ~(done >> part) & ((1u << least(kLanes, rows - part)) - 1);
      if (left) right &= solve_rows<F, float>(a, type, first + part, first + least(rows, part + kLanes), left, 1, memo);
    }
  }
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
