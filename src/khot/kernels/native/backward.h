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

template <class F, class C> struct Backward {
  using P = Wide<C>;
  // The gaussian slope is dear: it is kept in the output between the two passes, where that is wide enough.
  static constexpr bool kKeepSlope = std::is_same<F, Gaussian>::value;
  struct Rows { Row<C> y, g, x, gx; };

  static Weighted sums(const Rows& r, int64_t n) {
    const bool keep = kKeepSlope && r.gx.exact();
    Weighted total;
    C y[kGroup<C>], g[kGroup<C>], out[kGroup<C>];
    for (int64_t i = 0; i < n;) {
      Vec<C> v{}, vg{};
      for (int64_t end = least(n, i + kFlush * kGroup<C>); i < end; i += kGroup<C>) {
        P slope = F::slope(load_pack<P>(r.y.read(i, n, y, C(0)))), weight = load_pack<P>(r.g.read(i, n, g, C(0)));
        KHOT_EACH(P::U, v += slope.v[j]);
        KHOT_EACH(P::U, vg = fma(slope.v[j], weight.v[j], vg));
        if (keep) store_pack(r.gx.target(i, n, out), slope), r.gx.written(i, n, out);
      }
      total.v += sum_lanes(v), total.vg += sum_lanes(vg);
    }
    return total;
  }

  static Empty scores(const Rows& r, int64_t n, C mean, C inv_tau) {
    const bool kept = kKeepSlope && r.gx.exact();
    C y[kGroup<C>], g[kGroup<C>], out[kGroup<C>];
    for (int64_t i = 0; i < n; i += kGroup<C>) {
      P slope = load_pack<P>((kept ? r.gx : r.y).read(i, n, y, C(0)));
      if (!kept) slope = F::slope(slope);
      store_pack(r.gx.target(i, n, out), slope * inv_tau * (load_pack<P>(r.g.read(i, n, g, C(0))) - mean));
      r.gx.written(i, n, out);
    }
    return Empty();
  }

  // sum gx u over the finite scores; gx is recomputed so that half precision is not rounded twice
  static Total tau_sum(const Rows& r, int64_t n, C mean, C inv_tau, double t) {
    const C high = C(t), low = C((double(high) - t) * double(inv_tau));
    Total total;
    C y[kGroup<C>], g[kGroup<C>], x[kGroup<C>];
    for (int64_t i = 0; i < n;) {
      VecD sum{};
      for (int64_t end = least(n, i + kFlush * kGroup<C>); i < end; i += kGroup<C>) {
        P score = load_pack<P>(r.x.read(i, n, x, C(0))), slope = F::slope(load_pack<P>(r.y.read(i, n, y, C(0))));
        P u = fma(score - high, P(inv_tau), P(low)), gx = slope * inv_tau * (load_pack<P>(r.g.read(i, n, g, C(0))) - mean);
        sum += widen_add(fold(select((score - score == C(0)) & (slope != C(0)), gx * u, P(0))));
      }
      total.add(sum_lanes(sum));
    }
    return total;
  }

  static void row(const Rows& rows, int64_t n, double tau, double shift, double* gk, double* gtau, int threads) {
    auto part = [=](int64_t b) { return Rows{rows.y.from(b), rows.g.from(b), rows.x.from(b), rows.gx.from(b)}; };
    Weighted s = reduce_blocks<Weighted>(threads, n, [=](int64_t b, int64_t size) { return sums(part(b), size); });
    const double mean = s.v == 0 ? 0 : s.vg / s.v;
    const C inv_tau = C(1 / tau), centre = C(mean);
    reduce_blocks<Empty>(threads, n, [=](int64_t b, int64_t size) { return scores(part(b), size, centre, inv_tau); });
    if (gk) *gk = mean;
    if (!gtau) return;
    *gtau = -reduce_blocks<Total>(threads, n, [=](int64_t b, int64_t size) { return tau_sum(part(b), size, centre, inv_tau, shift); }).get();
  }
};

}  // namespace
