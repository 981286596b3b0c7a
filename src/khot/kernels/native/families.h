// The four squashing functions F, each with what the solver needs to know about it.
//
// A row's threshold t is carried in two parts: u = (x - high) / tau + low. The first difference is exact near the
// threshold, so the precision does not depend on the size of the scores.
//
// What a pass keeps in the output buffer for the next one makes that one cheap. The exponential families (kCached) keep
// the code exp(-(x - high) / tau), which another threshold only multiplies by a constant. The gaussian (kRefined) keeps
// y itself, which a nearby threshold changes by a short series.
// `kUnit` is the unit of u inside a family: its exponentials are powers of two.
// `measure` returns y (or 1 - y, where k > n/2 and the complement is the smaller and more precise sum), the slope
// v = F'(u), and q, such that the powers q^j v sum to the moments that `step` wants; where the slope has ends (kBent), q is F''(u).
// A family with a parameter (kCurved) finds it in the curve that every row of a call shares.
// A family whose step is exact while no score passes u = 0, where its slope has a kink and is largest (kKinked), is told how near one is.
// A family that is 0 below its foot (kFooted) need not look at most scores again.
// `start` guesses u at the mean of normal scores, from F^-1(k/n), the normal quantile of k/n and variance / tau^2.
// `step` proposes the change of u that brings sum F to k.
#pragma once
#include <cmath>

#include "kernel.h"
#include "vecmath.h"

