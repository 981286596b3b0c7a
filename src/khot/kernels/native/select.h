// The k-th largest of a row that fits into the first cache, by counting.
//
// A pass counts the scores above a pivot and finds its two neighbours among the scores. The pivots come from a normal
// guess, then from the ranks at both ends of what is left; the neighbours make sure that every pass leaves out a score.
// The keys of scores are whole numbers in the same order: halving them bounds the number of passes for any scores.
#pragma once
#include "families.h"
#include "rows.h"

namespace {

constexpr int64_t kBufferBytes = 16384;
template <class C> constexpr int64_t kBuffered = kBufferBytes / int64_t(sizeof(C));  // scores of a row that is copied

// What is selected: all above `value`, and the first `room` of those equal to it.
template <class C> struct Cut {
  C value;
  int64_t room;
};

// Minus the magnitude for negative scores, so that the two zeros have one key.
template <class C> KHOT_INLINE Integer<C> ordered_key(C x) {
  Integer<C> b;
  std::memcpy(&b, &x, sizeof b);
  constexpr Integer<C> magnitude = std::numeric_limits<Integer<C>>::max();
  return b < 0 ? -(b & magnitude) : b;
}
template <class C> KHOT_INLINE C value_at(Integer<C> key) {
  Integer<C> b = key < 0 ? -key | std::numeric_limits<Integer<C>>::min() : key;
  C x;
  std::memcpy(&x, &b, sizeof x);
  return x;
}

// Below the key of -inf.
template <class C> constexpr Integer<C> kBottom = sizeof(C) == 4 ? -Integer<C>(0x7f800000) - 1 : -Integer<C>(0x7ff0000000000000) - 1;

template <class C> KHOT_INLINE C smallest_lane(Vec<C> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(C) == 4) return C(_mm512_reduce_min_ps((__m512)v));
  else return C(_mm512_reduce_min_pd((__m512d)v));
#else
  C x = v[0];
  for (int j = 1; j < kWidth<C>; j++) x = least(x, v[j]);
  return x;
#endif
}
template <class C> KHOT_INLINE int64_t sum_of_counts(IVec<C> v) {
  int64_t sum = 0;
  for (int j = 0; j < kWidth<C>; j++) sum -= v[j];
  return sum;
}

// How many scores lie above the pivot, the smallest of those, and the largest of the others.
template <class C> struct Counted {
  int64_t above;
  C next, below;
};

// `size` is a whole number of groups, with -inf behind the last score.
template <class C> KHOT_INLINE Counted<C> count_above(const C* x, int64_t size, C pivot) {
  const Vec<C> t = splat(pivot), top = splat(kInf<C>);
  IVec<C> above[kUnroll] = {};
  Vec<C> next[2] = {top, top}, minus_below[2] = {top, top};
  for (int64_t i = 0; i < size; i += kGroup<C>) {
    KHOT_EACH(kUnroll, Vec<C> v = load(x + i + j * kWidth<C>); IVec<C> m = v > t; above[j] += m;
              next[j & 1] = vmin(next[j & 1], m ? v : top); minus_below[j & 1] = vmin(minus_below[j & 1], m ? top : -v));
  }
  return {sum_of_counts<C>((above[0] + above[1]) + (above[2] + above[3])), smallest_lane<C>(vmin(next[0], next[1])),
          -smallest_lane<C>(vmin(minus_below[0], minus_below[1]))};
}

// Where the k-th largest of n normal scores lies, and how far it is from there to the next, in standard deviations.
struct NormalRank {
  int64_t k = -1, n = -1;
  double place = 0, step = 0;
  void set(int64_t k_, int64_t n_) {
    if (k == k_ && n == n_) return;
    k = k_, n = n_;
    double p = (double(k) - 0.5) / double(n);
    place = -rough_normal_quantile(p, 1 - p);
    step = 2.5066 * std::exp(place * place / 2) / double(n);  // 1 / (n * density)
  }
};

