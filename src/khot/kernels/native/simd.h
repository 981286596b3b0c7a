// Vectors of float and double, as wide as the instruction set of this translation unit.
//
// The arithmetic is written with the vector extensions of GCC and Clang, so one source serves AVX-512, AVX2, SSE2 and
// NEON. Only the fused multiply-add needs intrinsics. Everything lives in an unnamed namespace: the file is compiled
// once per instruction set, and no inline function may be shared between the copies.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#define KHOT_VECTOR_BYTES 64
#elif defined(__AVX2__)
#include <immintrin.h>
#define KHOT_VECTOR_BYTES 32
#else
#define KHOT_VECTOR_BYTES 16
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#endif

#define KHOT_INLINE inline __attribute__((always_inline))
#define KHOT_INLINE_LAMBDA __attribute__((always_inline))

namespace {

typedef float VecF __attribute__((vector_size(KHOT_VECTOR_BYTES)));
typedef double VecD __attribute__((vector_size(KHOT_VECTOR_BYTES)));
typedef int32_t IntF __attribute__((vector_size(KHOT_VECTOR_BYTES)));
typedef int64_t IntD __attribute__((vector_size(KHOT_VECTOR_BYTES)));
typedef uint32_t UIntF __attribute__((vector_size(KHOT_VECTOR_BYTES)));
typedef uint16_t HalfU16 __attribute__((vector_size(KHOT_VECTOR_BYTES / 2)));

template <class T> struct VecTypes;
template <> struct VecTypes<float> { using vec = VecF; using ivec = IntF; using integer = int32_t; };
template <> struct VecTypes<double> { using vec = VecD; using ivec = IntD; using integer = int64_t; };
template <class T> using Vec = typename VecTypes<T>::vec;
template <class T> using IVec = typename VecTypes<T>::ivec;
template <class T> using Integer = typename VecTypes<T>::integer;
template <class T> constexpr int kWidth = KHOT_VECTOR_BYTES / int(sizeof(T));

template <class T> constexpr T kInf = std::numeric_limits<T>::infinity();
template <class T> constexpr T kNan = std::numeric_limits<T>::quiet_NaN();
template <class T> constexpr T kEps = std::numeric_limits<T>::epsilon();

template <class T> constexpr KHOT_INLINE T least(T a, T b) { return b < a ? b : a; }
template <class T> constexpr KHOT_INLINE T most(T a, T b) { return b > a ? b : a; }

template <class T> KHOT_INLINE Vec<T> splat(T a) { return a - Vec<T>{}; }
KHOT_INLINE IntF splat_int(int32_t a) { return a - IntF{}; }
KHOT_INLINE IntD splat_int(int64_t a) { return a - IntD{}; }

// min(bound, x) and max(bound, x), which keep x where it is nan.
#if defined(__AVX512F__)
KHOT_INLINE VecF vmin(VecF bound, VecF x) { return (VecF)_mm512_min_ps((__m512)bound, (__m512)x); }
KHOT_INLINE VecF vmax(VecF bound, VecF x) { return (VecF)_mm512_max_ps((__m512)bound, (__m512)x); }
KHOT_INLINE VecD vmin(VecD bound, VecD x) { return (VecD)_mm512_min_pd((__m512d)bound, (__m512d)x); }
KHOT_INLINE VecD vmax(VecD bound, VecD x) { return (VecD)_mm512_max_pd((__m512d)bound, (__m512d)x); }
#elif defined(__AVX2__)
KHOT_INLINE VecF vmin(VecF bound, VecF x) { return (VecF)_mm256_min_ps((__m256)bound, (__m256)x); }
KHOT_INLINE VecF vmax(VecF bound, VecF x) { return (VecF)_mm256_max_ps((__m256)bound, (__m256)x); }
KHOT_INLINE VecD vmin(VecD bound, VecD x) { return (VecD)_mm256_min_pd((__m256d)bound, (__m256d)x); }
KHOT_INLINE VecD vmax(VecD bound, VecD x) { return (VecD)_mm256_max_pd((__m256d)bound, (__m256d)x); }
#else
template <class V> KHOT_INLINE V vmin(V bound, V x) { return bound < x ? bound : x; }
template <class V> KHOT_INLINE V vmax(V bound, V x) { return bound > x ? bound : x; }
#endif

template <class V> KHOT_INLINE auto bits(V x) {
  using I = std::conditional_t<std::is_same<V, VecF>::value, IntF, IntD>;
  return (I)x;
}
template <class T> KHOT_INLINE Vec<T> from_bits(IVec<T> x) { return (Vec<T>)x; }

KHOT_INLINE VecF vabs(VecF x) { return (VecF)((IntF)x & splat_int(int32_t(0x7fffffff))); }
KHOT_INLINE VecD vabs(VecD x) { return (VecD)((IntD)x & splat_int(int64_t(0x7fffffffffffffff))); }

// a * b + c, rounded once where the machine can.
#if defined(__AVX512F__)
KHOT_INLINE VecF fma(VecF a, VecF b, VecF c) { return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
KHOT_INLINE VecD fma(VecD a, VecD b, VecD c) { return (VecD)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
KHOT_INLINE VecF vsqrt(VecF a) { return (VecF)_mm512_sqrt_ps((__m512)a); }
KHOT_INLINE VecD vsqrt(VecD a) { return (VecD)_mm512_sqrt_pd((__m512d)a); }
#elif defined(__AVX2__)
KHOT_INLINE VecF fma(VecF a, VecF b, VecF c) { return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
KHOT_INLINE VecD fma(VecD a, VecD b, VecD c) { return (VecD)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
KHOT_INLINE VecF vsqrt(VecF a) { return (VecF)_mm256_sqrt_ps((__m256)a); }
KHOT_INLINE VecD vsqrt(VecD a) { return (VecD)_mm256_sqrt_pd((__m256d)a); }
#else
#if defined(__aarch64__)
KHOT_INLINE VecF fma(VecF a, VecF b, VecF c) { return (VecF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
KHOT_INLINE VecD fma(VecD a, VecD b, VecD c) { return (VecD)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
#else
KHOT_INLINE VecF fma(VecF a, VecF b, VecF c) { return a * b + c; }
KHOT_INLINE VecD fma(VecD a, VecD b, VecD c) { return a * b + c; }
#endif
KHOT_INLINE VecF vsqrt(VecF a) {
  for (int j = 0; j < kWidth<float>; j++) a[j] = __builtin_sqrtf(a[j]);
  return a;
}
KHOT_INLINE VecD vsqrt(VecD a) {
  for (int j = 0; j < kWidth<double>; j++) a[j] = __builtin_sqrt(a[j]);
  return a;
}
#endif

// The two halves of a vector, as doubles. Sums of many floats are kept in double.
#if defined(__AVX512F__)
KHOT_INLINE VecD widen_low(VecF x) { return (VecD)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x)); }
KHOT_INLINE VecD widen_high(VecF x) { return (VecD)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1)); }
#elif defined(__AVX2__)
KHOT_INLINE VecD widen_low(VecF x) { return (VecD)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)); }
KHOT_INLINE VecD widen_high(VecF x) { return (VecD)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)); }
#else
KHOT_INLINE VecD widen_low(VecF x) { return VecD{x[0], x[1]}; }
KHOT_INLINE VecD widen_high(VecF x) { return VecD{x[2], x[3]}; }
#endif
// And back.
#if defined(__AVX512F__)
KHOT_INLINE VecF narrow_both(VecD low, VecD high) {
  return (VecF)_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low)), _mm512_cvtpd_ps((__m512d)high), 1);
}
#elif defined(__AVX2__)
KHOT_INLINE VecF narrow_both(VecD low, VecD high) {
  return (VecF)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm256_cvtpd_ps((__m256d)low)), _mm256_cvtpd_ps((__m256d)high), 1);
}
#else
KHOT_INLINE VecF narrow_both(VecD low, VecD high) { return VecF{float(low[0]), float(low[1]), float(high[0]), float(high[1])}; }
#endif
KHOT_INLINE VecD widen_add(VecF x) { return widen_low(x) + widen_high(x); }
KHOT_INLINE VecD widen_add(VecD x) { return x; }

