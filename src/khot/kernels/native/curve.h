// A tail q(u), u in [0, 1], from a table that comes with the call: log2 q is a polynomial on every octave of u, where the powers of u that
// q is made of are smooth. The coefficients of the first octaves fit a vector, so that one shuffle looks up all lanes; the few scores
// that are nearer to the foot are looked up one by one.
#pragma once
#include "families.h"

namespace {

constexpr int kOctaves = 126;  // u from 2^-126 to 1: what a float can hold
template <class C> constexpr int kTerms = sizeof(C) == 4 ? 11 : 23;

inline const float* terms_of(const KhotCurve& curve, float) { return curve.singles; }
inline const double* terms_of(const KhotCurve& curve, double) { return curve.doubles; }

// row[i] in every lane. Vectors of floats can look up as many octaves as they have lanes, others all.
#if defined(__AVX512F__)
constexpr int kPickedFloat = 16;
KHOT_INLINE VecF pick(const float* row, IntF i) { return (VecF)_mm512_permutexvar_ps((__m512i)i, (__m512)load(row)); }
#elif defined(__AVX2__)
constexpr int kPickedFloat = 8;
KHOT_INLINE VecF pick(const float* row, IntF i) { return (VecF)_mm256_permutevar8x32_ps((__m256)load(row), (__m256i)i); }
#else
constexpr int kPickedFloat = kOctaves;
KHOT_INLINE VecF pick(const float* row, IntF i) {
  VecF v{};
  for (int j = 0; j < kWidth<float>; j++) v[j] = row[i[j]];
  return v;
}
#endif
KHOT_INLINE VecD pick(const double* row, IntD i) {
  VecD v{};
  for (int j = 0; j < kWidth<double>; j++) v[j] = row[i[j]];
  return v;
}
template <class C> constexpr int kPicked = sizeof(C) == 4 ? kPickedFloat : kOctaves;

template <class P> struct Tail { P q, slope, bend; };

// One score, in double.
inline Tail<double> tail_at(double u, const KhotCurve& curve) {
  int e = 0;
  const double x = 4 * std::frexp(u, &e) - 3;  // u = f 2^e, f in [1/2, 1)
  const int octave = most(0, least(kOctaves - 1, -e));
  const double* c = curve.doubles + octave;
  double value = 0, first = 0;
  for (int j = kTerms<double> - 1; j >= 0; j--) first = first * x + value, value = value * x + c[j * kOctaves];
  const double q = std::exp2(value);
  return {q, q * 0.69314718055994531 * std::ldexp(first, 2 - e), 0};
}
template <class C> __attribute__((noinline)) void mend_each(const C* u, const C* wanted, C* q, C* slope, int count, const KhotCurve& curve) {
  for (int j = 0; j < count; j++) {
    if (wanted[j] == 0) continue;
    const Tail<double> t = tail_at(double(u[j]), curve);
    q[j] = C(t.q), slope[j] = C(t.slope);
  }
}
// Looks up what the shuffle could not. Through memory of its own: the pack stays in registers where nothing is wanted.
template <class P> KHOT_INLINE void mend(P u, Tail<P>& tail, Mask<typename P::T, P::U> wanted, const KhotCurve& curve) {
  using C = typename P::T;
  if (!any(wanted)) return;
  C at[P::size], which[P::size], q[P::size], slope[P::size];
  store_pack(at, u), store_pack(which, select(wanted, P(1), P(0))), store_pack(q, tail.q), store_pack(slope, tail.slope);
  mend_each(at, which, q, slope, P::size, curve);
  tail.q = load_pack<P>(q), tail.slope = load_pack<P>(slope);
}

// The octave of u, the place in it from -1 to 1, and how many octaves u lies below the last of the table: there log2 q goes on as a line.
template <class P> struct Place {
  IVec<typename P::T> octave[P::U];
  P x, scale, beyond;
};
template <class P> KHOT_INLINE Place<P> place_of(P u) {
  using C = typename P::T;
  using K = Exp2<C>;
  Place<P> place;
  KHOT_EACH(P::U, {
    IVec<C> e = (K::bias - 1) - (bits(u.v[j]) >> K::mantissa), end = IVec<C>{} + (K::bias - 2), last = IVec<C>{} + (kPicked<C> - 1);
    e = e > 0 ? e : IVec<C>{}, e = e < end ? e : end;
    place.octave[j] = e < last ? e : last;
    place.scale.v[j] = from_bits<C>((e + (K::bias + 2)) << K::mantissa);
    place.beyond.v[j] = __builtin_convertvector(e - place.octave[j], Vec<C>);
  });
  place.x = fma(u, place.scale, P(-3));
  return place;
}

// log2 q and, if asked for, its first derivative and half the second, in x.
template <class P> struct Series { P value, first, second; };
template <bool kSlopes, class P, class C = typename P::T> KHOT_INLINE Series<P> series_at(const Place<P>& place, const C* terms) {
  Series<P> s{P(0), P(0), P(0)};
  // Not unrolled in double, which nobody waits for: that is a quarter of the compiler's time.
#pragma GCC unroll 16
  for (int i = kTerms<C> - 1; i >= 0; i--) {
    if constexpr (kSlopes) s.second = fma(s.second, place.x, s.first), s.first = fma(s.first, place.x, s.value);
    KHOT_EACH(P::U, s.value.v[j] = fma(s.value.v[j], place.x.v[j], pick(terms + i * kOctaves, place.octave[j])));
  }
  return s;
}

// The tail and, if asked for, its first two derivatives. The second is taken for 0 next to the foot, where it may have no bound.
template <bool kSlopes, class P, class C = typename P::T> KHOT_INLINE Tail<P> tail_in_octaves(P u, const KhotCurve& curve) {
  constexpr C log_two = C(0.69314718055994531);
  const Place<P> place = place_of(u);
  Series<P> s = series_at<kSlopes>(place, terms_of(curve, C(0)));
  if constexpr (sizeof(C) == 8) s.value = s.value - place.beyond * C(most(1.0, 1 / curve.a));
  Tail<P> tail{select(u >= std::numeric_limits<C>::min(), exp2(s.value), P(0)), P(0), P(0)};
  if constexpr (kSlopes) {
    P up = tail.q * place.scale * log_two;
    tail.slope = up * s.first;
    tail.bend = select(u > C(1.0 / 256), up * place.scale * fma(s.first * log_two, s.first, s.second + s.second), P(0));
  }
  return tail;
}
// Two vectors at a time: what four need does not fit the registers.
template <bool kSlopes, class P, class C = typename P::T> KHOT_INLINE Tail<P> tail_of(P u, const KhotCurve& curve) {
  Tail<P> tail;
  if constexpr (P::U < 4) {
    tail = tail_in_octaves<kSlopes>(u, curve);
  } else {
    using Half = Pack<C, P::U / 2>;
#pragma GCC unroll 2
    for (int part = 0; part < P::U; part += Half::U) {
      Half half;
      KHOT_EACH(Half::U, half.v[j] = u.v[part + j]);
      const auto found = tail_in_octaves<kSlopes>(half, curve);
      KHOT_EACH(Half::U, tail.q.v[part + j] = found.q.v[j], tail.slope.v[part + j] = found.slope.v[j], tail.bend.v[part + j] = found.bend.v[j]);
    }
  }
  if constexpr (kPicked<C> < kOctaves) mend(u, tail, (u >= std::numeric_limits<C>::min()) & (u < C(1.0 / (1 << kPicked<C>))), curve);
  return tail;
}

// x^power for a normal positive x.
template <int U> KHOT_INLINE Pack<float, U> power_of(Pack<float, U> x, float power) { return exp2(log2(x) * power); }
template <int U> KHOT_INLINE Pack<double, U> power_of(Pack<double, U> x, double power) { return exp2(log(x) * (power * 1.4426950408889634)); }

}  // namespace
