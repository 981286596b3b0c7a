// exp2, log and the normal distribution on vectors.
//
// The coefficients interpolate the function at Chebyshev nodes (computed with 60 digits); the comment at each gives
// the largest relative error of the polynomial, before rounding.
#pragma once
#include "simd.h"

namespace {

template <class V, class T, int N> KHOT_INLINE V horner(V x, const T (&c)[N]) {
  V p = c[N - 1] - V{};
#pragma GCC unroll 32
  for (int i = N - 2; i >= 0; i--) p = fma(p, x, c[i] - V{});
  return p;
}

template <class T> struct Exp2;
template <> struct Exp2<float> {  // (2^f - 1) / f on [-1/2, 1/2], 4e-9
  static constexpr float c[] = {0.693147188026228781f,   0.240226507605681269f,   0.0555035711421907782f,
                                0.00961808255727785149f, 0.00133908633646712344f, 0.000154531629451206902f};
  static constexpr float round = 0x1.8p23f;  // adding it rounds to an integer
  static constexpr int mantissa = 23, bias = 127;
};
template <> struct Exp2<double> {  // 6e-18
  static constexpr double c[] = {0.693147180559945309,    0.240226506959100982,    0.0555041086648215943,
                                 0.00961812910760688853,  0.00133335581464169353,  0.000154035304417360502,
                                 0.0000152527338298361184, 1.32154425879216897e-6, 1.01780624458457735e-7,
                                 7.0725859492692237e-9,   4.45496059818651839e-10};
  static constexpr double round = 0x1.8p52;
  static constexpr int mantissa = 52, bias = 1023;
};
constexpr float Exp2<float>::c[];
constexpr double Exp2<double>::c[];

// 2^f for the fraction, its exponent added to the bits: `shifted` is z plus the rounding constant.
template <class T> KHOT_INLINE Vec<T> exp2_parts(Vec<T> shifted, Vec<T> f) {
  Vec<T> p = fma(horner(f, Exp2<T>::c), f, splat(T(1)));
  return from_bits<T>(bits(p) + (bits(shifted) << Exp2<T>::mantissa));
}
// 2^z. At the two ends of the clamp the bits come out as 0 and infinity exactly. A nan is not kept: rows with one
// are found elsewhere.
template <class T> KHOT_INLINE Vec<T> exp2(Vec<T> z) {
  using K = Exp2<T>;
  z = vmax(splat(T(-K::bias)), vmin(splat(T(K::bias + 1)), z));
  Vec<T> shifted = z + K::round;
  return exp2_parts<T>(shifted, z - (shifted - K::round));
}
// 2^(z + rest) for z <= 0 and a tiny rest; 0 where the result would be subnormal.
template <class T> KHOT_INLINE Vec<T> exp2_sum(Vec<T> z, Vec<T> rest) {
  using K = Exp2<T>;
  const Vec<T> least_power = splat(T(1 - K::bias));
  Vec<T> clamped = vmax(least_power, z), shifted = clamped + K::round;
  Vec<T> power = exp2_parts<T>(shifted, (clamped - (shifted - K::round)) + rest);
  return z > least_power ? power : Vec<T>{};
}

// log(x) of a positive normal x: x = 2^e m with m near 1, log m = 2 atanh((m - 1) / (m + 1)).
template <class T> KHOT_INLINE Vec<T> log(Vec<T> x) {
  using K = Exp2<T>;
  const IVec<T> sqrt_half = bits(splat(T(0.70710678118654752)));
  IVec<T> e = (bits(x) - sqrt_half) >> K::mantissa;
  Vec<T> m = from_bits<T>(bits(x) - (e << K::mantissa));
  // The integer e becomes a float by way of the same rounding constant as in exp2.
  Vec<T> exponent = from_bits<T>(bits(splat(K::round)) + e) - K::round;
  Vec<T> s = (m - T(1)) / (m + T(1)), s2 = s * s, p;
  if (sizeof(T) == 4) {
    const T c[] = {T(2.0 / 3), T(2.0 / 5), T(2.0 / 7), T(2.0 / 9)};
    p = horner(s2, c);
  } else {
    const T c[] = {T(2.0 / 3),  T(2.0 / 5),  T(2.0 / 7),  T(2.0 / 9),  T(2.0 / 11),
                   T(2.0 / 13), T(2.0 / 15), T(2.0 / 17), T(2.0 / 19), T(2.0 / 21)};
    p = horner(s2, c);
  }
  return fma(exponent, splat(T(0.69314718055994531)), fma(p * s2, s, s + s));
}

// Phi(-a) exp(a^2 / 2) (a + 4) as a polynomial in (a - 4) / (a + 4), for a in [0, 15] and [0, 40].
template <class T> struct NormalTail;
template <> struct NormalTail<float> {  // 1.4e-8
  static constexpr float c[] = {0.755285138596192936f,    -0.607896594145081739f,   0.38713668307040542f,
                                -0.186523306757767822f,   0.0604061855142917908f,   -0.00752540241820854468f,
                                -0.00352097282398637407f, 0.00156688168778090475f,  0.000188996519420263973f,
                                -0.000125558385602256097f};
};
template <> struct NormalTail<double> {  // 2e-16
  static constexpr double c[] = {
      0.75528513041575153,      -0.607896641971890853,    0.387137400742204512,     -0.186521857959786915,
      0.0603965748913665972,    -0.00754018896274541213,  -0.00347969237409342504,  0.00163081840120548946,
      0.000133344358889570914,  -0.00023109449502025509,  -1.90838339189112889e-6,  0.0000351426228277637333,
      7.1646936023436911e-7,    -5.91415320776908574e-6,  -6.27371578751470457e-7,  1.01065935246475887e-6,
      2.64883743336709389e-7,   -1.43407955323181932e-7,  -7.50382153817939592e-8,  7.35189900401427611e-9,
      1.1627945885955582e-8,    2.1373040012816807e-9};
};
constexpr float NormalTail<float>::c[];
constexpr double NormalTail<double>::c[];

// exp(-u^2 / 2), with the rounding error of u^2 carried along so that the tail keeps its relative accuracy.
template <class T> KHOT_INLINE Vec<T> exp_half_square(Vec<T> u) {
  const Vec<T> scale = splat(T(-0.72134752044448170)), scale_rest = splat(T(-0.72134752044448170 - double(T(-0.72134752044448170))));
  Vec<T> square = u * u, square_rest = fma(u, u, -square);
  Vec<T> z = square * scale, rest = fma(square, scale, -z);
  return exp2_sum<T>(z, fma(square_rest, scale, fma(square, scale_rest, rest)));
}
// Phi(-a) for a >= 0, given exp(-a^2 / 2).
template <class T> KHOT_INLINE Vec<T> normal_tail(Vec<T> a, Vec<T> gauss) {
  Vec<T> inverse = T(1) / (a + T(4)), s = (a - T(4)) * inverse;
  return gauss * horner(s, NormalTail<T>::c) * inverse;
}

// The density at the quantile, phi(Phi^-1(p)), for 0 <= p <= 1/2, as p r(s) with s = sqrt(-2 log p).
template <class T> struct NormalProfile;
template <> struct NormalProfile<float> {  // r / s in (s - 2) / (s + 2), s in [1.17, 14]: 4e-8
  static constexpr float c[] = {0.803515782297573419f,   0.415016145211281212f,   -0.261024084436346742f,
                                0.0490593286082034809f,  -0.0104602820822408552f, 0.0136722415561611483f,
                                -0.0120953572826317988f, 0.00590735072109046674f, -0.00327962184616378351f};
};
constexpr float NormalProfile<float>::c[];
// The quantile itself over s, in the same variable, s up to 39: 4e-8.
constexpr double kNormalQuantile[] = {
    0.550759842026098114, 1.38754143952201624, -2.03035176893711446, 2.3069846258183135, -2.50071879239310735,
    2.63708638095747776, -2.7577078184832523, 2.89961467838732859, -3.02791273176050392, 2.83911211873282084,
    -2.03132280699377425, 0.916692113981829123, -0.189726259206854452};

KHOT_INLINE VecF normal_profile(VecF p) {
  VecF safe = vmax(splat(1e-37f), p), s = vsqrt(-2.f * log<float>(safe));
  VecF r = s * horner((s - 2.f) / (s + 2.f), NormalProfile<float>::c);
  return p * r;
}
// In double: a first quantile from the table, one Halley step, and phi expanded about the first quantile.
KHOT_INLINE VecD normal_profile(VecD p) {
  VecD safe = vmax(splat(1e-300), p), s = vsqrt(-2.0 * log<double>(safe));
  VecD u = s * horner((s - 2.0) / (s + 2.0), kNormalQuantile);
  VecD gauss = exp_half_square<double>(u), phi = gauss * 0.39894228040143268;
  VecD newton = (normal_tail<double>(u, gauss) - safe) / phi;
  VecD step = newton / (1.0 - 0.5 * u * newton);
  VecD v = phi * (1.0 - u * step + 0.5 * (u * u - 1.0) * step * step);
  return p > 1e-300 ? v : VecD{};
}

}  // namespace
