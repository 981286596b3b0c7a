// Passes over a stretch of one row. Each reads every score once.
#pragma once
#include "families.h"
#include "rows.h"

namespace {

// F' where y is known.
template <class F, class P> KHOT_INLINE P slope_of(P y, [[maybe_unused]] const KhotCurve* curve) {
  if constexpr (F::kCurved) return F::slope(y, *curve);
  else return F::slope(y);
}

constexpr int64_t kFlush = 32;  // groups whose float sums are added before they go into a double

template <class V> KHOT_INLINE double lowest(V v) {
  double r = kInf<double>;
  for (size_t j = 0; j < sizeof(V) / sizeof(v[0]); j++) r = least(r, double(v[j]));
  return r;
}

// The sums of slope q^j. With kThin the third and fourth come from one vector in four, and the first two of that part beside them.
template <class F, class C, bool kThin> struct Moments {
  using P = Wide<C>;
  Vec<C> v0{}, v1{}, v2{}, v3{}, v4{}, v5{}, part0{}, part1{}, top{};
  KHOT_INLINE void add(P slope, P q) {
    KHOT_EACH(P::U, v0 += slope.v[j]);
    if constexpr (F::kKinked) KHOT_EACH(P::U, top = vmax(top, slope.v[j]));
    if constexpr (F::kBent) KHOT_EACH(P::U, v1 += q.v[j]);
    else if constexpr (F::kMoments == 2) KHOT_EACH(P::U, v1 = fma(slope.v[j], q.v[j], v1));
    if constexpr (F::kMoments == 4) {
      P r1 = slope * q;
      KHOT_EACH(P::U, v1 += r1.v[j]);
      KHOT_EACH(kThin ? 1 : P::U, {
        Vec<C> q2 = q.v[j] * q.v[j];
        v2 = fma(slope.v[j], q2, v2);
        v3 = fma(r1.v[j], q2, v3);
        if constexpr (kThin) part0 += slope.v[j], part1 += r1.v[j];
      });
    }
    if constexpr (F::kMoments == 6) {
      P square = q * q, r2 = slope * square, r4 = r2 * square;
      KHOT_EACH(P::U, v1 = fma(slope.v[j], q.v[j], v1), v2 += r2.v[j], v3 = fma(r2.v[j], q.v[j], v3));
      KHOT_EACH(P::U, v4 += r4.v[j], v5 = fma(r4.v[j], q.v[j], v5));
    }
  }
};

// One evaluation: sum F and the moments of its slope. With kFromCache the codes of an earlier one are used; else they
// are computed, and kept if there is a cache. In a very long row (kThin) the third and fourth moment are taken from one
// vector in four: they only refine a step that is small already.
template <class F, class C, bool kComplement, bool kFromCache, bool kThin> struct Measure {
  using P = Wide<C>;
  const Shift<C> shift;
  LaneTotal<C> total;
  Moments<F, C, kThin> moments;
  Vec<C> probe{};

  explicit Measure(const Shift<C>& s) : shift(s) {}
  KHOT_INLINE void group(const C* from, C* cache) {
    P code = load_pack<P>(from);
    if constexpr (!kFromCache) {
      KHOT_EACH(P::U, probe = fma(code.v[j], Vec<C>{}, probe));
      code = F::encode(code, shift);
      if constexpr (F::kCached) {
        if (cache) store_pack(cache, code);
      }
    }
    add(code, cache);
  }
  // The two halves of a group: the exponentials, which go to the cache, and what is made of them.
  KHOT_INLINE void encode(const C* from, C* cache) {
    P code = load_pack<P>(from);
    KHOT_EACH(P::U, probe = fma(code.v[j], Vec<C>{}, probe));
    store_pack(cache, F::encode(code, shift));
  }
  KHOT_INLINE void add(P code, C* cache) {
    auto m = F::template measure<kComplement>(code, shift);
    if constexpr (F::kRefined) {
      if (cache) store_pack(cache, m.kept);
    }
    moments.add(m.slope, m.q);
    total.add(fold(m.y));
  }
  KHOT_INLINE void flush(Sums& sums) {
    const auto& m = moments;
    total.flush(sums.y);
    if constexpr (F::kMoments == 1) sums.v[0] += sum_lanes(m.v0);
    if constexpr (F::kMoments == 2) sums.v[0] += sum_lanes(m.v0), sums.v[1] += sum_lanes(m.v1);
    if constexpr (F::kMoments >= 4) add_sums(m.v0, m.v1, m.v2, m.v3, sums.v);
    if constexpr (F::kMoments == 6) sums.v[4] += sum_lanes(m.v4), sums.v[5] += sum_lanes(m.v5);
    if constexpr (F::kKinked) sums.top = most(sums.top, -lowest(-m.top));
    if constexpr (!kFromCache) sums.probe += sum_lanes(probe);
    if constexpr (kThin) sums.part[0] += sum_lanes(m.part0), sums.part[1] += sum_lanes(m.part1);
    moments = {}, probe = Vec<C>{};
  }
};

// The probe of a group that is cut short: what stands behind the scores does not count.
template <class C> C probe_of(const C* x, int64_t count) {
  C probe = 0;
  for (int64_t j = 0; j < count; j++) probe += x[j] * C(0);
  return probe;
}

template <class F, class C, bool kComplement, bool kFromCache, bool kThin>
Sums measure(Row<C> x, C* cache, int64_t n, const Shift<C>& shift) {
  constexpr C absent = kFromCache ? kInf<C> : -kInf<C>;  // counts as an excluded score, or as its code
  const Row<C> source = kFromCache ? Row<C>{cache, sizeof(C) == 4 ? kFloat32 : kFloat64} : x;
  const Row<C> kept = {cache, sizeof(C) == 4 ? kFloat32 : kFloat64};
  Measure<F, C, kComplement, kFromCache, kThin> pass(shift);
  Sums sums;
  C in[kGroup<C>], out[kGroup<C>];
  for (int64_t i = 0; i < n;) {
    int64_t end = least(n, i + kFlush * kGroup<C>);
    if constexpr (F::kCached && !kFromCache) {
      // Two short loops over a stretch that stays near: in one long one the exponentials of few groups overlap.
      if (cache && x.exact()) {
        const int64_t whole = i + (end - i) / kGroup<C> * kGroup<C>;
        for (int64_t j = i; j < whole; j += kGroup<C>) pass.encode(x.values() + j, cache + j);
        for (; i < whole; i += kGroup<C>) pass.add(load_pack<Wide<C>>(cache + i), nullptr);
      }
    }
    for (; i < end; i += kGroup<C>) {
      C* keep = kFromCache || !cache ? nullptr : kept.target(i, n, out);
      Vec<C> probe = pass.probe;
      const C* group = source.read(i, n, in, absent);
      pass.group(group, keep);
      if (i + kGroup<C> > n) pass.probe = probe + probe_of(group, n - i);
      if (keep) kept.written(i, n, out);
    }
    pass.flush(sums);
  }
  if constexpr (F::kRefined) F::in_u(sums.v);
  // With the complement, each absent score has counted as 1 - 0.
  if (kComplement) sums.y.add(-double((kGroup<C> - n % kGroup<C>) % kGroup<C>));
  return sums;
}

// Writes y and returns its sum as stored (for half precision: before the rounding). With kMended every y is moved by `mend` times its slope.
template <class F, class C, bool kFromCache, bool kMended = false>
Total emit(Row<C> x, C* cache, Row<C> y, int64_t n, const Shift<C>& given, C mend = 0) {
  using P = Wide<C>;
  const Shift<C> shift = given;
  const Row<C> kept = {cache, sizeof(C) == 4 ? kFloat32 : kFloat64};
  C in[kGroup<C>], old[kGroup<C>], out[kGroup<C>];
  Total sum;
  for (int64_t i = 0; i < n;) {
    LaneTotal<C> total;
    for (int64_t end = least(n, i + kFlush * kGroup<C>); i < end; i += kGroup<C>) {
      P v;
      if constexpr (kFromCache && F::kRefined) {
        v = F::refine(load_pack<P>(x.read(i, n, in, -kInf<C>)), load_pack<P>(kept.read(i, n, old, C(0))), shift);
      } else if constexpr (kFromCache) {
        v = F::value(load_pack<P>(kept.read(i, n, old, kInf<C>)), shift);
      } else {
        v = F::value(F::encode(load_pack<P>(x.read(i, n, in, -kInf<C>)), shift), shift);
      }
      if constexpr (kMended) v = atleast(C(0), atmost(C(1), fma(slope_of<F>(v, shift.curve), P(mend), v)));
      store_pack(y.target(i, n, out), v);
      y.written(i, n, out);
      total.add(fold(v));
    }
    total.flush(sum);
  }
  return sum;
}

struct Stats {
  double mean = 0, square = 0, probe = 0;           // of x - reference and its square: from `moments`
  double low = kInf<double>, high = -kInf<double>;  // the finite range, and how many are nan, +inf, -inf:
  int64_t nan = 0, above = 0, below = 0;            // from `classify`
  void add(const Stats& o) {
    low = least(low, o.low), high = most(high, o.high);
    nan += o.nan, above += o.above, below += o.below;
  }
};

template <class V> KHOT_INLINE double highest(V v) { return -lowest(-v); }
template <class V> KHOT_INLINE int64_t total_count(V v) {
  int64_t r = 0;
  for (size_t j = 0; j < sizeof(V) / sizeof(v[0]); j++) r += v[j];
  return r;
}

// Mean and spread of a row that is all finite (probe = 0 tells).
template <class C> Stats moments(Row<C> x, int64_t n, C reference) {
  using P = Wide<C>;
  Vec<C> sum{}, square{}, probe{};
  C in[kGroup<C>];
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    P v = load_pack<P>(x.read(i, n, in, reference)), d = v - reference;
    sum += fold(d), square += fold(d * d), probe = fma(fold(v), Vec<C>{}, probe);
  }
  double sums[4] = {0, 0, 0, 0};
  add_sums(sum, square, probe, Vec<C>{}, sums);
  Stats s;
  s.mean = sums[0] / double(n), s.square = sums[1] / double(n), s.probe = sums[2];
  return s;
}

