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
  // The slope of the gaussian or of a curve is expensive: it is kept in the output between the two passes, where that is wide enough.
  static constexpr bool kKeepSlope = std::is_same<F, Gaussian>::value || F::kCurved;
  struct Rows {
    Row<C> y, g, x, gx;
    Rows from(int64_t i) const { return {y.from(i), g.from(i), x.from(i), gx.from(i)}; }
  };

  // Of a stretch so short that its sums may be kept in C. The groups that lie in place come first, in a loop that knows nothing else.
  struct Partial { Vec<C> v{}, vg{}; };
  static constexpr int64_t kStretch = kFlush * kGroup<C>;
  static KHOT_INLINE Partial partial(const Rows& r, int64_t n, const KhotCurve* curve) {
    Partial sum;
    auto add = [&](const C* y, const C* g) KHOT_INLINE_LAMBDA {
      P slope = slope_of<F>(load_pack<P>(y), curve), weight = load_pack<P>(g);
      sum.v += fold(slope), sum.vg += fold(slope * weight);
      return slope;
    };
    int64_t i = 0;
    if (r.y.exact()) {
      const C *y = r.y.values(), *g = r.g.values();
      C* gx = r.gx.values();
      for (; i + kGroup<C> <= n; i += kGroup<C>) {
        P slope = add(y + i, g + i);
        if (kKeepSlope) store_pack(gx + i, slope);
      }
    }
    const bool keep = kKeepSlope && r.gx.exact();
    for (C y[kGroup<C>], g[kGroup<C>], out[kGroup<C>]; i < n; i += kGroup<C>) {
      P slope = add(r.y.read(i, n, y, C(0)), r.g.read(i, n, g, C(0)));
      if (keep) store_pack(r.gx.target(i, n, out), slope), r.gx.written(i, n, out);
    }
    return sum;
  }
  static Weighted sums(const Rows& r, int64_t n, const KhotCurve* curve) {
    Weighted total;
    for (int64_t i = 0; i < n; i += kStretch) {
      const Partial part = partial(r.from(i), least(kStretch, n - i), curve);
      total.v += sum_lanes(part.v), total.vg += sum_lanes(part.vg);
    }
    return total;
  }
  // Of several short rows, two at a time.
  static void short_sums(const Rows* rows, int count, int64_t n, const KhotCurve* curve, double* mean) {
    for (int r = 0; r < count; r += 2) {
      const Partial one = partial(rows[r], n, curve), two = r + 1 < count ? partial(rows[r + 1], n, curve) : Partial();
      double sum[4] = {0, 0, 0, 0};
      add_sums(one.v, one.vg, two.v, two.vg, sum);
      mean[r] = sum[0] == 0 ? 0 : sum[1] / sum[0];
      if (r + 1 < count) mean[r + 1] = sum[2] == 0 ? 0 : sum[3] / sum[2];
    }
  }

  static Empty scores(const Rows& r, int64_t n, C mean, C inv_tau, const KhotCurve* curve) {
    const bool kept = kKeepSlope && r.gx.exact();
    auto value = [&](const C* from, const C* g) KHOT_INLINE_LAMBDA {
      P slope = load_pack<P>(from);
      if (!kept) slope = slope_of<F>(slope, curve);
      return slope * inv_tau * (load_pack<P>(g) - mean);
    };
    const Row<C> from = kept ? r.gx : r.y;
    int64_t i = 0;
    if (r.y.exact()) {
      const C *y = from.values(), *g = r.g.values();
      C* gx = r.gx.values();
      for (; i + kGroup<C> <= n; i += kGroup<C>) store_pack(gx + i, value(y + i, g + i));
    }
    for (C y[kGroup<C>], g[kGroup<C>], out[kGroup<C>]; i < n; i += kGroup<C>) {
      store_pack(r.gx.target(i, n, out), value(from.read(i, n, y, C(0)), r.g.read(i, n, g, C(0))));
      r.gx.written(i, n, out);
    }
    return Empty();
  }

  // sum gx u over the finite scores; gx is recomputed so that half precision is not rounded twice
  static Total tau_sum(const Rows& r, int64_t n, C mean, C inv_tau, double t, const KhotCurve* curve) {
    const C high = C(t), low = C((double(high) - t) * double(inv_tau));
    Total total;
    C y[kGroup<C>], g[kGroup<C>], x[kGroup<C>];
    for (int64_t i = 0; i < n;) {
      VecD sum{};
      for (int64_t end = least(n, i + kFlush * kGroup<C>); i < end; i += kGroup<C>) {
        P score = load_pack<P>(r.x.read(i, n, x, C(0))), slope = slope_of<F>(load_pack<P>(r.y.read(i, n, y, C(0))), curve);
        P u = fma(score - high, P(inv_tau), P(low)), gx = slope * inv_tau * (load_pack<P>(r.g.read(i, n, g, C(0))) - mean);
        sum += widen_add(fold(select((score - score == C(0)) & (slope != C(0)), gx * u, P(0))));
      }
      total.add(sum_lanes(sum));
    }
    return total;
  }

  template <class R, class Fn> static KHOT_INLINE R over(const Rows& row, int64_t n, int threads, const Fn& fn) {
    if (n <= kBlock) return fn(row, n);
    return reduce_blocks<R>(threads, n, [&](int64_t b, int64_t size) { return fn(row.from(b), size); });
  }

  // One long row, shared by the threads; or several short ones, whose sums come first so that no row waits for another.
  static void solve(const Rows* rows, int count, int64_t n, const double* tau, const double* shift, double* gk, double* gtau, int threads,
                    const KhotCurve* curve) {
    double mean[kLanes];
    if (n <= kStretch) short_sums(rows, count, n, curve, mean);
    else for (int r = 0; r < count; r++) {
      Weighted s = over<Weighted>(rows[r], n, threads, [=](const Rows& row, int64_t size) { return sums(row, size, curve); });
      mean[r] = s.v == 0 ? 0 : s.vg / s.v;
    }
    double inverse = 1;
    for (int r = 0; r < count; r++) {
      inverse = r > 0 && tau[r] == tau[r - 1] ? inverse : 1 / tau[r];
      const C inv_tau = C(inverse), centre = C(mean[r]);
      over<Empty>(rows[r], n, threads, [=](const Rows& row, int64_t size) { return scores(row, size, centre, inv_tau, curve); });
      if (gk) gk[r] = mean[r];
      if (!gtau) continue;
      const double t = shift[r];
      gtau[r] = -over<Total>(rows[r], n, threads, [=](const Rows& row, int64_t size) { return tau_sum(row, size, centre, inv_tau, t, curve); }).get();
    }
  }
};

}  // namespace
