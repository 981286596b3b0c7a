// The entry point of the passes over rows whose other parts lie in other processes. Compiled once, for the baseline machine.
#include "shard.h"

#include <cstring>

#include "kernel.h"

extern "C" const char* khot_isa();
extern "C" const KhotShards khot_shards_base;
#ifdef KHOT_HAVE_AVX2
extern "C" const KhotShards khot_shards_avx2;
#endif
#ifdef KHOT_HAVE_AVX512
extern "C" const KhotShards khot_shards_avx512;
#endif

namespace {

// The copy for the instruction set that khot_isa names.
const KhotShards& chosen() {
#ifdef KHOT_HAVE_AVX512
  if (!std::strcmp(khot_isa(), "avx512")) return khot_shards_avx512;
#endif
#ifdef KHOT_HAVE_AVX2
  if (!std::strcmp(khot_isa(), "avx2")) return khot_shards_avx2;
#endif
  return khot_shards_base;
}

}  // namespace

// Parts: 0 the sums of x and of its square, 1 the sums of F(u) and F'(u) at u = (x - at) / tau + low, 2 the mask F(u) and its sum, 3 the
// sums of v g and v for the slope v of the output x, 4 the gradient v (g - at) / tau, into the same `out` as part 3. Families as in
// entry.cpp, 0 to 3; types 0 float32, 1 float64. A null pointer for tau means the value beside it. Returns a KhotCode.
extern "C" __attribute__((visibility("default"))) int khot_shard(int part, int family, int dtype, const void* x, const void* g, void* out,
                                                                 const double* at, const double* low, const double* tau, double tau_value,
                                                                 double* sums, int64_t rows, int64_t n, int threads) {
  if (rows < 0 || n < 0) return kKhotSize;
  if (part != kKhotGradient)
    for (int64_t i = 0; sums && i < 2 * rows; i++) sums[i] = 0;
  if (rows == 0 || n == 0) return kKhotDone;
  const bool shifts = part == kKhotMeasure || part == kKhotMask, derives = part == kKhotWeigh || part == kKhotGradient;
  if (!x || (shifts && (!at || !low)) || ((derives || part == kKhotMask) && !out) || (derives && !g)) return kKhotNull;
  if (part == kKhotGradient ? !at : !sums) return kKhotNull;
  return chosen().run(part, family, dtype, KhotShard{x, g, out, at, low, tau ? tau : &tau_value, tau ? 1 : 0, sums, rows, n, threads});
}