// Sum and sum of squares of the values of a sample, a whole number of groups or nearly.
struct Spread { double sum = 0, square = 0; };
template <class C> Spread spread_of(const C* y, int64_t n) {
  using P = Wide<C>;
  Vec<C> sum{}, square{};
  for (int64_t i = 0; i + kGroup<C> <= n; i += kGroup<C>) {
    P v = load_pack<P>(y + i);
    sum += fold(v), square += fold(v * v);
  }
  return {sum_lanes(sum), sum_lanes(square)};
}

// The range of the finite scores, and how many of each other kind there are.
template <class C> Stats classify(Row<C> x, int64_t n) {
  Vec<C> low = splat(kInf<C>), high = splat(-kInf<C>);
  IVec<C> nan{}, above{}, below{};
  C in[kGroup<C>];
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    const C* group = x.read(i, n, in, -kInf<C>);
    for (int64_t j = 0; j < kGroup<C>; j += kWidth<C>) {
      Vec<C> v = load(group + j);
      IVec<C> finite = v - v == C(0);
      low = (v < low) & finite ? v : low, high = (v > high) & finite ? v : high;
      nan -= v != v, above -= v == kInf<C>, below -= v == -kInf<C>;
    }
  }
  Stats s;
  s.nan = total_count(nan), s.above = total_count(above), s.low = lowest(low), s.high = highest(high);
  s.below = total_count(below) - (kGroup<C> - n % kGroup<C>) % kGroup<C>;
  return s;
}

