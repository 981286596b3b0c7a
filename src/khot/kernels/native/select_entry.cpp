// The entry points of selection and sampling. Compiled once, for the baseline machine.
#include <cstring>

#include "pages.h"
#include "selection.h"

#define KHOT_API extern "C" __attribute__((visibility("default")))

extern "C" const char* khot_isa();
extern "C" const KhotSelect khot_select_base;
#ifdef KHOT_HAVE_AVX2
extern "C" const KhotSelect khot_select_avx2;
#endif
#ifdef KHOT_HAVE_AVX512
extern "C" const KhotSelect khot_select_avx512;
#endif

namespace {

// The copy for the instruction set that khot_isa names.
const KhotSelect& chosen() {
#ifdef KHOT_HAVE_AVX512
  if (!std::strcmp(khot_isa(), "avx512")) return khot_select_avx512;
#endif
#ifdef KHOT_HAVE_AVX2
  if (!std::strcmp(khot_isa(), "avx2")) return khot_select_avx2;
#endif
  return khot_select_base;
}

constexpr int64_t kMostItems = (int64_t(1) << 31) - 2;  // in a row: indices and counts have 32 bits

}  // namespace

// Types: 0 float32, 1 float64, 2 bfloat16, 3 float16. A null pointer for k means the value beside it, for all rows; mask,
// kth, next and index may be null, and the index needs one k for all rows. Returns 0, 1 for a bad shape, 2 for an unknown type,
// 3 for want of memory.
KHOT_API int khot_select(int dtype, const void* x, const int64_t* k, int64_t k_value, void* mask, void* kth, void* next, int64_t* index,
                         int64_t rows, int64_t n, int threads) {
  if (rows < 0 || n < 0 || n > kMostItems || (index && k)) return 1;
  if (rows == 0 || n == 0) return 0;
  if (mask) in_large_pages(mask, bytes_of(dtype, rows * n));
  return chosen().select(dtype, KhotSelection{x, k ? k : &k_value, k ? 1 : 0, mask, kth, next, index, rows, n, threads});
}

// Designs: 0 systematic, 1 pivotal; `shuffled` for random order. Only float32 and float64; probs is (rows, n), out is
// (draws, rows, n), start may be null. Returns as above, and 1 for an unknown design.
KHOT_API int khot_draw(int design, int dtype, const void* probs, const double* k, double k_value, const int64_t* start, void* out,
                       uint64_t seed, int64_t draws, int64_t rows, int64_t n, int shuffled, int threads) {
  if (draws < 0 || rows < 0 || n < 0 || n > kMostItems) return 1;
  if (draws == 0 || rows == 0 || n == 0) return 0;
  return chosen().draw(design, dtype, KhotDraw{probs, k ? k : &k_value, k ? 1 : 0, start, out, seed, draws, rows, n, shuffled != 0, threads});
}
