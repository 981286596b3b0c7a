// The entry points of the ordinary call: dense tensors, one k and one tau for all rows. What is not a tensor comes packed, as Python
// takes longer to hand over an argument than a row of a hundred scores takes to be solved. Compiled once, for the baseline machine.
#include "kernel.h"

#define KHOT_API extern "C" __attribute__((visibility("default")))

extern "C" int khot_threshold_forward(int, int, const void*, void*, const double*, double, const double*, double, double*, int64_t, int64_t, int,
                                      const KhotCurve*);
extern "C" int khot_threshold_backward(int, int, const void*, const void*, const void*, const double*, void*, double*, double*, const double*,
                                       double, int64_t, int64_t, int, const KhotCurve*);
extern "C" int khot_select(int, const void*, const int64_t*, int64_t, void*, void*, void*, int64_t*, int64_t, int64_t, int);

namespace {

// khot.kernels.ordinary packs it.
struct Ask {
  double k, tau;
  int64_t scores, n;  // of all rows, of one
  int32_t family, dtype, threads;
  int64_t rows() const { return n > 0 ? scores / n : 0; }
};

}  // namespace

KHOT_API int khot_ordinary_forward(const void* x, void* y, const Ask* a) {
  return khot_threshold_forward(a->family, a->dtype, x, y, nullptr, a->k, nullptr, a->tau, nullptr, a->rows(), a->n, a->threads, nullptr);
}

KHOT_API int khot_ordinary_backward(const void* y, const void* g, void* gx, const Ask* a) {
  return khot_threshold_backward(a->family, a->dtype, y, g, nullptr, nullptr, gx, nullptr, nullptr, nullptr, a->tau, a->rows(), a->n, a->threads,
                                 nullptr);
}

// The hard mask, k being whole. Returns what khot_select does.
KHOT_API int khot_ordinary_mask(const void* x, void* mask, const Ask* a) {
  return khot_select(a->dtype, x, nullptr, int64_t(a->k), mask, nullptr, nullptr, nullptr, a->rows(), a->n, a->threads);
}
