// exp2, log and the normal distribution on packs of vectors.
//
// The coefficients interpolate the function at Chebyshev nodes (computed with 60 digits); the comment at each gives
// the largest relative error of the polynomial, before rounding.
#pragma once
#include "pack.h"

namespace {

// The polynomial with coefficients c, lowest first: one in x^2 for the even powers and one for the odd, side by side, which
// halves the chain of operations that wait for each other.
template <class P, int N> KHOT_INLINE P horner(P x, const typename P::T (&c)[N]) {
  constexpr int top = (N - 1) / 2 * 2, next = N % 2 ? N - 2 : N - 1;
  P square = x * x, even = c[top], odd = c[next];
#pragma GCC unroll 32
  for (int i = top - 2; i >= 0; i -= 2) even = fma(even, square, P(c[i]));
#pragma GCC unroll 32
  for (int i = next - 2; i > 0; i -= 2) odd = fma(odd, square, P(c[i]));
  return fma(odd, x, even);
}

template <class T> struct Exp2;
template <> struct Exp2<float> {  // (2^f - 1) / f on [-1/2, 1/2]; the best of its degree for 2^f, 9e-8
  static constexpr float c[] = {0.693146977599f, 0.240222420861f, 0.0555073374689f, 0.00967151261705f, 0.00132647258832f};
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
template <class P> KHOT_INLINE P exp2_parts(P shifted, P f) {
  using K = Exp2<typename P::T>;
  P p = fma(horner(f, K::c), f, P(1));
  KHOT_EACH(P::U, p.v[j] = from_bits<typename P::T>(bits(p.v[j]) + (bits(shifted.v[j]) << K::mantissa)));
  return p;
}
// 2^z. A nan may be lost: rows with one are found elsewhere.
template <class P> KHOT_INLINE P exp2(P z) {
  using T = typename P::T;
  using K = Exp2<T>;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {  // the fraction of an infinity is 0
    P f = z;
    KHOT_EACH(P::U, f.v[j] = (VecF)_mm512_reduce_ps((__m512)z.v[j], 0));
    P p = fma(horner(f, K::c), f, P(1));
    KHOT_EACH(P::U, p.v[j] = (VecF)_mm512_scalef_ps((__m512)p.v[j], (__m512)(z.v[j] - f.v[j])));
    return p;
  }
#endif
  z = atleast(T(-K::bias), atmost(T(K::bias + 1), z));  // at the two ends the bits come out as 0 and infinity exactly
  P shifted = z + K::round;
  return exp2_parts(shifted, z - (shifted - K::round));
}

// A positive normal x as 2^exponent m with m in [0.707, 1.414).
template <class P> struct Split { P exponent, m; };
template <class P> KHOT_INLINE Split<P> split(P x) {
  using T = typename P::T;
  using K = Exp2<T>;
  Split<P> s;
  KHOT_EACH(P::U, {
    IVec<T> e = (bits(x.v[j]) - bits(splat(T(0.70710678118654752)))) >> K::mantissa;
    s.m.v[j] = from_bits<T>(bits(x.v[j]) - (e << K::mantissa));
    s.exponent.v[j] = from_bits<T>(bits(splat(K::round)) + e) - K::round;  // the rounding constant turns e into a number
  });
  return s;
}

constexpr double kLogSeries[] = {2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13, 2.0 / 15, 2.0 / 17, 2.0 / 19, 2.0 / 21};
// 2 atanh(s) = 2s + s^3 (2/3 + 2/5 s^2 + ...) for |s| < 0.172.
template <int U> KHOT_INLINE Pack<double, U> twice_atanh(Pack<double, U> s) {
  Pack<double, U> s2 = s * s;
  return fma(horner(s2, kLogSeries) * s2, s, s + s);
}
// log m = 2 atanh((m - 1) / (m + 1)).
template <int U> KHOT_INLINE Pack<double, U> log(Pack<double, U> x) {
  using P = Pack<double, U>;
  auto [exponent, m] = split(x);
  return fma(exponent, P(0.69314718055994531), twice_atanh((m - 1.0) / (m + 1.0)));
}

constexpr float kLog2[] = {  // log2(1 + f) / f, in error by 1.5e-8 / f
    1.44269500356798217f, -0.721347468249562452f, 0.480910753459412559f, -0.360693268135336163f, 0.28790326092450148f,
    -0.2391698814010418f, 0.21607822552243776f,   -0.205861880512760548f, 0.123109684671914598f};
template <int U> KHOT_INLINE Pack<float, U> log2(Pack<float, U> x) {
  auto [exponent, m] = split(x);
  Pack<float, U> f = m - 1.f;
  return fma(horner(f, kLog2), f, exponent);
}

// The normal distribution is computed in w = u sqrt(log2(e) / 2), so that its bell exp(-u^2 / 2) is 2^(-w^2).
constexpr double kNormalUnit = 0.84932180028801904, kNormalTop = 0.39894228040143268;  // the latter: phi(0)

// 2^(-w^2) for |w| < 15 (float) or 45 (double): below the smallest normal number it falls to 0 more quickly.
template <class P> KHOT_INLINE P bell(P w) {
  using T = typename P::T;
  using K = Exp2<T>;
  P square = w * w, shifted = K::round - square, power = exp2_parts(shifted, (K::round - shifted) - square);
  KHOT_EACH(P::U, power.v[j] = from_bits<T>(bits(power.v[j]) > 0 ? bits(power.v[j]) : IVec<T>{}));
  return power;
}

// Phi(-u) 2^(w^2) (w + 4) as a polynomial in (w - 4) / (w + 4), for w in [0, 11.3] and [0, 32].
template <class T> struct NormalTail;
template <> struct NormalTail<float> {  // 2.5e-8
  static constexpr float c[] = {0.650522397790625614f,  -0.553373591546224531f,  0.397564051832306214f,
                                -0.23719932773779987f,  0.113619346163901552f,   -0.0406154986413978499f,
                                0.00864272200792273243f, 0.000529583055027124753f, -0.0010073930326263444f};
};
template <> struct NormalTail<double> {  // 7e-17
  static constexpr double c[] = {
      0.650522399167735924,     -0.553373439271827711,    0.397563606966384692,     -0.237203499178358207,
      0.113627823885394579,     -0.0405802712351754268,   0.00860087665085457803,   0.000395578010860184075,
      -0.000962618314395838242, 0.000209741775704240982,  0.0000666816056958568941, -0.0000378579960906641895,
      -3.75034288470968009e-6,  5.6956054475562326e-6,    1.89345589519996953e-7,   -8.81393768576285234e-7,
      -3.15237812378282887e-8,  1.37946244706966066e-7,   1.36853378065932734e-8,   -1.68830221398578706e-8,
      -3.25298012849815288e-9,  4.9293710483526876e-10};
};
constexpr float NormalTail<float>::c[];
constexpr double NormalTail<double>::c[];

// Phi(-u) for w >= 0, given 2^(-w^2).
template <class P> KHOT_INLINE P normal_tail(P w, P bell) {
  using T = typename P::T;
  P inverse = T(1) / (w + T(4));
  return bell * inverse * horner(fma(inverse, P(-8), P(1)), NormalTail<T>::c);
}

// The density at the quantile, phi(Phi^-1(p)), for 0 <= p <= 1/2; a nan stays one.
constexpr float kNormalProfile[] = {  // over p s, s = sqrt(-log2 p), in (s - 2) / (s + 2), s in [1, 11.2]: 2.7e-8
    0.983871563716732814f,  0.436771271205847092f,   -0.325327289849550445f, 0.103682964830887045f,  -0.0259472285389286682f,
    0.0150110919526466663f, -0.0160047957867134395f, 0.00945655626212763137f, -0.00382016718953618724f};
template <int U> KHOT_INLINE Pack<float, U> normal_profile(Pack<float, U> p) {
  using P = Pack<float, U>;
  P s = square_root(-log2(atleast(1.2e-38f, p))), inverse = 1.f / (s + 2.f);
  return p * s * horner(fma(inverse, P(-4), P(1)), kNormalProfile);
}
// The quantile over s = sqrt(-2 log p), in (s - 2) / (s + 2), s in [1.17, 39]: 4e-8.
constexpr double kNormalQuantile[] = {
    0.550759842026098114, 1.38754143952201624, -2.03035176893711446, 2.3069846258183135, -2.50071879239310735,
    2.63708638095747776, -2.7577078184832523, 2.89961467838732859, -3.02791273176050392, 2.83911211873282084,
    -2.03132280699377425, 0.916692113981829123, -0.189726259206854452};

// In double: a first quantile from the polynomial, one Halley step, and phi expanded about the first quantile.
template <int U> KHOT_INLINE Pack<double, U> normal_profile(Pack<double, U> p) {
  using P = Pack<double, U>;
  P safe = atleast(1e-300, p), s = square_root(-2.0 * log(safe));
  P u = s * horner((s - 2.0) / (s + 2.0), kNormalQuantile);
  P w = u * kNormalUnit, power = bell(w), phi = power * kNormalTop;
  P newton = (normal_tail(w, power) - safe) / phi;
  P step = newton / (1.0 - 0.5 * u * newton);
  P v = phi * (1.0 - u * step + 0.5 * (u * u - 1.0) * step * step);
  return select(p <= 1e-300, P(0), v);
}

}  // namespace
