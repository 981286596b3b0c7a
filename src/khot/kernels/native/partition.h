// The k-th largest of a row of any length: a sample gives two values around it, and one pass keeps what lies between them.
#pragma once
#include "compress.h"
#include "memory.h"
#include "select.h"

namespace {

// Scores above `high`, equal to it, strictly between (which are kept), equal to `low`.
struct Parts {
  int64_t above = 0, at_high = 0, between = 0, at_low = 0;
  bool has_nan = false;
  int64_t all() const { return above + at_high + between + at_low; }
};

template <class C> bool any_nan(const Row<C>& row, int64_t n) {
  IVec<C> strange{};
  C buffer[kGroup<C>];
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    const C* p = row.read(i, n, buffer, C(0));
    KHOT_EACH(kUnroll, Vec<C> v = load(p + j * kWidth<C>); strange |= v != v);
  }
  return sum_of_counts<C>(strange) > 0;
}

template <class C> __attribute__((noinline)) Parts part(const Row<C>& row, int64_t n, C low, C high, C* out) {
  const Vec<C> l = splat(low), h = splat(high);
  IVec<C> above[2] = {}, at_high[2] = {}, at_low[2] = {}, strange{};
  C buffer[kGroup<C>];
  Parts parts;
  C* to = out;
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    const C* p = row.read(i, n, buffer, -kInf<C>);
    KHOT_EACH(kUnroll, Vec<C> v = load(p + j * kWidth<C>); above[j & 1] += v > h; at_high[j & 1] += v == h; at_low[j & 1] += v == l;
              strange |= v != v; to += put_chosen(to, v, (v > l) & (v < h)));
  }
  parts.above = sum_of_counts<C>(above[0] + above[1]), parts.at_high = sum_of_counts<C>(at_high[0] + at_high[1]);
  // The fill behind the row counts as -inf: that matters only where -inf is the answer anyway.
  parts.at_low = sum_of_counts<C>(at_low[0] + at_low[1]), parts.between = to - out;
  parts.has_nan = sum_of_counts<C>(strange) > 0;
  return parts;
}

// A score from each of `count` equal parts of the row, at a place that changes from part to part.
template <class S> void take_sample(const void* data, int64_t n, int64_t count, void* out) {
  uint32_t state = 0x9e3779b9;
  for (int64_t i = 0; i < count; i++) {
    int64_t begin = n * i / count, size = n * (i + 1) / count - begin;
    state = state * 1664525u + 1013904223u;
    static_cast<S*>(out)[i] = static_cast<const S*>(data)[begin + int64_t(uint64_t(state >> 8) * uint64_t(size) >> 24)];
  }
}

template <class C> struct Selector {
  struct Result {
    Cut<C> cut;
    bool has_nan;
  };

  // 0 <= k <= n. Throws std::bad_alloc where a long row finds no memory.
  Result find(Row<C> row, int64_t n, int64_t k) {
    if (k <= 0 || k >= n) return {k <= 0 ? Cut<C>{kInf<C>, 0} : Cut<C>{-kInf<C>, k}, any_nan(row, n)};
    Integer<C> floor = kBottom<C>;
    for (int round = 0; n > kBuffered<C>; round++) {
      C* kept = kept_in[round & 1].at_least(n + kGroup<C>);
      Bounds bounds = around(row, n, k);
      Parts parts = part(row, n, bounds.low, bounds.high, kept);
      if (parts.has_nan) return {{}, true};
      if (k <= parts.above || k > parts.all()) {
        bounds = k <= parts.above ? Bounds{bounds.high, kInf<C>} : Bounds{-kInf<C>, bounds.low};
        parts = part(row, n, bounds.low, bounds.high, kept);
      }
      k -= parts.above;
      if (k <= parts.at_high) return {{bounds.high, k}, false};
      k -= parts.at_high;
      if (k > parts.between) return {{bounds.low, k - parts.between}, false};
      row = {kept, sizeof(C) == 4 ? kFloat32 : kFloat64}, n = parts.between;
      floor = ordered_key(bounds.low);
    }
    copied.copy(row, n);
    if (copied.has_nan) return {{}, true};
    return {Search<C>::find(copied, n, k, 0, rank, floor), false};
  }

 private:
  struct Bounds { C low, high; };

  Copied<C> copied;
  NormalRank rank, rank_low, rank_high;
  Memory<C> kept_in[2];

  // Two values with the k-th largest between them, but for one row in a few hundred.
  Bounds around(const Row<C>& row, int64_t n, int64_t k) {
    const int64_t size = n < (1 << 17) ? kBuffered<C> / 8 : kBuffered<C>;
    alignas(64) char raw[kBufferBytes];
    if (row.type == kFloat64) take_sample<uint64_t>(row.data, n, size, raw);
    else if (row.type == kFloat32) take_sample<uint32_t>(row.data, n, size, raw);
    else take_sample<uint16_t>(row.data, n, size, raw);
    copied.copy({raw, row.type}, size);
    if (copied.has_nan) return {kInf<C>, kInf<C>};
    double p = double(k) / double(n), rank = p * double(size), reach = 3 * std::sqrt(rank * (1 - p)) + 2;
    int64_t first = int64_t(rank - reach), last = int64_t(rank + reach) + 1, slack = int64_t(reach / 8);
    return {last < size ? Search<C>::find(copied, size, last, slack, rank_low).value : -kInf<C>,
            first > 0 ? Search<C>::find(copied, size, first, slack, rank_high).value : kInf<C>};
  }
};

}  // namespace
