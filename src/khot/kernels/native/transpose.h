// A square block of floats, whose rows become columns.
#pragma once
#include "simd.h"

namespace {

#if KHOT_VECTOR_BYTES == 32
// The shuffles that stay inside 128 bits come first: half as many instructions as below.
KHOT_INLINE void transpose(VecF* r) {
  VecF a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    a[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    b[i] = __builtin_shufflevector(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    b[i + 2] = __builtin_shufflevector(a[i + 1], a[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    b[i + 3] = __builtin_shufflevector(a[i + 1], a[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    r[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
#elif KHOT_VECTOR_BYTES == 64
// First inside 128 bits, then the quarters of the vectors.
KHOT_INLINE void transpose(VecF* r) {
  VecF a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    a[i] = (VecF)_mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]);
    a[i + 1] = (VecF)_mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    b[i] = (VecF)_mm512_unpacklo_pd((__m512d)a[i], (__m512d)a[i + 2]);
    b[i + 1] = (VecF)_mm512_unpackhi_pd((__m512d)a[i], (__m512d)a[i + 2]);
    b[i + 2] = (VecF)_mm512_unpacklo_pd((__m512d)a[i + 1], (__m512d)a[i + 3]);
    b[i + 3] = (VecF)_mm512_unpackhi_pd((__m512d)a[i + 1], (__m512d)a[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; i++) {  // b[4 q + i] holds the columns i, i + 4, i + 8, i + 12 of the rows 4 q .. 4 q + 3
    __m512 p = _mm512_shuffle_f32x4((__m512)b[i], (__m512)b[i + 4], 0x88), q = _mm512_shuffle_f32x4((__m512)b[i], (__m512)b[i + 4], 0xdd);
    __m512 s = _mm512_shuffle_f32x4((__m512)b[i + 8], (__m512)b[i + 12], 0x88), t = _mm512_shuffle_f32x4((__m512)b[i + 8], (__m512)b[i + 12], 0xdd);
    r[i] = (VecF)_mm512_shuffle_f32x4(p, s, 0x88), r[i + 8] = (VecF)_mm512_shuffle_f32x4(p, s, 0xdd);
    r[i + 4] = (VecF)_mm512_shuffle_f32x4(q, t, 0x88), r[i + 12] = (VecF)_mm512_shuffle_f32x4(q, t, 0xdd);
  }
}
#else
// Each round of zips moves one bit of the row's number into the column's.
KHOT_INLINE VecF zip_low(VecF a, VecF b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
KHOT_INLINE VecF zip_high(VecF a, VecF b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
KHOT_INLINE void transpose(VecF* r) {
  constexpr int w = kWidth<float>;
#pragma GCC unroll 4
  for (int round = 1; round < w; round *= 2) {
    VecF next[w];
#pragma GCC unroll 16
    for (int i = 0; i < w / 2; i++) next[2 * i] = zip_low(r[i], r[i + w / 2]), next[2 * i + 1] = zip_high(r[i], r[i + w / 2]);
#pragma GCC unroll 16
    for (int i = 0; i < w; i++) r[i] = next[i];
  }
}
#endif

}  // namespace
