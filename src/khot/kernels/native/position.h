// Where a threshold is: a position on the line of numbers, and the two positions between which the root lies.
//
// A position is a pair (high, low) and stands for t = high - low tau. high is a number of the scores' own type, so that
// x - high is exact for the scores near the threshold; low is the rest, in units of tau. The pair keeps the distance
// from the scores at `high` to a fraction of tau even where `high` is so large that t itself, as one number, would not.
#pragma once
#include "passes.h"

namespace {

// Numbers of a type are counted from the smallest to the largest: halving an interval of ranks does not depend on scale,
// and ends after as many steps as the type has bits.
inline int64_t rank_of(float x) {
  int32_t i;
  std::memcpy(&i, &x, sizeof i);
  return i < 0 ? int64_t(INT32_MIN) - i : i;
}
inline int64_t rank_of(double x) {
  int64_t i;
  std::memcpy(&i, &x, sizeof i);
  return i < 0 ? INT64_MIN - i : i;
}
inline void of_rank(int64_t r, float& x) {
  int32_t i = int32_t(r < 0 ? int64_t(INT32_MIN) - r : r);
  std::memcpy(&x, &i, sizeof x);
}
inline void of_rank(int64_t r, double& x) {
  int64_t i = r < 0 ? INT64_MIN - r : r;
  std::memcpy(&x, &i, sizeof x);
}
// The rank half-way between, rounded down, without overflow.
inline int64_t rank_between(int64_t a, int64_t b) { return (a & b) + ((a ^ b) >> 1); }

// |low| stays below this. Between a number and the next there are no scores: where these are further apart than 2 kFar
// tau, every position beyond kFar has the same y, 0 or 1 to within the smallest number. exp(kFar) is finite.
template <class C> constexpr double kFar = sizeof(C) == 4 ? 87 : 700;

template <class C> struct Position {
  C high = 0;
  double low = 0;
};

// The positions of one row, and the two between which its root lies: at `lower` sum F is too small, at `upper` it is large
// enough. They are kept as they were tried, and never rounded.
template <class C> struct Bracket {
  double tau = 1, inv_tau = 1;
  C bottom = -std::numeric_limits<C>::max(), top = std::numeric_limits<C>::max();  // high stays in this range
  Position<C> lower{C(0), -kInf<double>}, upper{C(0), kInf<double>};

  // The low of the position p if its high were `high`.
  double seen_from(C high, Position<C> p) const { return p.low + (double(high) - double(p.high)) * inv_tau; }

  // The same position with the nearest possible high.
  Position<C> nearest(Position<C> p) const {
    const C high = C(most(double(bottom), least(double(top), double(p.high) - p.low * tau)));
    return {high, most(-kFar<C>, least(kFar<C>, seen_from(high, p)))};
  }
  // The position t = at.
  Position<C> position(double at) const {
    const C high = C(most(double(bottom), least(double(top), at)));
    return {high, most(-kFar<C>, least(kFar<C>, (double(high) - at) * inv_tau))};
  }

  bool holds(Position<C> p) const { return seen_from(p.high, lower) < p.low && p.low < seen_from(p.high, upper); }
  // What sum F at p tells. A position outside tells nothing new.
  void learn(Position<C> p, bool too_small) {
    if (holds(p)) (too_small ? lower : upper) = p;
  }
  // The position, or the end of the bracket that is next to it.
  Position<C> inside(Position<C> p) const {
    if (p.low <= seen_from(p.high, lower)) return nearest(lower);
    return p.low < seen_from(p.high, upper) ? p : nearest(upper);
  }
  // A position in the middle: by u where the ends are near, by rank where they are far. False when there is none.
  bool middle(Position<C>& out) const {
    constexpr double near = 64;  // beyond it F is flat, or nearly
    const double width = seen_from(lower.high, upper) - lower.low;
    const C above = nearest(lower).high, below = nearest(upper).high;
    const int64_t a = rank_of(below), b = rank_of(above);
    if (!(width <= near) && b > a && uint64_t(b) - uint64_t(a) > 1) {
      out.low = 0, of_rank(rank_between(a, b), out.high);
      if (holds(out)) return true;
    }
    // Two numbers with nothing between them but a wide gap: its middle, then either end of it.
    const Position<C> choices[] = {nearest({lower.high, lower.low + 0.5 * width}), {above, kFar<C>}, {below, -kFar<C>}};
    for (const Position<C>& p : choices)
      if (holds(p)) return out = p, true;
    return false;
  }
};

}  // namespace
