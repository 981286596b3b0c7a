// The kernels of entmax top-k for one instruction set.
#include "entmax_entry.h"

#include "entmax.h"

namespace {

bool has_curve(const KhotCurve* curve) { return curve && curve->singles && curve->doubles; }

}  // namespace

int KHOT_ENTMAX_FORWARD(int family, int dtype, const KhotForward& a) {
  if (family == kEntmax15) return forward_of<Entmax15>(dtype, a);
  if (family != kEntmax) return kKhotFamily;
  return has_curve(a.curve) ? forward_of<Entmax>(dtype, a) : kKhotNull;
}

int KHOT_ENTMAX_BACKWARD(int family, int dtype, const KhotBackward& a) {
  if (family == kEntmax15) return backward_of<Entmax15>(dtype, a);
  if (family != kEntmax) return kKhotFamily;
  return has_curve(a.curve) ? backward_of<Entmax>(dtype, a) : kKhotNull;
}
