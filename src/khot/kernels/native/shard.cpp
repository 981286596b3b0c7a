// The passes of shard.h for one instruction set: this file is compiled once for each, with KHOT_ISA naming it.
#include "shard.h"

#include <cmath>

#include "drive.h"

namespace {

template <class C> Row<C> part_of(const void* data, int64_t at) {
  return Row<C>{const_cast<void*>(data), sizeof(C) == 4 ? kFloat32 : kFloat64}.from(at);
}

struct Moment {
  double sum = 0, square = 0;
  void add(const Moment& o) { sum += o.sum, square += o.square; }
};

// Of x and its square, which only a start is made from.
template <class C> void moments_of(const KhotShard& a, int64_t r, int threads) {
  const Row<C> row = part_of<C>(a.x, r * a.n);
  Moment m = reduce_blocks<Moment>(threads, a.n, [=](int64_t begin, int64_t size) {
    Stats s = moments<C>(row.from(begin), size, C(0));
    return Moment{s.mean * double(size), s.square * double(size)};
  });
  a.sums[2 * r] = m.sum, a.sums[2 * r + 1] = m.square;
}

template <class F, class C> Shift<C> shift_of(const KhotShard& a, int64_t r) {
  const double inv_tau = 1 / a.tau[r * a.tau_stride], high = double(C(a.at[r]));
  const double low = (high - a.at[r]) * inv_tau + a.low[r];  // what rounding took from the threshold stays in low
  return {C(high), C(F::kUnit * inv_tau), C(F::kUnit * low), C(F::kRefined ? 0.0 : std::exp(-low)), nullptr};
}

template <class F, class C> void measure_row(const KhotShard& a, int64_t r, int threads) {
  const Row<C> row = part_of<C>(a.x, r * a.n);
  const Shift<C> shift = shift_of<F, C>(a, r);
  Sums s = reduce_blocks<Sums>(threads, a.n, [=](int64_t begin, int64_t size) {
    return measure<F, C, false, false, false>(row.from(begin), nullptr, size, shift);
  });
  a.sums[2 * r] = s.y.get(), a.sums[2 * r + 1] = s.v[0];
}

template <class F, class C> void mask_row(const KhotShard& a, int64_t r, int threads) {
  const Line<C> line{part_of<C>(a.x, r * a.n), a.n, threads};
  a.sums[2 * r] = emit_whole<F, C>(line, nullptr, part_of<C>(a.out, r * a.n), shift_of<F, C>(a, r)).get();
}

// The slope that the first half may leave in the output is what the second half finds there.
template <class F, class C> void derive_row(bool weigh, const KhotShard& a, int64_t r, int threads) {
  using B = Backward<F, C>;
  const typename B::Rows rows{part_of<C>(a.x, r * a.n), part_of<C>(a.g, r * a.n), part_of<C>(a.x, r * a.n), part_of<C>(a.out, r * a.n)};
  if (weigh) {
    Weighted s = B::template over<Weighted>(rows, a.n, threads, [](const typename B::Rows& row, int64_t size) { return B::sums(row, size, nullptr); });
    a.sums[2 * r] = s.vg, a.sums[2 * r + 1] = s.v;
    return;
  }
  const C mean = C(a.at[r]), inv_tau = C(1 / a.tau[r * a.tau_stride]);
  B::template over<Empty>(rows, a.n, threads, [=](const typename B::Rows& row, int64_t size) { return B::scores(row, size, mean, inv_tau, nullptr); });
}

template <class F, class C> int run_rows(int part, const KhotShard& a) {
  over_rows(a.rows, a.n, a.threads, 1, [&](int64_t from, int64_t to, int threads) {
    for (int64_t r = from; r < to; r++) {
      if (part == kKhotMoments) moments_of<C>(a, r, threads);
      else if (part == kKhotMeasure) measure_row<F, C>(a, r, threads);
      else if (part == kKhotMask) mask_row<F, C>(a, r, threads);
      else derive_row<F, C>(part == kKhotWeigh, a, r, threads);
    }
  });
  return kKhotDone;
}

template <class F> int run_type(int part, int dtype, const KhotShard& a) {
  if (dtype == kFloat32) return run_rows<F, float>(part, a);
  if (dtype == kFloat64) return run_rows<F, double>(part, a);
  return kKhotType;
}

int run(int part, int family, int dtype, const KhotShard& a) {
  switch (family) {
    case kSigmoid: return run_type<Sigmoid>(part, dtype, a);
    case kEuclidean: return run_type<Euclidean>(part, dtype, a);
    case kLaplace: return run_type<Laplace>(part, dtype, a);
    case kGaussian: return run_type<Gaussian>(part, dtype, a);
  }
  return kKhotFamily;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) const KhotShards KHOT_JOIN(khot_shards_, KHOT_ISA) = {run};
