// The entry point of the passes over weights and the mask of their magnitudes. Compiled once, for the baseline machine.
#include "masked.h"

#include <cstring>

#include "kernel.h"

extern "C" const char* khot_isa();
extern "C" const KhotMaskeds khot_maskeds_base;
#ifdef KHOT_HAVE_AVX2
extern "C" const KhotMaskeds khot_maskeds_avx2;
#endif
#ifdef KHOT_HAVE_AVX512
extern "C" const KhotMaskeds khot_maskeds_avx512;
#endif

namespace {

// The copy for the instruction set that khot_isa names.
const KhotMaskeds& chosen() {
#ifdef KHOT_HAVE_AVX512
  if (!std::strcmp(khot_isa(), "avx512")) return khot_maskeds_avx512;
#endif
#ifdef KHOT_HAVE_AVX2
  if (!std::strcmp(khot_isa(), "avx2")) return khot_maskeds_avx2;
#endif
  return khot_maskeds_base;
}

}  // namespace

// Parts: 0 the magnitudes of all weights into `flat`, and the sums of them and of their squares; 1 the products of the weights
// and the mask `flat`; 2 the gradients of the weights from those of the products. Families as in entry.cpp, 0 to 3; types 0 float32, 1 float64. Returns a KhotCode.
extern "C" __attribute__((visibility("default"))) int khot_masked(int part, int family, int dtype, int count, const int64_t* sizes,
                                                                  const void* const* w, const void* const* g, void* const* out, void* flat,
                                                                  double* sums, double tau, int threads) {
  if (count < 0) return kKhotSize;
  for (int i = 0; i < count; i++) {
    if (!sizes || sizes[i] < 0) return kKhotSize;
    if (sizes[i] && (!flat || !w || !w[i])) return kKhotNull;
  }
  if (part == kKhotMagnitudes ? !sums : !out || (part == kKhotDerivative && !g)) return kKhotNull;
  for (int i = 0; part == kKhotProducts && i < count; i++)
    if (sizes[i] && !out[i]) return kKhotNull;
  return chosen().run(part, family, dtype, KhotMasked{count, sizes, w, g, out, flat, sums, tau, threads});
}
