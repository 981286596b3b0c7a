// Moving the chosen lanes of a vector to its front, so that what is chosen from a row lies side by side.
#pragma once
#include "simd.h"

namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each set of lanes, the numbers of the chosen ones, a byte each. A double moves as two lanes of 32 bits.
struct Moves {
  uint64_t floats[256], doubles[16];
  constexpr Moves() : floats(), doubles() {
    for (int set = 0; set < 256; set++) {
      int at = 0;
      for (uint64_t lane = 0; lane < 8; lane++)
        if (set >> lane & 1) floats[set] |= lane << 8 * at++;
    }
    for (int set = 0; set < 16; set++) {
      int at = 0;
      for (uint64_t lane = 0; lane < 4; lane++)
        if (set >> lane & 1) doubles[set] |= (2 * lane | (2 * lane + 1) << 8) << 8 * at, at += 2;
    }
  }
};
constexpr Moves kMoves;

KHOT_INLINE __m256i move_of(uint64_t bytes) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(bytes))); }
#endif

// A bit for each lane.
KHOT_INLINE unsigned lane_bits(IntD mask) { return sign_bits(mask); }
KHOT_INLINE unsigned lane_bits(IntF mask) {
#if defined(__AVX512F__)
  return unsigned(_mm512_movepi32_mask((__m512i)mask));
#elif defined(__AVX2__)
  return unsigned(_mm256_movemask_ps((__m256)mask));
#else
  return unsigned(mask[0] & 1) | unsigned(mask[1] & 2) | unsigned(mask[2] & 4) | unsigned(mask[3] & 8);
#endif
}

// Writes the chosen lanes to `out` and returns how many there are. Up to a whole vector is written.
KHOT_INLINE int put_chosen(float* out, VecF x, IntF mask) {
  unsigned set = lane_bits(mask);
#if defined(__AVX512F__)
  store(out, (VecF)_mm512_maskz_compress_ps(__mmask16(set), (__m512)x));
#elif defined(__AVX2__)
  store(out, (VecF)_mm256_permutevar8x32_ps((__m256)x, move_of(kMoves.floats[set])));
#else
  for (int j = 0, at = 0; j < kWidth<float>; j++) out[at] = x[j], at += set >> j & 1;
#endif
  return __builtin_popcount(set);
}
// The same for the lanes above a level.
KHOT_INLINE int put_above(float* out, VecF x, VecF level) {
#if defined(__AVX512F__)
  const __mmask16 set = _mm512_cmp_ps_mask((__m512)x, (__m512)level, _CMP_GT_OQ);
  store(out, (VecF)_mm512_maskz_compress_ps(set, (__m512)x));
  return __builtin_popcount(set);
#else
  return put_chosen(out, x, x > level);
#endif
}
KHOT_INLINE int put_chosen(double* out, VecD x, IntD mask) {
  unsigned set = lane_bits(mask);
#if defined(__AVX512F__)
  store(out, (VecD)_mm512_maskz_compress_pd(__mmask8(set), (__m512d)x));
#elif defined(__AVX2__)
  store(out, (VecD)_mm256_permutevar8x32_epi32((__m256i)x, move_of(kMoves.doubles[set])));
#else
  for (int j = 0, at = 0; j < kWidth<double>; j++) out[at] = x[j], at += set >> j & 1;
#endif
  return __builtin_popcount(set);
}
KHOT_INLINE int put_above(double* out, VecD x, VecD level) { return put_chosen(out, x, x > level); }

}  // namespace
