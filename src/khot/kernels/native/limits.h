// How exact is exact enough, and the quantiles that every row of a call shares.
#pragma once
#include "families.h"

namespace {

// A step of this size is as good as exact.
template <class F, class C> double step_limit() {
  static const double limit = F::kReach * std::pow(double(kEps<C>), 1.0 / F::kOrder);
  return limit;
}

// The same where a kink is the only thing in the way, given the largest slope exp(-|u|) / 2 of a score: -log z >= 1 - z. Beyond the last
// bound the rounding of the moments would show.
template <class P> P free_way(P top) { return smallest(P(0.3), 1.0 - 2.0 * top); }

// By how much the sum of a written row may miss k. Every y is rounded by at most eps / 2 of itself, and the threshold by as
// much. Where F is piecewise linear, the scores at 0 and 1 have no error at all: only the `active` ones count, and a sum
// that is right to their rounding has the right active set.
template <class F, class P> P sum_limit(double eps, P k, P active) {
  if constexpr (F::kMoments == 1) return 2 * eps * smallest(k, active);
  if constexpr (F::kBent) return 2 * eps * atleast(1e-30, k);  // y falls like a power of u: smaller ones are not searched for
  return 2 * eps * k;
}

// The same for one row; what is smaller than every number of the type does not count.
template <class F, class C> double row_limit(int64_t n, double k, double active) {
  using One = Pack<double, 1>;
  return most(double(n) * std::numeric_limits<C>::min(), sum_limit<F>(kEps<C>, One(k), One(active)).v[0][0]);
}

// What the rows of a call share: the curve, and the quantiles of the last k and n - k asked for, most often the same for every row.
struct Memo {
  const KhotCurve* curve = nullptr;
  double above = 0, below = 0, quantile = 0, normal = 0;
  template <class F> void set(double above_, double below_) {
    if (above_ == above && below_ == below) return;
    above = above_, below = below_;
    double total = above + below;
    if constexpr (F::kCurved) quantile = F::quantile(above / total, below / total, *curve);
    else quantile = F::quantile(above / total, below / total);
    normal = rough_normal_quantile(above / total, below / total);
  }
};

}  // namespace
