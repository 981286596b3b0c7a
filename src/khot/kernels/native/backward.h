// The derivative, from the output alone: v = F'(u) as a function of y, then
//   gk = sum(v g) / sum(v),   gx = v (g - gk) / tau,   gtau = -sum gx (x - t) / tau.
#pragma once
#include "passes.h"
#include "team.h"

namespace {

struct Weighted {
  double v = 0, vg = 0;
  void add(const Weighted& o) { v += o.v, vg += o.vg; }
};

template <class F, class S> struct Backward {
  using C = Compute<S>;
  static constexpr int64_t w = kWidth<C>;
  // The gaussian slope is dear: it is kept in the output between the two passes.
  static constexpr bool kKeepSlope = std::is_same<F, Gaussian>::value && kExactStore<S>;

  static Weighted sums(const S* y, const S* g, S* gx, int64_t n) {
    Weighted total;
    Vec<C> v{}, vg{};
    auto at = [&](Vec<C> yy, Vec<C> gg) KHOT_INLINE_LAMBDA {
      Vec<C> slope = F::template slope<C>(yy);
      v += slope, vg = fma(slope, gg, vg);
      return slope;
    };
    auto flush = [&]() KHOT_INLINE_LAMBDA {
      total.v += sum_lanes(v), total.vg += sum_lanes(vg);
      v = vg = Vec<C>{};
    };
    int64_t i = 0;
    while (i + w <= n) {
      for (int64_t end = least(n - w + 1, i + 128 * w); i < end; i += w) {
        Vec<C> slope = at(load(y + i), load(g + i));
        if (kKeepSlope) store(gx + i, slope);
      }
      flush();
    }
    if (i < n) {
      Vec<C> slope = at(load_part(y + i, int(n - i)), load_part(g + i, int(n - i)));
      if (kKeepSlope) store_part(gx + i, slope, int(n - i));
      flush();
    }
    return total;
  }

  static void scores(const S* y, const S* g, S* gx, int64_t n, C mean, C inv_tau) {
    auto at = [&](Vec<C> from, Vec<C> gg) KHOT_INLINE_LAMBDA {
      Vec<C> slope = kKeepSlope ? from : F::template slope<C>(from);
      return slope * inv_tau * (gg - mean);
    };
    const S* from = kKeepSlope ? gx : y;
    int64_t i = 0;
    for (; i + w <= n; i += w) store(gx + i, at(load(from + i), load(g + i)));
    if (i < n) store_part(gx + i, at(load_part(from + i, int(n - i)), load_part(g + i, int(n - i))), int(n - i));
  }

  // sum gx u over the finite scores; gx is recomputed so that half precision is not rounded twice
  static double tau_sum(const S* y, const S* g, const S* x, int64_t n, C mean, C inv_tau, double t) {
    const C high = C(t);
    const Vec<C> low = splat(C((double(high) - t) * double(inv_tau)));
    double total = 0;
    Vec<C> sum{};
    auto at = [&](Vec<C> yy, Vec<C> gg, Vec<C> xx) KHOT_INLINE_LAMBDA {
      Vec<C> u = fma(xx - high, splat(inv_tau), low), slope = F::template slope<C>(yy);
      Vec<C> term = slope * inv_tau * (gg - mean) * u;
      sum += (xx - xx == C(0)) & (slope != C(0)) ? term : Vec<C>{};
    };
    int64_t i = 0;
    while (i + w <= n) {
      for (int64_t end = least(n - w + 1, i + 128 * w); i < end; i += w) at(load(y + i), load(g + i), load(x + i));
      total += sum_lanes(sum), sum = Vec<C>{};
    }
    if (i < n) at(load_part(y + i, int(n - i)), load_part(g + i, int(n - i)), load_part(x + i, int(n - i)));
    return total + sum_lanes(sum);
  }

  static void row(const S* y, const S* g, const S* x, S* gx, int64_t n, double tau, double shift, double* gk, double* gtau, int threads) {
    Weighted s = reduce_blocks<Weighted>(threads, n, [=](int64_t b, int64_t size) { return sums(y + b, g + b, gx + b, size); });
    double mean = s.v == 0 ? 0 : s.vg / s.v;
    C inv_tau = C(1 / tau), centre = C(mean);
    reduce_blocks<Empty>(threads, n, [=](int64_t b, int64_t size) {
      scores(y + b, g + b, gx + b, size, centre, inv_tau);
      return Empty();
    });
    if (gk) *gk = mean;
    if (gtau) {
      *gtau = -reduce_blocks<Total>(threads, n, [=](int64_t b, int64_t size) {
                 return Total{tau_sum(y + b, g + b, x + b, size, centre, inv_tau, shift)};
               }).value;
    }
  }
};

}  // namespace