// A bit for each lane of a mask.
KHOT_INLINE unsigned sign_bits(IntD mask) {
#if defined(__AVX512F__)
  return unsigned(_mm512_movepi64_mask((__m512i)mask));
#elif defined(__AVX2__)
  return unsigned(_mm256_movemask_pd((__m256d)mask));
#else
  return unsigned(mask[0] & 1) | unsigned(mask[1] & 1) << 1;
#endif
}

KHOT_INLINE double sum_lanes(VecD x) {
#if KHOT_VECTOR_BYTES == 64
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
#elif KHOT_VECTOR_BYTES == 32
  return (x[0] + x[2]) + (x[1] + x[3]);
#else
  return x[0] + x[1];
#endif
}
KHOT_INLINE double sum_lanes(VecF x) { return sum_lanes(widen_add(x)); }

// A sum that remembers what rounding took from it.
struct Total {
  double value = 0, rest = 0;
  void add(double x) {
    double sum = value + x, back = sum - value;
    rest += (value - (sum - back)) + (x - back);
    value = sum;
  }
  void add(const Total& o) { add(o.value), rest += o.rest; }
  double get() const { return value + rest; }
};
// The same in every lane, where it matters: a float sum in double needs no help.
template <class C> struct LaneTotal;
template <> struct LaneTotal<float> {
  VecD value{};
  KHOT_INLINE void add(VecF x) { value += widen_add(x); }
  KHOT_INLINE void flush(Total& to) { to.add(sum_lanes(value)), value = VecD{}; }
};
template <> struct LaneTotal<double> {
  VecD value{}, rest{};
  KHOT_INLINE void add(VecD x) {
    VecD sum = value + x, back = sum - value;
    rest += (value - (sum - back)) + (x - back);
    value = sum;
  }
  KHOT_INLINE void flush(Total& to) {
    for (int j = 0; j < kWidth<double>; j++) to.add(value[j]), to.rest += rest[j];
    value = rest = VecD{};
  }
};

