// The four squashing functions F, each with what the solver needs to know about it.
//
// A row's threshold t is carried in two parts: u = (x - high) / tau + low. The first difference is exact near the
// threshold, so the precision does not depend on the size of the scores.
//
// `Code` is what a pass may keep in the output buffer between evaluations at different thresholds: for the
// exponential families exp(-(x - high) / tau), which another threshold only multiplies by a constant.
// `measure` returns y (or 1 - y, where k > n/2 and the complement is the smaller and more precise sum), the slope
// v = F'(u), and q, such that the powers q^j v sum to the moments that `step` wants.
// `step` proposes the change of u that brings sum F to k.
#pragma once
#include <cmath>

#include "vecmath.h"

namespace {

enum Family { kSigmoid = 0, kEuclidean = 1, kLaplace = 2, kGaussian = 3 };

template <class C> struct Shift {  // broadcast once per pass
  Vec<C> high, scale, low, low_rest, factor;
};

template <class C> struct Measured { Vec<C> y, slope, q; };

// What one full evaluation leaves behind, per row.
struct Sums {
  double y = 0, v0 = 0, v1 = 0, v2 = 0, v3 = 0;
  double probe = 0;  // 0 * x summed: not zero when the row holds an infinity or a nan
  void add(const Sums& o) {
    y += o.y, v0 += o.v0, v1 += o.v1, v2 += o.v2, v3 += o.v3, probe += o.probe;
  }
};

// The normal quantile to 5e-4 (Abramowitz and Stegun 26.2.23): good enough to start from.
inline double rough_normal_quantile(double p, double complement) {
  double s = std::sqrt(-2 * std::log(least(p, complement)));
  double a = s - (2.515517 + s * (0.802853 + s * 0.010328)) / (1 + s * (1.432788 + s * (0.189269 + s * 0.001308)));
  return p < complement ? -a : a;
}

// A Newton step of third order on logit(sum F / n): straight for rows of equal scores and for pure tails.
inline double logit_step(double missing, double k, double rest, double v0, double v1) {
  double s = k - missing, c = rest + missing, n = s + c;
  if (!(s > 0) || !(c > 0) || !(v0 > 0)) return kNan<double>;
  double gap = std::log1p(missing / rest) - std::log1p(-missing / k);
  double first = v0 * n / (s * c), second = n / (s * c) * (v1 - v0 * v0 * (c - s) / (s * c));
  double root = first * first + 2 * second * gap;
  return root > 0 ? 2 * gap / (first + std::sqrt(root)) : gap / first;
}

struct Sigmoid {
  static constexpr bool kCached = true;
  static constexpr int kMoments = 4, kOrder = 5;
  static constexpr double kCentre = 0;  // F(kCentre) = 1/2
  template <class C> static KHOT_INLINE Vec<C> encode(Vec<C> x, const Shift<C>& s) {
    return exp2<C>((x - s.high) * s.scale);
  }
  template <class C> static KHOT_INLINE Vec<C> value(Vec<C> code, const Shift<C>& s) {
    return C(1) / fma(code, s.factor, splat(C(1)));
  }
  template <bool kComplement, class C>
  static KHOT_INLINE Measured<C> measure(Vec<C> code, const Shift<C>& s) {
    Vec<C> e = code * s.factor;
    if (kComplement) e = vmin(splat(std::numeric_limits<C>::max() / 4), e);
    Vec<C> y = C(1) / (e + C(1)), other = e * y;
    if (kComplement) return {other, other * y, fma(splat(C(2)), other, splat(C(-1)))};
    return {y, fma(-y, y, y), fma(splat(C(-2)), y, splat(C(1)))};
  }
  template <class C> static KHOT_INLINE Vec<C> slope(Vec<C> y) { return fma(-y, y, y); }
  static double quantile(double p, double complement) { return std::log(p / complement); }
  static double start(double q, double, double variance) { return q * std::sqrt(1 + 0.39269908 * variance); }
  // With w = tanh(d/2) and q = 1 - 2y, sum F moves by 2w sum v / (1 - wq). The four moments of v over q give a two
  // node Gauss rule for that sum, and w is the root of a quadratic.
  static VecD step(VecD missing, VecD, VecD, VecD v0, VecD v1, VecD v2, VecD v3) {
    const VecD zero{}, one = splat(1.0);
    VecD inverse = 1.0 / v0, m1 = v1 * inverse, m2 = v2 * inverse, m3 = v3 * inverse, d = missing * inverse;
    VecD det = m1 * m1 - m2;  // <= 0, and 0 where one node suffices
    IntD two = det < -1e-5;
    VecD over = 1.0 / (two ? det : -one);
    VecD a = (m2 * m1 - m3) * over, b = (m1 * m3 - m2 * m2) * over;
    VecD qa = 2.0 * (m1 - a) + d * b, qb = 2.0 + d * a, root = qb * qb + 4.0 * qa * d;
    IntD usable = two & (root >= 0.0) & (qb > 0.0);
    VecD w2 = 2.0 * d / (qb + vsqrt(root > zero ? root : zero));
    VecD slope1 = 2.0 + d * m1, w1 = d / (slope1 > 1e-6 ? slope1 : 1e-6 * one);
    VecD w = usable & (vabs(w2) < 1.0) ? w2 : w1;
    const VecD limit = splat(1 - 1e-7);
    w = w < limit ? w : limit;
    w = w > -limit ? w : -limit;
    VecD step = log<double>((1.0 + w) / (1.0 - w));
    return v0 > 0.0 ? step : splat(kNan<double>);
  }
};

struct Laplace {
  static constexpr bool kCached = true;
  static constexpr int kMoments = 2, kOrder = 3;
  static constexpr double kCentre = 0;
  template <class C> static KHOT_INLINE Vec<C> encode(Vec<C> x, const Shift<C>& s) { return Sigmoid::encode<C>(x, s); }
  template <class C> static KHOT_INLINE Vec<C> value(Vec<C> code, const Shift<C>& s) {
    Vec<C> e = code * s.factor;
    return e < C(1) ? C(1) - C(0.5) * e : C(0.5) / e;
  }
  template <bool kComplement, class C>
  static KHOT_INLINE Measured<C> measure(Vec<C> code, const Shift<C>& s) {
    Vec<C> e = code * s.factor;
    auto above = e < C(1);
    Vec<C> tail = C(0.5) * (above ? e : C(1) / e), other = C(1) - tail;
    return {(kComplement ? above : ~above) ? tail : other, tail, above ? splat(C(-1)) : splat(C(1))};
  }
  template <class C> static KHOT_INLINE Vec<C> slope(Vec<C> y) { return vmin(y, C(1) - y); }
  static double quantile(double p, double complement) {
    return p < complement ? std::log(2 * p) : -std::log(2 * complement);
  }
  static double start(double q, double normal, double variance) {
    return std::copysign(std::sqrt(q * q + normal * normal * variance), normal);
  }
  // While no score crosses the threshold, the scores below sum to C e^d and those above miss B e^-d: a quadratic in
  // e^d. The crossings are an error of third order.
  static VecD step(VecD missing, VecD, VecD, VecD v0, VecD v1, VecD, VecD) {
    VecD below = 0.5 * (v0 + v1), above = 0.5 * (v0 - v1), p = missing - above + below;
    VecD root = vsqrt(p * p + 4.0 * below * above);
    VecD growth = p < 0.0 ? 2.0 * above / (root - p) : (p + root) / (2.0 * below);
    growth = growth > 1e-8 ? growth : splat(1e-8);
    growth = growth < 1e8 ? growth : splat(1e8);
    return v0 > 0.0 ? log<double>(growth) : splat(kNan<double>);
  }
};

struct Gaussian {
  static constexpr bool kCached = false;
  static constexpr int kMoments = 2, kOrder = 3;
  static constexpr double kCentre = 0;
  // u to more than its own precision: the second part enters to first order.
  template <class C> static KHOT_INLINE Vec<C> argument(Vec<C> x, const Shift<C>& s, Vec<C>& rest) {
    Vec<C> p = (x - s.high) * s.scale, u = p + s.low, back = u - p;
    rest = (p - (u - back)) + (s.low - back) + s.low_rest;
    const Vec<C> limit = splat(C(40));
    auto inside = vabs(u) < limit;
    rest = inside ? rest : Vec<C>{};
    return vmax(-limit, vmin(limit, u));
  }
  template <class C> static KHOT_INLINE Vec<C> encode(Vec<C> x, const Shift<C>&) { return x; }
  template <class C> static KHOT_INLINE Vec<C> value(Vec<C> x, const Shift<C>& s) {
    Vec<C> rest, u = argument<C>(x, s, rest), gauss = exp_half_square<C>(u), tail = normal_tail<C>(vabs(u), gauss);
    return fma(gauss * C(0.39894228040143268), rest, u < C(0) ? tail : C(1) - tail);
  }
  template <bool kComplement, class C>
  static KHOT_INLINE Measured<C> measure(Vec<C> x, const Shift<C>& s) {
    Vec<C> rest, u = argument<C>(x, s, rest), gauss = exp_half_square<C>(u), tail = normal_tail<C>(vabs(u), gauss);
    Vec<C> slope = gauss * C(0.39894228040143268);
    Vec<C> y = (kComplement ? u > C(0) : u < C(0)) ? tail : C(1) - tail;
    return {fma(slope, kComplement ? -rest : rest, y), slope, -u};
  }
  template <class C> static KHOT_INLINE Vec<C> slope(Vec<C> y) {
    return y == y ? normal_profile(vmin(y, C(1) - y)) : y;
  }
  static double quantile(double p, double complement) { return rough_normal_quantile(p, complement); }
  static double start(double q, double, double variance) { return q * std::sqrt(1 + variance); }
  static VecD step(VecD missing, VecD k, VecD rest, VecD v0, VecD v1, VecD, VecD) {
    VecD d;
    for (int j = 0; j < kWidth<double>; j++) d[j] = logit_step(missing[j], k[j], rest[j], v0[j], v1[j]);
    return d;
  }
};

// F is centred so that F(0) = 1/2; here u is counted from the foot, where y leaves 0, which keeps small y exact.
struct Euclidean {
  static constexpr bool kCached = false;
  static constexpr int kMoments = 1, kOrder = 2;
  static constexpr double kCentre = 0.5;
  template <class C> static KHOT_INLINE Vec<C> encode(Vec<C> x, const Shift<C>&) { return x; }
  template <class C> static KHOT_INLINE Vec<C> argument(Vec<C> x, const Shift<C>& s) {
    return fma(x - s.high, s.scale, s.low);
  }
  template <class C> static KHOT_INLINE Vec<C> value(Vec<C> x, const Shift<C>& s) {
    return vmax(Vec<C>{}, vmin(splat(C(1)), argument<C>(x, s)));
  }
  template <bool kComplement, class C>
  static KHOT_INLINE Measured<C> measure(Vec<C> x, const Shift<C>& s) {
    Vec<C> u = argument<C>(x, s), y = vmax(Vec<C>{}, vmin(splat(C(1)), u));
    Vec<C> slope = (u > C(0)) & (u < C(1)) ? splat(C(1)) : Vec<C>{};
    return {kComplement ? C(1) - y : y, slope, Vec<C>{}};
  }
  template <class C> static KHOT_INLINE Vec<C> slope(Vec<C> y) {
    return y == y ? ((y > C(0)) & (y < C(1)) ? splat(C(1)) : Vec<C>{}) : y;
  }
  static double quantile(double p, double) { return p; }
  static double start(double q, double normal, double variance) {
    return 0.5 + std::copysign(std::sqrt((q - 0.5) * (q - 0.5) + normal * normal * variance), normal);
  }
  static VecD step(VecD missing, VecD, VecD, VecD v0, VecD, VecD, VecD) {
    return v0 > 0.0 ? missing / v0 : splat(kNan<double>);
  }
};

}  // namespace
