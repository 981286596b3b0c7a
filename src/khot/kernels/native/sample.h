// Starting a long row from the solution of a sample of it.
#pragma once
#include <cstdlib>

#include "limits.h"
#include "locate.h"

namespace {

template <class F, class C> class Solver;

constexpr int64_t kSampleMost = 16384;  // fits the second-level cache of the machine named in solver.h beside the row
constexpr int64_t kSampleWidth = 8;  // scores that are taken side by side

template <class C> struct Sample {
  static constexpr Stored kExact = sizeof(C) == 4 ? kFloat32 : kFloat64;
  int64_t m, parts;  // m scores to each part
  C* values;         // the parts, and room for m results
  Sample(int64_t n, int64_t parts_) : m(least(kSampleMost, most(int64_t(512), n / 64)) / kSampleWidth * kSampleWidth), parts(parts_) {
    values = static_cast<C*>(std::malloc(size_t(parts + 1) * size_t(m) * sizeof(C)));
  }
  Sample(const Sample&) = delete;
  ~Sample() { std::free(values); }
  Row<C> row() const { return {values, kExact}; }
  Row<C> results() const { return {values + parts * m, kExact}; }

  // Groups evenly spread over the row; neighbouring groups go to different parts.
  void take(Row<C> x, int64_t n) {
    constexpr int64_t w = kSampleWidth;
    C in[kGroup<C>];
    const int64_t groups = m / w;
    const double stride = double(n / w) / double(parts * groups);
    for (int64_t p = 0; p < parts; p++)
      for (int64_t g = 0; g < groups; g++) {
        const int64_t at = int64_t(double(g * parts + p) * stride) * w;
        std::memcpy(values + (p * groups + g) * w, x.read(at, at + kGroup<C> <= n ? n : at + w, in, C(0)), w * sizeof(C));
      }
  }
};

template <class C> struct SampleStart {
  bool near = false;  // `at` is within a fraction of tau of the threshold, very likely
  double at = 0;
  Hint hint;  // else: between which levels to count first
};

// Where the start from mean and variance of the whole sample agrees with `at`, it is the nearer of the two.
template <class F, class C> double if_normal(const Sample<C>& sample, double tau, double quantile, double normal, double at, double within) {
  using One = Pack<double, 1>;
  const C reference = sample.row().first();
  const Stats s = moments(sample.row(), sample.parts * sample.m, reference);
  const double guess =
      start_of<F>(One(double(reference)), One(s.mean), One(s.square), One(tau), One(1 / tau), One(quantile), One(normal)).at.v[0][0];
  return std::fabs(guess - at) < within ? guess : at;
}

// One part of the sample is solved as a row of its own. Its k is binomial about the share of k: the values of its items vary by
// s = sqrt(sum y^2 - (sum y)^2 / m), which is s / sum F' in units of tau. Where that is more than a fraction of tau, the sample
// still tells between which levels to count: four deviations of the number of scores above on either side.
template <class F, class C> SampleStart<C> start_from_sample(const Line<C>& line, double k, double tau, double quantile, double normal,
                                                           const KhotCurve* curve) {
  // For the gaussian, whose evaluation is the most expensive, a larger sample pays: all of its parts tell mean and variance.
  Sample<C> sample(line.n, F::kRefined ? 4 : 1);
  SampleStart<C> start;
  if (!sample.values) return start;
  sample.take(line.row, line.n);
  const double m = double(sample.m), part = least(most(k * m / double(line.n), 1e-9 * m), m * (1 - 1e-9));
  Memo memo;
  memo.curve = curve;
  Solver<F, C> small(sample.m, 1, memo, true);
  small.add_row(sample.row(), sample.results(), part, tau);
  small.solve();
  if (small.is_closed(0)) return start;
  const Spread y = spread_of(sample.results().values(), sample.m);
  const double spread = std::sqrt(most(0.0, y.square - y.sum * y.sum / m)) / small.slope_sum(0);
  if (spread < 0.3) {
    start.near = true, start.at = small.foot(0);
    if (sample.parts > 1) start.at = if_normal<F>(sample, tau, quantile, normal, start.at, 3 * spread * tau);
    return start;
  }
  const double wide = 4 * std::sqrt(part * (1 - part / m)) + 2;
  const Line<C> whole{sample.row(), sample.m, 1};
  const Stats s = whole.stats();
  if (part - wide > 0) start.hint.high = locate(whole, part - wide, tau, s, {});
  if (part + wide < m) start.hint.low = locate(whole, part + wide, tau, s, {});
  return start;
}

}  // namespace