// Adds the sums of four vectors to out[0..3].
KHOT_INLINE void add_sums(VecF a, VecF b, VecF c, VecF d, double* out) {
#if KHOT_VECTOR_BYTES == 32
  VecF ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  VecF cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  VecF all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  VecD sums = widen_add(all), old;
  std::memcpy(&old, out, sizeof old);
  sums += old;
  std::memcpy(out, &sums, sizeof sums);
#elif KHOT_VECTOR_BYTES == 64
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
  const __m512d low = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), high = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
  const VecD sums = widen_add((VecF)_mm512_add_ps((__m512)low, (__m512)high));  // eight lanes: those of the four, twice
  for (int j = 0; j < 4; j++) out[j] += sums[j] + sums[j + 4];
#else
  out[0] += sum_lanes(a), out[1] += sum_lanes(b), out[2] += sum_lanes(c), out[3] += sum_lanes(d);
#endif
}
KHOT_INLINE void add_sums(VecD a, VecD b, VecD c, VecD d, double* out) {
  out[0] += sum_lanes(a), out[1] += sum_lanes(b), out[2] += sum_lanes(c), out[3] += sum_lanes(d);
}

// ---- memory ----
KHOT_INLINE VecF load(const float* p) { VecF v; std::memcpy(&v, p, sizeof v); return v; }
KHOT_INLINE VecD load(const double* p) { VecD v; std::memcpy(&v, p, sizeof v); return v; }
KHOT_INLINE void store(float* p, VecF v) { std::memcpy(p, &v, sizeof v); }
KHOT_INLINE void store(double* p, VecD v) { std::memcpy(p, &v, sizeof v); }

KHOT_INLINE IntF load_bits(const uint16_t* p) {
  HalfU16 h;
  std::memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, IntF);
}
KHOT_INLINE void store_bits(uint16_t* p, IntF bits) {
  HalfU16 h = __builtin_convertvector(bits, HalfU16);
  std::memcpy(p, &h, sizeof h);
}
KHOT_INLINE VecF load_bfloat16(const uint16_t* p) { return (VecF)(load_bits(p) << 16); }
KHOT_INLINE VecF load_float16(const uint16_t* p) {
  IntF h = load_bits(p), magnitude = h & 0x7fff;
  // Scaling by 2^112 rebiases the exponent and normalises the subnormals; infinity and nan keep their exponent.
  VecF scaled = (VecF)(magnitude << 13) * splat(0x1p112f);
  VecF special = (VecF)((magnitude << 13) | 0x7f800000);
  VecF value = magnitude >= 0x7c00 ? special : scaled;
  return (VecF)((IntF)value | ((h & 0x8000) << 16));
}
// Rounding adds to the bits without a sign: those of a nan, which are thrown away, may wrap.
KHOT_INLINE void store_bfloat16(uint16_t* p, VecF v) {
  UIntF b = (UIntF)v;
  UIntF rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;  // to nearest, ties to even
  store_bits(p, v == v ? (IntF)rounded : splat_int(0x7fc0));
}
KHOT_INLINE void store_float16(uint16_t* p, VecF v) {
  IntF b = (IntF)v, sign = (b >> 16) & 0x8000, magnitude = b & 0x7fffffff;
  // Normal results: rebias and round to nearest even. Subnormal ones: let the float adder round at bit 2^-24.
  UIntF m = (UIntF)magnitude;
  UIntF normal = (m - ((127 - 15) << 23) + 0xfff + ((m >> 13) & 1)) >> 13;
  UIntF subnormal = (UIntF)((VecF)magnitude + splat(0.5f)) - (UIntF)splat(0.5f);
  IntF h = magnitude < (113 << 23) ? (IntF)subnormal : (IntF)normal;
  h = magnitude >= 0x477ff000 ? splat_int(0x7c00) : h;  // 65520 and more round to infinity
  h = v == v ? h : splat_int(0x7e00);
  store_bits(p, h | sign);
}

}  // namespace
