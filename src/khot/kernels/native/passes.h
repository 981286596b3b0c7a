// Passes over a stretch of one row. Each reads every score once; four vectors are in flight at a time.
#pragma once
#include "families.h"

namespace {

// Where an evaluation finds its codes: computed from the scores, computed and kept, or kept by an earlier pass.
enum Source { kFromScores, kKeep, kFromCache };

constexpr int kUnroll = 4;
constexpr int64_t kFlush = 32;  // rounds of float sums before they are added to a double

// Calls body(offset, count, full) for each vector of [0, n) in groups of four, `flush()` after each kFlush groups.
template <class C, class S, bool kComplement, Source kSource, class F> struct Measure {
  VecD total{};
  Vec<C> v0{}, v1{}, v2{}, v3{}, probe{};
  const Shift<C>& shift;

  explicit KHOT_INLINE Measure(const Shift<C>& s) : shift(s) {}

  KHOT_INLINE Vec<C> point(Vec<C> code) {
    Measured<C> m = F::template measure<kComplement, C>(code, shift);
    Vec<C> r = m.slope;
    v0 += r;
    if (F::kMoments == 2) v1 = fma(r, m.q, v1);
    if (F::kMoments == 4) {
      Vec<C> r1 = r * m.q, q2 = m.q * m.q;
      v1 += r1, v2 = fma(r, q2, v2), v3 = fma(r1, q2, v3);
    }
    return m.y;
  }
  KHOT_INLINE Vec<C> full(const S* x, C* cache) {
    if (kSource == kFromCache) return point(load(cache));
    Vec<C> value = load(x);
    probe = fma(value, Vec<C>{}, probe);
    Vec<C> code = F::template encode<C>(value, shift);
    if (kSource == kKeep) store(cache, code);
    return point(code);
  }
  KHOT_INLINE Vec<C> part(const S* x, C* cache, int r) {
    if (kSource == kFromCache) {  // an absent score is one that is excluded: its code is infinite
      return point(first_lanes<C>(r) ? load_part(cache, r) : splat(kInf<C>));
    }
    Vec<C> value = load_part(x, r);
    probe = fma(value, Vec<C>{}, probe);
    Vec<C> code = F::template encode<C>(first_lanes<C>(r) ? value : splat(-kInf<C>), shift);
    if (kSource == kKeep) store_part(cache, code, r);
    return point(code);
  }
  KHOT_INLINE void flush(Sums& sums) {
    sums.y += sum_lanes(total), sums.v0 += sum_lanes(v0), sums.probe += sum_lanes(probe);
    if (F::kMoments >= 2) sums.v1 += sum_lanes(v1);
    if (F::kMoments == 4) sums.v2 += sum_lanes(v2), sums.v3 += sum_lanes(v3);
    total = VecD{}, v0 = v1 = v2 = v3 = probe = Vec<C>{};
  }
};

template <class F, class S, bool kComplement, Source kSource>
Sums measure(const S* x, Compute<S>* cache, int64_t n, const Shift<Compute<S>>& shift) {
  using C = Compute<S>;
  constexpr int64_t w = kWidth<C>, group = kUnroll * w;
  Sums sums;
  Measure<C, S, kComplement, kSource, F> pass(shift);
  int64_t i = 0;
  while (i + group <= n) {
    int64_t end = least(n - group + 1, i + kFlush * group);
    for (; i < end; i += group) {
      Vec<C> a = pass.full(x + i, cache + i), b = pass.full(x + i + w, cache + i + w);
      Vec<C> c = pass.full(x + i + 2 * w, cache + i + 2 * w), d = pass.full(x + i + 3 * w, cache + i + 3 * w);
      pass.total += widen_add((a + b) + (c + d));
    }
    if (i + w <= n) pass.flush(sums);
  }
  for (; i + w <= n; i += w) pass.total += widen_add(pass.full(x + i, cache + i));
  if (i < n) {
    Vec<C> y = pass.part(x + i, cache + i, int(n - i));
    // With the complement, the absent scores count as 1 - 0.
    if (kComplement) y = first_lanes<C>(int(n - i)) ? y : Vec<C>{};
    pass.total += widen_add(y);
  }
  pass.flush(sums);
  return sums;
}

// Writes y and returns its sum as stored (for half precision: before the rounding).
template <class F, class S, Source kSource>
double emit(const S* x, const Compute<S>* cache, S* y, int64_t n, const Shift<Compute<S>>& shift) {
  using C = Compute<S>;
  constexpr int64_t w = kWidth<C>, group = kUnroll * w;
  auto at = [&](int64_t j) KHOT_INLINE_LAMBDA {
    Vec<C> v = F::template value<C>(kSource == kFromCache ? load(cache + j) : F::template encode<C>(load(x + j), shift), shift);
    store(y + j, v);
    return v;
  };
  double sum = 0;
  int64_t i = 0;
  while (i + group <= n) {
    VecD total{};
    int64_t end = least(n - group + 1, i + kFlush * group);
    for (; i < end; i += group) {
      Vec<C> a = at(i), b = at(i + w), c = at(i + 2 * w), d = at(i + 3 * w);
      total += widen_add((a + b) + (c + d));
    }
    sum += sum_lanes(total);
  }
  VecD total{};
  for (; i + w <= n; i += w) total += widen_add(at(i));
  if (i < n) {
    int r = int(n - i);
    Vec<C> code = kSource == kFromCache ? load_part(cache + i, r) : F::template encode<C>(load_part(x + i, r), shift);
    Vec<C> v = F::template value<C>(code, shift);
    store_part(y + i, v, r);
    total += widen_add(first_lanes<C>(r) ? v : Vec<C>{});
  }
  return sum + sum_lanes(total);
}

struct Stats {
  double sum = 0, square = 0;  // of x - reference
  double low = kInf<double>, high = -kInf<double>;
  double probe = 0;
  int64_t nan = 0, above = 0, below = 0;  // nan, +inf, -inf; counted by `classify` only
  void add(const Stats& o) {
    sum += o.sum, square += o.square, probe += o.probe;
    low = least(low, o.low), high = most(high, o.high);
    nan += o.nan, above += o.above, below += o.below;
  }
};

template <class V, class T> KHOT_INLINE double lowest(V v, T) {
  double r = kInf<double>;
  for (int j = 0; j < kWidth<T>; j++) r = least(r, double(v[j]));
  return r;
}
template <class V, class T> KHOT_INLINE double highest(V v, T) {
  double r = -kInf<double>;
  for (int j = 0; j < kWidth<T>; j++) r = most(r, double(v[j]));
  return r;
}

// Mean, spread and range of a row that is all finite (probe = 0 tells).
template <class S> Stats moments(const S* x, int64_t n, Compute<S> reference) {
  using C = Compute<S>;
  constexpr int64_t w = kWidth<C>;
  Vec<C> sum{}, square{}, probe{}, low = splat(kInf<C>), high = splat(-kInf<C>);
  auto add = [&](Vec<C> v) KHOT_INLINE_LAMBDA {
    low = v < low ? v : low, high = v > high ? v : high;
    Vec<C> d = v - reference;
    sum += d, square = fma(d, d, square), probe = fma(v, Vec<C>{}, probe);
  };
  int64_t i = 0;
  for (; i + w <= n; i += w) add(load(x + i));
  if (i < n) {
    int r = int(n - i);
    add(first_lanes<C>(r) ? load_part(x + i, r) : splat(reference));
  }
  Stats s;
  s.sum = sum_lanes(sum), s.square = sum_lanes(square), s.probe = sum_lanes(probe);
  s.low = lowest(low, C()), s.high = highest(high, C());
  return s;
}

// The range of the finite scores, and how many of each other kind there are.
template <class S> Stats classify(const S* x, int64_t n) {
  using C = Compute<S>;
  constexpr int64_t w = kWidth<C>;
  Vec<C> low = splat(kInf<C>), high = splat(-kInf<C>);
  IVec<C> nan{}, above{}, below{};
  auto add = [&](Vec<C> v, IVec<C> lanes) KHOT_INLINE_LAMBDA {
    IVec<C> finite = (v - v == C(0)) & lanes;
    low = (v < low) & finite ? v : low, high = (v > high) & finite ? v : high;
    nan -= (v != v) & lanes, above -= (v == kInf<C>)&lanes, below -= (v == -kInf<C>)&lanes;
  };
  int64_t i = 0;
  for (; i + w <= n; i += w) add(load(x + i), ~IVec<C>{});
  if (i < n) add(load_part(x + i, int(n - i)), first_lanes<C>(int(n - i)));
  Stats s;
  for (int j = 0; j < w; j++) s.nan += nan[j], s.above += above[j], s.below += below[j];
  s.low = lowest(low, C()), s.high = highest(high, C());
  return s;
}

// How many scores lie above each of four levels.
struct Counts {
  int64_t c[4] = {0, 0, 0, 0};
  void add(const Counts& o) {
    for (int j = 0; j < 4; j++) c[j] += o.c[j];
  }
};
template <class S> Counts count_above(const S* x, int64_t n, const Compute<S>* level) {
  using C = Compute<S>;
  constexpr int64_t w = kWidth<C>;
  const Vec<C> l0 = splat(level[0]), l1 = splat(level[1]), l2 = splat(level[2]), l3 = splat(level[3]);
  IVec<C> c0{}, c1{}, c2{}, c3{};
  auto add = [&](Vec<C> v) KHOT_INLINE_LAMBDA { c0 -= v > l0, c1 -= v > l1, c2 -= v > l2, c3 -= v > l3; };
  int64_t i = 0;
  for (; i + w <= n; i += w) add(load(x + i));
  if (i < n) add(first_lanes<C>(int(n - i)) ? load_part(x + i, int(n - i)) : splat(-kInf<C>));
  Counts r;
  for (int j = 0; j < w; j++) r.c[0] += c0[j], r.c[1] += c1[j], r.c[2] += c2[j], r.c[3] += c3[j];
  return r;
}

// The largest score not above the level and the smallest one above it.
struct Gap {
  double below = -kInf<double>, above = kInf<double>;
  void add(const Gap& o) { below = most(below, o.below), above = least(above, o.above); }
};
template <class S> Gap gap_at(const S* x, int64_t n, Compute<S> level) {
  using C = Compute<S>;
  constexpr int64_t w = kWidth<C>;
  Vec<C> below = splat(-kInf<C>), above = splat(kInf<C>);
  auto add = [&](Vec<C> v) KHOT_INLINE_LAMBDA {
    auto up = v > level;
    Vec<C> low = up ? splat(-kInf<C>) : v, high = up ? v : splat(kInf<C>);
    below = low > below ? low : below, above = high < above ? high : above;
  };
  int64_t i = 0;
  for (; i + w <= n; i += w) add(load(x + i));
  if (i < n) add(first_lanes<C>(int(n - i)) ? load_part(x + i, int(n - i)) : splat(-kInf<C>));
  return {highest(below, C()), lowest(above, C())};
}

}  // namespace
