// A few vectors computed in step.
//
// The polynomials here are long chains of dependent operations, and a processor that meets one chain after another
// runs out of room to overlap them. Written on packs, each operation is issued for four independent vectors in turn.
#pragma once
#include "simd.h"

namespace {

// Repeats a statement for j = 0 .. U-1 with j a constant.
#define KHOT_EACH(U, ...)                                         \
  do {                                                            \
    { constexpr int j = 0; __VA_ARGS__; }                         \
    if constexpr ((U) > 1) { constexpr int j = 1; __VA_ARGS__; }  \
    if constexpr ((U) > 2) { constexpr int j = 2; __VA_ARGS__; }  \
    if constexpr ((U) > 2) { constexpr int j = 3; __VA_ARGS__; }  \
  } while (0)

template <class T_, int U_> struct Mask {
  IVec<T_> v[U_];
  KHOT_INLINE friend Mask operator&(Mask a, Mask b) { KHOT_EACH(U_, a.v[j] &= b.v[j]); return a; }
  KHOT_INLINE friend Mask operator|(Mask a, Mask b) { KHOT_EACH(U_, a.v[j] |= b.v[j]); return a; }
  KHOT_INLINE friend Mask operator~(Mask a) { KHOT_EACH(U_, a.v[j] = ~a.v[j]); return a; }
};

template <class T_, int U_> struct Pack {  // U_ is 1, 2 or 4
  using T = T_;
  static constexpr int U = U_;
  static constexpr int size = U_ * kWidth<T_>;
  Vec<T_> v[U_];

  Pack() = default;
  KHOT_INLINE Pack(T_ a) { KHOT_EACH(U_, v[j] = splat(a)); }
  KHOT_INLINE explicit Pack(Vec<T_> a) { KHOT_EACH(U_, v[j] = a); }

#define KHOT_BINARY(op)                                                                               \
  KHOT_INLINE friend Pack operator op(Pack a, Pack b) { KHOT_EACH(U_, a.v[j] = a.v[j] op b.v[j]); return a; } \
  KHOT_INLINE friend Pack operator op(Pack a, T_ b) { KHOT_EACH(U_, a.v[j] = a.v[j] op b); return a; }        \
  KHOT_INLINE friend Pack operator op(T_ a, Pack b) { KHOT_EACH(U_, b.v[j] = a op b.v[j]); return b; }
  KHOT_BINARY(+) KHOT_BINARY(-) KHOT_BINARY(*) KHOT_BINARY(/)
#undef KHOT_BINARY
  // With one vector for all: a number for each lane.
  KHOT_INLINE friend Pack operator+(Pack a, Vec<T_> b) { KHOT_EACH(U_, a.v[j] += b); return a; }
  KHOT_INLINE friend Pack operator-(Pack a, Vec<T_> b) { KHOT_EACH(U_, a.v[j] -= b); return a; }
  KHOT_INLINE friend Pack operator-(Vec<T_> a, Pack b) { KHOT_EACH(U_, b.v[j] = a - b.v[j]); return b; }
  KHOT_INLINE friend Pack operator*(Pack a, Vec<T_> b) { KHOT_EACH(U_, a.v[j] *= b); return a; }
  KHOT_INLINE friend Pack operator-(Pack a) { KHOT_EACH(U_, a.v[j] = -a.v[j]); return a; }
#define KHOT_COMPARE(op)                                                                                              \
  KHOT_INLINE friend Mask<T_, U_> operator op(Pack a, Pack b) { Mask<T_, U_> m; KHOT_EACH(U_, m.v[j] = a.v[j] op b.v[j]); return m; } \
  KHOT_INLINE friend Mask<T_, U_> operator op(Pack a, T_ b) { Mask<T_, U_> m; KHOT_EACH(U_, m.v[j] = a.v[j] op b); return m; }
  KHOT_COMPARE(<) KHOT_COMPARE(<=) KHOT_COMPARE(>) KHOT_COMPARE(>=) KHOT_COMPARE(==) KHOT_COMPARE(!=)
#undef KHOT_COMPARE
};

template <class T, int U> KHOT_INLINE Pack<T, U> select(Mask<T, U> m, Pack<T, U> a, Pack<T, U> b) {
  KHOT_EACH(U, a.v[j] = m.v[j] ? a.v[j] : b.v[j]);
  return a;
}
template <int U> KHOT_INLINE bool all(Mask<double, U> m) {
  IntD every = m.v[0];
  KHOT_EACH(U, every &= m.v[j]);
  return sign_bits(every) == (1u << kWidth<double>) - 1;
}
template <class T, int U> KHOT_INLINE bool any(Mask<T, U> m) {
  IVec<T> some = m.v[0];
  KHOT_EACH(U, some |= m.v[j]);
  return sign_bits((IntD)some != IntD{}) != 0;
}
template <class P> KHOT_INLINE P fma(P a, P b, P c) { KHOT_EACH(P::U, a.v[j] = fma(a.v[j], b.v[j], c.v[j])); return a; }
template <class P> KHOT_INLINE P atmost(typename P::T bound, P x) { KHOT_EACH(P::U, x.v[j] = vmin(splat(bound), x.v[j])); return x; }
template <class P> KHOT_INLINE P atleast(typename P::T bound, P x) { KHOT_EACH(P::U, x.v[j] = vmax(splat(bound), x.v[j])); return x; }
template <class P> KHOT_INLINE P smallest(P a, P b) { KHOT_EACH(P::U, b.v[j] = vmin(a.v[j], b.v[j])); return b; }
template <class P> KHOT_INLINE P largest(P a, P b) { KHOT_EACH(P::U, b.v[j] = vmax(a.v[j], b.v[j])); return b; }
template <class P> KHOT_INLINE P absolute(P a) { KHOT_EACH(P::U, a.v[j] = vabs(a.v[j])); return a; }
// By the sign bit, which selects without a comparison.
template <class T, int U> KHOT_INLINE Mask<T, U> negative(Pack<T, U> a) { Mask<T, U> m; KHOT_EACH(U, m.v[j] = bits(a.v[j]) < 0); return m; }
template <class P> KHOT_INLINE P square_root(P a) { KHOT_EACH(P::U, a.v[j] = vsqrt(a.v[j])); return a; }

template <class P, class S> KHOT_INLINE P load_pack(const S* p) { P a; KHOT_EACH(P::U, a.v[j] = load(p + j * kWidth<typename P::T>)); return a; }
template <class P, class S> KHOT_INLINE void store_pack(S* p, P a) { KHOT_EACH(P::U, store(p + j * kWidth<typename P::T>, a.v[j])); }

// The sum over the pack, pairwise, so that equal values add up without rounding.
template <class T, int U> KHOT_INLINE Vec<T> fold(Pack<T, U> a) {
  if constexpr (U == 1) return a.v[0];
  else if constexpr (U == 2) return a.v[0] + a.v[1];
  else return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
}

}  // namespace
