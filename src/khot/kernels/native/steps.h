// The steps of several rows at once, one row to a lane.
#pragma once
#include "limits.h"

namespace {

constexpr int kLanes = 8;  // rows solved side by side
using Lanes = Pack<double, most(1, least(4, kLanes / kWidth<double>))>;

// exp(-low) of every row, up to the family's unit.
template <class F> void set_factors(const double* low, double* factor) {
  for (int j = 0; j < kLanes; j += Lanes::size) store_pack(factor + j, exp2(load_pack<Lanes>(low + j) * F::kUnit));
}

template <class F> void set_steps(const double* missing, const double* k, const double* rest, const double (*v)[kLanes], double* step) {
  for (int j = 0; j < kLanes; j += Lanes::size) {
    auto at = [&](const double* a) { return load_pack<Lanes>(a + j); };
    Lanes moments[6];
    for (int i = 0; i < F::kMoments; i++) moments[i] = at(v[i]);
    store_pack(step + j, F::step(at(missing), at(k), at(rest), moments));
  }
}

// The step of a piecewise linear F, given the straight one. Far from k the scores that are cut off count: there the sum grows like
// the tail of a distribution. The slope of the slope is unknown; the one that makes log(S / (n - S)) straight is taken, S'' =
// S'^2 (n - 2 S) / (S (n - S)), see logit_step.
inline double far_step(double straight, double reach, double missing, double k, double rest, double v0) {
  if (std::fabs(straight) <= reach || !(std::fabs(missing) > 0.75 * least(k, rest))) return straight;
  const double sum = k - missing, other = rest + missing;
  const double far = logit_step(missing, k, rest, v0, v0 * v0 * (other - sum) / (sum * other));
  return std::fabs(far) > reach ? far : straight;  // a straight step that small is exact
}

}  // namespace