namespace {

constexpr double kTrusted = 0.4;  // where Newton's step is below it, the series behind the families' steps hold

enum Family { kSigmoid = 0, kEuclidean = 1, kLaplace = 2, kGaussian = 3, kEntmax15 = 4, kEntmax = 5 };

template <class C> struct Shift {  // of one row; or of one row in each lane, with C a vector
  C high, scale, low;
  C factor;  // kCached: what multiplies the codes; kRefined: how far u is from where y was kept
  const KhotCurve* curve = nullptr;
};

template <class P> struct Measured { P y, slope, q; };
template <class P> struct MeasuredKept { P y, slope, q, kept; };

// What one full evaluation leaves behind, per row.
struct Sums {
  Total y;
  double v[6] = {0, 0, 0, 0, 0, 0};  // moments of the slope
  double probe = 0;                  // 0 * x summed: not zero when the row holds an infinity or a nan
  double top = 0;                    // kKinked: the largest slope
  double part[2] = {0, 0};           // v[0] and v[1] over the part that v[2] and v[3] were taken from, if not the whole
  void add(const Sums& o) {
    y.add(o.y), probe += o.probe, top = most(top, o.top), part[0] += o.part[0], part[1] += o.part[1];
    for (int j = 0; j < 6; j++) v[j] += o.v[j];
  }
  // Carries the central moments of the part over to the whole; returns the second.
  double complete() {
    double a1 = part[1] / part[0], a2 = v[2] / part[0], a3 = v[3] / part[0], m1 = v[1] / v[0];
    double c2 = a2 - a1 * a1, c3 = a3 - 3 * a1 * a2 + 2 * a1 * a1 * a1;
    v[2] = v[0] * (m1 * m1 + c2), v[3] = v[0] * (m1 * m1 * m1 + 3 * m1 * c2 + c3);
    return c2;
  }
};

// The normal quantile to 5e-4 (Abramowitz and Stegun 26.2.23): good enough to start from.
inline double rough_normal_quantile(double p, double complement) {
  double s = std::sqrt(-2 * std::log(least(p, complement)));
  double a = s - (2.515517 + s * (0.802853 + s * 0.010328)) / (1 + s * (1.432788 + s * (0.189269 + s * 0.001308)));
  return p < complement ? -a : a;
}

// A Newton step of third order on L = log(S / (n - S)), S = sum F: L is straight in u for rows of equal scores under the sigmoid, and
// nearly so in all tails, where S grows like an exponential. With S' = v0 and S'' = v1,
//   L' = S' n / (S (n - S)),   L'' = n / (S (n - S)) (S'' - S'^2 (n - 2 S) / (S (n - S))),
// and d solves gap = L' d + L'' d^2 / 2, where gap = L(k) - L(S) and S = k - missing. The root is taken in the form that loses no digits.
inline double logit_step(double missing, double k, double rest, double v0, double v1) {
  double s = k - missing, c = rest + missing, n = s + c;
  if (!(s > 0) || !(c > 0) || !(v0 > 0)) return kNan<double>;
  double gap = std::log1p(missing / rest) - std::log1p(-missing / k);
  double first = v0 * n / (s * c), second = n / (s * c) * (v1 - v0 * v0 * (c - s) / (s * c));
  double root = first * first + 2 * second * gap;
  return root > 0 ? 2 * gap / (first + std::sqrt(root)) : gap / first;
}

// Where to start, and the variance over tau^2, if the scores were normal: from the means of x - reference and of its square.
template <class P> struct Start { P at, variance, spread; };
template <class F, class P> Start<P> start_of(P reference, P mean, P square, P tau, P inv_tau, P quantile, P normal) {
  P spread = square - mean * mean, variance = atleast(0.0, spread) * inv_tau * inv_tau;
  return {reference + mean - tau * F::start(quantile, normal, variance), variance, spread};
}

struct Sigmoid {
  static constexpr bool kCached = true, kRefined = false, kBent = false, kCurved = false, kKinked = false, kFooted = false;
  static constexpr double kUnit = -1.4426950408889634;  // exp(-u) = 2^(kUnit u)
  static constexpr int kMoments = 4, kOrder = 5;
  static constexpr double kReach = 3.5;  // a step below kReach eps^(1/kOrder) is as good as exact
  static constexpr double kCentre = 0, kZero = 0;  // F(kCentre) = 1/2; thresholds are told for u = kZero
  template <class P, class Z> static KHOT_INLINE P encode(P x, const Shift<Z>& s) {
    return exp2((x - s.high) * s.scale);
  }
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P value(P code, const Shift<Z>& s) {
    return C(1) / fma(code, P(s.factor), P(1));
  }
  template <bool kComplement, class P, class Z, class C = typename P::T>
  static KHOT_INLINE Measured<P> measure(P code, const Shift<Z>& s) {
    if constexpr (kComplement) {
      P e = atmost(std::numeric_limits<C>::max() / 4, code * s.factor);
      P y = C(1) / (e + C(1)), other = e * y;
      return {other, other * y, fma(P(2), other, P(-1))};
    } else {
      P y = C(1) / fma(code, P(s.factor), P(1));
      return {y, fma(-y, y, y), fma(P(-2), y, P(1))};
    }
  }
  template <class P> static KHOT_INLINE P slope(P y) { return fma(-y, y, y); }
  static double quantile(double p, double complement) { return std::log(p / complement); }
  // The mean of the sigmoid over normal u of mean m and variance s^2 is about sigmoid(m / sqrt(1 + pi s^2 / 8)), the logistic seen as
  // a normal of variance 8 / pi; in the tail it is about exp(m + s^2 / 2). Both estimates of |m| are from above: the smaller is taken.
  template <class P> static P start(P q, P, P variance) {
    P size = absolute(q), guess = smallest(size * square_root(1.0 + 0.39269908 * variance), size + 0.5 * variance);
    return select(q < 0.0, -guess, guess);
  }
  // With e^d = (1 + w) / (1 - w), that is w = tanh(d / 2), and q = 1 - 2y, a score moves from y to y e^d / (1 - y + y e^d), by
  // 2 w v / (1 - w q). The mean of 1 / (1 - w q) over the weights v is replaced by a Gauss rule with two nodes q1, q2, which has the
  // moments m1, m2, m3 of q. With a = q1 + q2 and b = -q1 q2, q^2 - a q - b is orthogonal to 1 and q:
  //   m2 = a m1 + b,  m3 = a m2 + b m1,  hence  a = (m1 m2 - m3) / (m1^2 - m2),  b = (m1 m3 - m2^2) / (m1^2 - m2) ,
  // and the rule gives (1 + w (m1 - a)) / (1 - a w - b w^2). Setting 2 w v0 times that to `missing`, with d = missing / v0:
  //   (2 (m1 - a) + d b) w^2 + (2 + d a) w - d = 0 .
  // Where all q are nearly the same one node does: 2 w / (1 - w m1) = d.
  template <class P> static P step(P missing, P, P, const P* v) {
    P v0 = v[0], inverse = 1.0 / v0, m1 = v[1] * inverse, m2 = v[2] * inverse, m3 = v[3] * inverse, d = missing * inverse;
    P det = m1 * m1 - m2;  // <= 0, and 0 where one node suffices
    auto two = det < -1e-5;
    P over = 1.0 / select(two, det, P(-1));
    P a = (m2 * m1 - m3) * over, b = (m1 * m3 - m2 * m2) * over;
    P qa = 2.0 * (m1 - a) + d * b, qb = 2.0 + d * a, root = qb * qb + 4.0 * qa * d;
    P w2 = 2.0 * d / (qb + square_root(atleast(0.0, root))), w1 = d / atleast(1e-6, 2.0 + d * m1);
    auto usable = two & (root >= 0.0) & (qb > 0.0) & (absolute(w2) < 1.0);
    P w = atleast(-(1 - 1e-7), atmost(1 - 1e-7, select(usable, w2, w1)));
    if (all(absolute(w) < 0.17)) return twice_atanh(w);
    return select(v0 > 0.0, log((1.0 + w) / (1.0 - w)), P(kNan<double>));
  }
};

struct Laplace {
  static constexpr bool kCached = true, kRefined = false, kBent = false, kCurved = false, kKinked = true, kFooted = false;
  static constexpr double kUnit = Sigmoid::kUnit;
  static constexpr int kMoments = 2, kOrder = 3;
  static constexpr double kReach = 1;
  static constexpr double kCentre = 0, kZero = 0;
  template <class P, class Z> static KHOT_INLINE P encode(P x, const Shift<Z>& s) { return Sigmoid::encode(x, s); }
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P value(P code, const Shift<Z>& s) {
    P e = code * s.factor;
    return select(e < C(1), C(1) - C(0.5) * e, C(0.5) / e);
  }
  template <bool kComplement, class P, class Z, class C = typename P::T>
  static KHOT_INLINE Measured<P> measure(P code, const Shift<Z>& s) {
    P e = code * s.factor;
    auto above = e < C(1);
    P tail = C(0.5) * select(above, e, C(1) / e), other = C(1) - tail;
    return {kComplement ? select(above, tail, other) : select(above, other, tail), tail, select(above, P(-1), P(1))};
  }
  template <class P> static KHOT_INLINE P slope(P y) { return smallest(y, typename P::T(1) - y); }
  static double quantile(double p, double complement) {
    return p < complement ? std::log(2 * p) : -std::log(2 * complement);
  }
  template <class P> static P start(P q, P normal, P variance) {
    // Between the quantile of F, for equal scores, and that of the scores, where they are spread far wider than tau.
    P size = square_root(q * q + normal * normal * variance);
    return select(normal < 0.0, -size, size);
  }
  // The scores below the threshold have y = e^u / 2, those above 1 - e^-u / 2. While none crosses it, a step d multiplies the sum C of
  // the first by g = e^d and what the second miss, B, by 1 / g: C (g - 1) + B (1 - 1 / g) = missing, hence
  //   C g^2 - p g - B = 0,   p = missing - B + C .
  // C and B are (v0 +- v1) / 2, as F' is the tail on either side and q its sign. The slope has a kink at the threshold: the scores that
  // cross it are an error of third order.
  template <class P> static P step(P missing, P, P, const P* v) {
    P v0 = v[0], v1 = v[1], below = 0.5 * (v0 + v1), above = 0.5 * (v0 - v1), p = missing - above + below;
    P root = square_root(p * p + 4.0 * below * above);
    P growth = select(p < 0.0, 2.0 * above / (root - p), (p + root) / (2.0 * below));
    return select(v0 > 0.0, log(atleast(1e-8, atmost(1e8, growth))), P(kNan<double>));
  }
};

// Computed in w = kUnit u, see vecmath.h; the slope is measured as 2^(-w^2) and q as w, and `in_u` makes the moments
// those of phi and -u.
struct Gaussian {
  static constexpr bool kCached = false, kRefined = true, kBent = false, kCurved = false, kKinked = false, kFooted = false;
  static constexpr double kUnit = kNormalUnit, kTop = kNormalTop;
  static constexpr int kMoments = 6, kOrder = 7;
  static constexpr double kReach = 1.3;
  static constexpr double kCentre = 0, kZero = 0;
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P argument(P x, const Shift<Z>& s) {
    constexpr C end = sizeof(C) == 4 ? 15 : 40;  // the bell has come to 0 before
    return atleast(-end, atmost(end, fma(x - s.high, P(s.scale), P(s.low))));
  }
  template <class P, class Z> static KHOT_INLINE P encode(P x, const Shift<Z>&) { return x; }
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P value(P x, const Shift<Z>& s) {
    P w = argument(x, s), tail = normal_tail(absolute(w), bell(w));
    return select(negative(w), tail, C(1) - tail);
  }
  template <bool kComplement, class P, class Z, class C = typename P::T>
  static KHOT_INLINE MeasuredKept<P> measure(P x, const Shift<Z>& s) {
    P w = argument(x, s), slope = bell(w), tail = normal_tail(absolute(w), slope), other = C(1) - tail;
    auto below = negative(w);
    P y = select(below, tail, other);
    return {kComplement ? select(below, other, tail) : y, slope, w, y};
  }
  template <class P> static void in_u(P* v) {
    double unit = kTop;
    for (int j = 0; j < kMoments; j++, unit *= -1 / kUnit) v[j] = v[j] * unit;
  }
  // Phi(u + d) from Phi(u), to sixth order: the derivatives of Phi are Phi^(j+1)(u) = (-1)^j He_j(u) phi(u), with the Hermite
  // polynomials He_j, see `step`. Collected by powers of u, the sum of d^(j+1) / (j+1)! times these is phi times a polynomial of degree five
  // in u = w / kUnit, whose coefficients c0..c5 depend on d alone.
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P refine(P x, P y, const Shift<Z>& s) {
    return refine(x, y, bell(argument(x, s)), s);
  }
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P refine(P x, P y, P slope, const Shift<Z>& s) {
    constexpr double a = 1 / kUnit;
    const Z d = s.factor, d2 = d * d, d3 = d2 * d, d4 = d2 * d2;
    const Z c0 = C(kTop) * d * (C(1) + d2 * (C(-1.0 / 6) + d2 * C(1.0 / 40)));
    const Z c1 = C(kTop * a) * d2 * (C(-0.5) + d2 * (C(0.125) - d2 * C(1.0 / 48)));
    const Z c2 = C(kTop * a * a) * d3 * (C(1.0 / 6) - d2 * C(0.05));
    const Z c3 = C(kTop * a * a * a) * d4 * (C(-1.0 / 24) + d2 * C(1.0 / 72));
    const Z c4 = C(kTop * a * a * a * a / 120) * d4 * d, c5 = C(-kTop * a * a * a * a * a / 720) * d4 * d2;
    P w = argument(x, s), square = w * w;
    P even = fma(fma(P(c4), square, P(c2)), square, P(c0)), odd = fma(fma(P(c5), square, P(c3)), square, P(c1));
    return fma(slope, fma(odd, w, even), y);
  }
  template <class P, class C = typename P::T> static KHOT_INLINE P slope(P y) {
    return normal_profile(smallest(y, C(1) - y));
  }
  static double quantile(double p, double complement) { return rough_normal_quantile(p, complement); }
  // The mean of Phi over normal u of mean m and variance s^2 is Phi(m / sqrt(1 + s^2)).
  template <class P> static P start(P q, P, P variance) { return q * square_root(1.0 + variance); }
  // With q = -u, (-1)^j He_j(u) = He_j(q): 1, q, q^2 - 1, q^3 - 3 q, q^4 - 6 q^2 + 3, q^5 - 10 q^3 + 15 q. So sum F moves by the sum of
  // c_(j+1) d^(j+1), c_(j+1) = sum phi He_j(q) / (j+1)!, which the moments give; its root is found by Newton's method from the first
  // order. It is what the series of `refine` sums up to. Where Newton's step is too large for the series, a step on the logit.
  template <class P> static P step(P missing, P k, P rest, const P* v) {
    const P c1 = v[0], c2 = v[1] * 0.5, c3 = (v[2] - v[0]) * (1.0 / 6), c4 = (v[3] - 3.0 * v[1]) * (1.0 / 24);
    const P c5 = (v[4] - 6.0 * v[2] + 3.0 * v[0]) * (1.0 / 120), c6 = (v[5] - 10.0 * v[3] + 15.0 * v[1]) * (1.0 / 720);
    const P first = missing / v[0];
    P d = first;
    for (int i = 0; i < 4; i++) {
      P sum = (((((c6 * d + c5) * d + c4) * d + c3) * d + c2) * d + c1) * d;
      P slope = ((((6.0 * c6 * d + 5.0 * c5) * d + 4.0 * c4) * d + 3.0 * c3) * d + 2.0 * c2) * d + c1;
      d = d + (missing - sum) / slope;
    }
    auto trusted = (absolute(first) < kTrusted) & (absolute(d) < kTrusted);
    for (int i = 0; i < P::U; i++)
      for (int j = 0; j < kWidth<double>; j++)
        if (!trusted.v[i][j]) d.v[i][j] = logit_step(missing.v[i][j], k.v[i][j], rest.v[i][j], v[0].v[i][j], v[1].v[i][j]);
    return d;
  }
};

// F is centred so that F(0) = 1/2; here u is counted from the foot, where y leaves 0, which keeps small y exact. While no score reaches 0
// or 1, sum F is straight, with a slope of as many as are between: Newton's step is exact.
struct Euclidean {
  static constexpr bool kCached = false, kRefined = false, kBent = false, kCurved = false, kKinked = false, kFooted = true;
  static constexpr double kUnit = 1;
  static constexpr int kMoments = 1, kOrder = 2;
  static constexpr double kReach = 0.5;
  static constexpr double kCentre = 0.5, kZero = 0.5;
  template <class P, class Z> static KHOT_INLINE P encode(P x, const Shift<Z>&) { return x; }
  template <class P, class Z, class C = typename P::T> static KHOT_INLINE P value(P x, const Shift<Z>& s) {
    return atleast(C(0), atmost(C(1), fma(x - s.high, P(s.scale), P(s.low))));
  }
  template <bool kComplement, class P, class Z, class C = typename P::T>
  static KHOT_INLINE Measured<P> measure(P x, const Shift<Z>& s) {
    P y = value(x, s);
    return {kComplement ? C(1) - y : y, select((y > C(0)) & (y < C(1)), P(1), P(0)), P(0)};
  }
  template <class P, class C = typename P::T> static KHOT_INLINE P slope(P y) {
    P both = fma(-y, y, y);  // 0 at both ends, and nan where y is
    return select(both > C(0), P(1), both);
  }
  static double quantile(double p, double) { return p; }
  template <class P> static P start(P q, P normal, P variance) { return 0.5 + Laplace::start(q - 0.5, normal, variance); }
  template <class P> static P step(P missing, P, P, const P* v) {
    return select(v[0] > 0.0, missing / v[0], P(kNan<double>));
  }
};

}  // namespace