// How many scores lie above each of four levels.
struct Counts {
  int64_t c[4] = {0, 0, 0, 0};
  void add(const Counts& o) {
    for (int j = 0; j < 4; j++) c[j] += o.c[j];
  }
};
template <class C> struct Levels { C at[4]; };
template <class C> Counts count_above(Row<C> x, int64_t n, Levels<C> levels) {
  const Vec<C> l0 = splat(levels.at[0]), l1 = splat(levels.at[1]), l2 = splat(levels.at[2]), l3 = splat(levels.at[3]);
  IVec<C> c0{}, c1{}, c2{}, c3{};
  C in[kGroup<C>];
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    Wide<C> g = load_pack<Wide<C>>(x.read(i, n, in, -kInf<C>));
    KHOT_EACH(kUnroll, c0 -= g.v[j] > l0, c1 -= g.v[j] > l1, c2 -= g.v[j] > l2, c3 -= g.v[j] > l3);
  }
  return {{total_count(c0), total_count(c1), total_count(c2), total_count(c3)}};
}

// The largest score not above the level and the smallest one above it.
struct Gap {
  double below = -kInf<double>, above = kInf<double>;
  void add(const Gap& o) { below = most(below, o.below), above = least(above, o.above); }
};
template <class C> Gap gap_at(Row<C> x, int64_t n, C level) {
  Vec<C> below = splat(-kInf<C>), above = splat(kInf<C>);
  C in[kGroup<C>];
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    Wide<C> g = load_pack<Wide<C>>(x.read(i, n, in, -kInf<C>));
    KHOT_EACH(kUnroll, {
      auto up = g.v[j] > level;
      below = vmax(below, up ? splat(-kInf<C>) : g.v[j]), above = vmin(above, up ? g.v[j] : splat(kInf<C>));
    });
  }
  return {highest(below), lowest(above)};
}

}  // namespace
