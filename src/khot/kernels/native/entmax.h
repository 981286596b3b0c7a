// Entmax top-k. With a = alpha - 1, counted from the foot in units of the half width (Python divides tau by a 2^a):
//   y^a + 1 - (1 - y)^a = u,   u in [0, 2],   F(2 - u) = 1 - F(u) .
//
// alpha = 1.5 has a closed form; for any other the tail comes from a table, see curve.h.
#pragma once
#include "curve.h"

namespace {

// d with missing = v0 d + v1 d^2 / 2, or the step on the logit where the sum is far from k.
template <class P> P bent_step(P missing, P k, P rest, P v0, P v1) {
  P root = v0 * v0 + 2.0 * v1 * missing, d = 2.0 * missing / (v0 + square_root(atleast(0.0, root)));
  d = select(root > 0.0, d, missing / v0);
  auto near = absolute(missing) < 0.3 * smallest(k, rest);
  if (all(near)) return select(v0 > 0.0, d, P(kNan<double>));
  // As logit_step, in every lane.
  P s = k - missing, c = rest + missing, n = s + c, over = n / (s * c), odds = k * c / (rest * s);
  P gap = log(select(odds > 0.0, odds, P(1.0)));  // a logarithm of what is not positive has no bits
  P first = v0 * over, second = over * (v1 - v0 * v0 * (c - s) / (s * c)), under = first * first + 2.0 * second * gap;
  P far = select(under > 0.0, 2.0 * gap / (first + square_root(atleast(0.0, under))), gap / first);
  return select((v0 > 0.0) & (s > 0.0) & (c > 0.0), select(near, d, far), P(kNan<double>));
}

struct Entmax15 {
  static constexpr bool kCached = false, kRefined = false, kBent = true, kCurved = false, kKinked = false, kFooted = true;
  static constexpr double kUnit = 1;
  static constexpr int kMoments = 2, kOrder = 3;
  static constexpr double kReach = 0.7;
  static constexpr double kCentre = 1, kZero = 0;
  template <class P, class Z> static KHOT_INLINE P encode(P x, const Shift<Z>&) { return x; }
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P argument(P x, const Shift<Z>& s) {
    return atleast(C(0), atmost(C(2), fma(x - s.high, P(s.scale), P(s.low))));
  }
  // With s = 1 - u and w = 1 - s^2 = 2 sqrt(y (1 - y)): the tail is (1 - |s| sqrt(1 + w)) / 2, here in the form that loses no digits.
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P value(P x, const Shift<Z>& shift) {
    P u = argument(x, shift), w = u * (C(2) - u), s = C(1) - u;
    P tail = C(0.5) * w * w / fma(absolute(s), square_root(w + C(1)), P(1));
    return select(u < C(1), tail, C(1) - tail);
  }
  // F' = w / sqrt(1 + w) and F'' = s (2 + w) / (1 + w)^(3/2), which ends at u = 0 and 2. One division serves all.
  template <bool kComplement, class P, class Z, class C = typename P::T>
  static KHOT_INLINE Measured<P> measure(P x, const Shift<Z>& shift) {
    P u = argument(x, shift), w = u * (C(2) - u), s = C(1) - u, square = w + C(1), r = square_root(square);
    P denominator = fma(absolute(s), r, P(1)), lower = r * square, over = C(1) / (denominator * lower), bend = s * (w + C(2)) * (denominator * over);
    P tail = C(0.5) * w * w * (lower * over), other = C(1) - tail;
    auto below = u < C(1);
    if (kComplement) below = ~below;
    return {select(below, tail, other), w * square * (denominator * over), select(w > C(0), bend, P(0))};
  }
  template <class P, class C = typename P::T> static KHOT_INLINE P slope(P y) {
    P w = C(2) * square_root(fma(-y, y, y));
    return w / square_root(w + C(1));
  }
  static double quantile(double p, double complement) { return 1 + std::sqrt(p) - std::sqrt(complement); }
  template <class P> static P start(P q, P normal, P variance) { return 1.0 + Laplace::start(q - 1.0, normal, variance); }
  template <class P> static P step(P missing, P k, P rest, const P* v) { return bent_step(missing, k, rest, v[0], v[1]); }
};

struct Entmax {
  static constexpr bool kCached = false, kRefined = false, kBent = true, kCurved = true, kKinked = false, kFooted = true;
  static constexpr double kUnit = 1;
  static constexpr int kMoments = 2, kOrder = 3;
  static constexpr double kReach = 0.3;
  static constexpr double kCentre = 1, kZero = 0;
  template <class P, class Z> static KHOT_INLINE P encode(P x, const Shift<Z>&) { return x; }
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P value(P x, const Shift<Z>& s) {
    P u = Entmax15::argument(x, s), tail = tail_of<false>(smallest(u, C(2) - u), *s.curve).q;
    return select(u < C(1), tail, C(1) - tail);
  }
  template <bool kComplement, class P, class Z, class C = typename P::T>
  static KHOT_INLINE Measured<P> measure(P x, const Shift<Z>& s) {
    P u = Entmax15::argument(x, s);
    auto [tail, slope, bend] = tail_of<true>(smallest(u, C(2) - u), *s.curve);
    auto below = u < C(1);
    bend = select(below, bend, -bend);
    if (kComplement) below = ~below;
    return {select(below, tail, C(1) - tail), slope, bend};
  }
  // 1 / (a (p^(a - 1) + (1 - p)^(a - 1))) inside, 0 at both ends.
  template <class P, class C = typename P::T> static KHOT_INLINE P slope(P y, const KhotCurve& curve) {
    const C power = C(curve.a - 1);
    P p = smallest(y, C(1) - y), least_p = std::numeric_limits<C>::min(), safe = select(p >= least_p, p, least_p);
    P low = power_of(safe, power), high = power_of(C(1) - safe, power);
    return select(p == p, select(p > C(0), C(1 / curve.a) / (low + high), P(0)), p);
  }
  static double quantile(double p, double complement, const KhotCurve& curve) {
    return 1 + std::pow(p, curve.a) - std::pow(complement, curve.a);
  }
  template <class P> static P start(P q, P normal, P variance) { return Entmax15::start(q, normal, variance); }
  template <class P> static P step(P missing, P k, P rest, const P* v) { return bent_step(missing, k, rest, v[0], v[1]); }
};

}  // namespace
