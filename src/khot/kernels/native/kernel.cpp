// The kernels for one instruction set: this file is compiled once for each, with KHOT_ISA naming it.
#include "drive.h"
#include "entmax_entry.h"

namespace {

int any_forward(int family, int dtype, const KhotForward& a) {
  switch (family) {
    case kSigmoid: return forward_of<Sigmoid>(dtype, a);
    case kEuclidean: return forward_of<Euclidean>(dtype, a);
    case kLaplace: return forward_of<Laplace>(dtype, a);
    case kGaussian: return forward_of<Gaussian>(dtype, a);
  }
  return KHOT_ENTMAX_FORWARD(family, dtype, a);
}
int any_backward(int family, int dtype, const KhotBackward& a) {
  switch (family) {
    case kSigmoid: return backward_of<Sigmoid>(dtype, a);
    case kEuclidean: return backward_of<Euclidean>(dtype, a);
    case kLaplace: return backward_of<Laplace>(dtype, a);
    case kGaussian: return backward_of<Gaussian>(dtype, a);
  }
  return KHOT_ENTMAX_BACKWARD(family, dtype, a);
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) const KhotKernels KHOT_JOIN(khot_kernels_, KHOT_ISA) = {KHOT_STRING(KHOT_ISA), any_forward, any_backward};