// A row, copied, with -inf behind it up to a whole group, and its rough moments.
template <class C> struct Copied {
  alignas(64) C values[kBuffered<C> + kGroup<C>];
  int64_t size = 0;
  double mean = 0, deviation = 0;
  bool has_nan = false;

  void copy(const Row<C>& row, int64_t n) {
    C start = row.first();
    if (!(start - start == 0)) start = 0;
    size = (n + kGroup<C> - 1) / kGroup<C> * kGroup<C>;
    const Vec<C> reference = splat(start), far = splat(C(1e18));
    Vec<C> sum{}, square{};
    IVec<C> strange{};
    C buffer[kGroup<C>];
    for (int64_t i = 0; i < size; i += kGroup<C>) {
      const C* p = row.read(i, n, buffer, start);
      KHOT_EACH(kUnroll, Vec<C> v = load(p + j * kWidth<C>); store(values + i + j * kWidth<C>, v); strange |= v != v;
                Vec<C> d = v - reference; d = vabs(d) < far ? d : Vec<C>{}; sum += d; square = fma(d, d, square));
    }
    for (int64_t i = n; i < size; i++) values[i] = -kInf<C>;
    has_nan = sum_of_counts<C>(strange) > 0;
    double m = sum_lanes(sum) / double(n);
    mean = double(start) + m, deviation = std::sqrt(most(sum_lanes(square) / double(n) - m * m, 0.0));
  }
};

template <class C> class Search {
 public:
  // The k-th largest for 0 < k <= n, or, with slack, a value that about k scores are above. All scores are above the key
  // `floor`, and the cut is not below it.
  static Cut<C> find(const Copied<C>& row, int64_t n, int64_t k, int64_t slack, NormalRank& rank, Integer<C> floor = kBottom<C>) {
    rank.set(k, n);
    return Search{row, n, k, slack, floor}.run(row.mean + rank.place * row.deviation, rank.step * row.deviation);
  }

 private:
  using Key = Integer<C>;
  using Unsigned = std::make_unsigned_t<Key>;

  const Copied<C>& row;
  int64_t k, slack;
  // The key wanted is above `low` and not above `high`; so many scores are above the two.
  Key low, high;
  int64_t above_low, above_high;

  Search(const Copied<C>& r, int64_t n, int64_t k_, int64_t s, Key floor)
      : row(r), k(k_), slack(s), low(floor), high(ordered_key(kInf<C>)), above_low(n), above_high(0) {}

  Unsigned width() const { return Unsigned(high) - Unsigned(low); }
  Key middle() const { return Key(Unsigned(low) + width() / 2); }

  Cut<C> run(double guess, double step) {
    double pivot = guess;
    bool from_below = false, from_above = false;
    for (int pass = 0; width() > 1; pass++) {
      Key key = settle(pivot);
      Counted<C> c = count_above(row.values, row.size, value_at<C>(key));
      if (c.above <= k + slack && c.above >= k - slack) return {value_at<C>(key), 0};
      if (c.above > k) low = ordered_key(c.next) - 1, above_low = c.above, from_below = true;
      else high = ordered_key(c.below), above_high = c.above, from_above = true;
      if (pass > 2 || (from_below && from_above)) pivot = between(pass);
      else pivot = value_at<C>(key) + beyond(double(c.above - k), pass) * step;
    }
    return {value_at<C>(high), k - above_high};
  }
  // A pivot that separates at least one score from the others.
  Key settle(double pivot) const {
    if (!(std::fabs(pivot) <= double(std::numeric_limits<C>::max()))) return middle();
    return most<Key>(low + 1, least<Key>(high - 1, ordered_key(C(pivot))));
  }
  // A little too far, so that the next pivot is on the other side.
  static double beyond(double gap, int pass) {
    double margin = (1 + 0.25 * std::fabs(gap)) * (pass ? 4 : 1);
    return gap > 0 ? gap + margin : gap - margin;
  }
  // Both ends are scores, with the others spread evenly between them; every fourth pass halves the keys instead.
  double between(int pass) const {
    if (pass % 4 == 3) return kNan<double>;
    double top = value_at<C>(high), bottom = value_at<C>(low + 1), others = double(above_low - above_high - 1);
    return top - (top - bottom) * ((double(k - above_high) - 0.5) / others);
  }
};

}  // namespace
