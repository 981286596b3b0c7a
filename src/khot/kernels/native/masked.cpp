// The passes of masked.h for one instruction set: this file is compiled once for each, with KHOT_ISA naming it.
#include "masked.h"

#include "drive.h"

namespace {

template <class C> Row<C> row_at(const void* data) { return {const_cast<void*>(data), sizeof(C) == 4 ? kFloat32 : kFloat64}; }

struct Squares {
  double sum = 0, square = 0;
  void add(const Squares& o) { sum += o.sum, square += o.square; }
};

template <class C> Squares magnitudes(Row<C> w, Row<C> flat, int64_t n) {
  using P = Wide<C>;
  Squares total;
  C in[kGroup<C>], out[kGroup<C>];
  for (int64_t i = 0; i < n;) {
    Vec<C> sum{}, square{};
    for (int64_t end = least(n, i + kFlush * kGroup<C>); i < end; i += kGroup<C>) {
      P size = absolute(load_pack<P>(w.read(i, n, in, C(0))));
      store_pack(flat.target(i, n, out), size), flat.written(i, n, out);
      sum += fold(size), square += fold(size * size);
    }
    total.sum += sum_lanes(sum), total.square += sum_lanes(square);
  }
  return total;
}

template <class C> Empty multiply(Row<C> w, Row<C> y, Row<C> to, int64_t n) {
  using P = Wide<C>;
  C one[kGroup<C>], two[kGroup<C>], out[kGroup<C>];
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    store_pack(to.target(i, n, out), load_pack<P>(w.read(i, n, one, C(0))) * load_pack<P>(y.read(i, n, two, C(0))));
    to.written(i, n, out);
  }
  return Empty();
}

// With v = F'(u), a function of the mask y alone, and mean = sum v g w / sum v:
//   d/dw = g y + v / tau (g |w| - mean sign w) .
template <class F, class C> struct Derivative {
  using P = Wide<C>;
  struct Rows {
    Row<C> y, w, g, out;
    Rows from(int64_t i) const { return {y.from(i), w.from(i), g.data ? g.from(i) : g, out.data ? out.from(i) : out}; }
    KHOT_INLINE P gradient(int64_t i, int64_t n, C* buffer) const { return g.data ? load_pack<P>(g.read(i, n, buffer, C(0))) : P(0); }
  };

  static Weighted sums(const Rows& r, int64_t n) {
    Weighted total;
    C y[kGroup<C>], w[kGroup<C>], g[kGroup<C>];
    for (int64_t i = 0; i < n;) {
      Vec<C> v{}, vg{};
      for (int64_t end = least(n, i + kFlush * kGroup<C>); i < end; i += kGroup<C>) {
        P slope = F::slope(load_pack<P>(r.y.read(i, n, y, C(0))));
        v += fold(slope);
        vg += fold(slope * (r.gradient(i, n, g) * load_pack<P>(r.w.read(i, n, w, C(0)))));
      }
      total.v += sum_lanes(v), total.vg += sum_lanes(vg);
    }
    return total;
  }

  static Empty write(const Rows& r, int64_t n, C mean, C inv_tau) {
    C y[kGroup<C>], w[kGroup<C>], g[kGroup<C>], out[kGroup<C>];
    for (int64_t i = 0; i < n; i += kGroup<C>) {
      P kept = load_pack<P>(r.y.read(i, n, y, C(0))), weight = load_pack<P>(r.w.read(i, n, w, C(0))), grad = r.gradient(i, n, g);
      P centre = select(weight > C(0), P(mean), select(weight < C(0), P(-mean), P(0)));
      store_pack(r.out.target(i, n, out), fma(grad, kept, F::slope(kept) * inv_tau * (grad * absolute(weight) - centre)));
      r.out.written(i, n, out);
    }
    return Empty();
  }

  template <class R, class Fn> static R over(const Rows& rows, int64_t n, int threads, const Fn& fn) {
    return reduce_blocks<R>(threads, n, [&](int64_t begin, int64_t size) { return fn(rows.from(begin), size); });
  }

  static void run(const KhotMasked& a) {
    auto rows_of = [&](int i, int64_t start) {
      return Rows{row_at<C>(a.flat).from(start), row_at<C>(a.w[i]), row_at<C>(a.g[i]), row_at<C>(a.out[i])};
    };
    Weighted total;
    for (int64_t i = 0, start = 0; i < a.count; start += a.sizes[i++])
      if (a.sizes[i]) total.add(over<Weighted>(rows_of(int(i), start), a.sizes[i], a.threads, [](const Rows& r, int64_t n) { return sums(r, n); }));
    const C mean = C(total.v == 0 ? 0 : total.vg / total.v), inv_tau = C(1 / a.tau);
    for (int64_t i = 0, start = 0; i < a.count; start += a.sizes[i++])
      if (a.sizes[i] && a.out[i]) over<Empty>(rows_of(int(i), start), a.sizes[i], a.threads, [=](const Rows& r, int64_t n) { return write(r, n, mean, inv_tau); });
  }
};

template <class C> int gather(const KhotMasked& a) {
  Squares total;
  for (int64_t i = 0, start = 0; i < a.count; start += a.sizes[i++]) {
    if (!a.sizes[i]) continue;
    const Row<C> w = row_at<C>(a.w[i]), flat = row_at<C>(a.flat).from(start);
    total.add(reduce_blocks<Squares>(a.threads, a.sizes[i], [=](int64_t begin, int64_t n) { return magnitudes<C>(w.from(begin), flat.from(begin), n); }));
  }
  a.sums[0] = total.sum, a.sums[1] = total.square;
  return kKhotDone;
}

template <class C> int products(const KhotMasked& a) {
  for (int64_t i = 0, start = 0; i < a.count; start += a.sizes[i++]) {
    if (!a.sizes[i]) continue;
    const Row<C> w = row_at<C>(a.w[i]), y = row_at<C>(a.flat).from(start), to = row_at<C>(a.out[i]);
    reduce_blocks<Empty>(a.threads, a.sizes[i], [=](int64_t b, int64_t n) { return multiply<C>(w.from(b), y.from(b), to.from(b), n); });
  }
  return kKhotDone;
}

template <class C> int derive(int family, const KhotMasked& a) {
  switch (family) {
    case kSigmoid: Derivative<Sigmoid, C>::run(a); return kKhotDone;
    case kEuclidean: Derivative<Euclidean, C>::run(a); return kKhotDone;
    case kLaplace: Derivative<Laplace, C>::run(a); return kKhotDone;
    case kGaussian: Derivative<Gaussian, C>::run(a); return kKhotDone;
  }
  return kKhotFamily;
}

template <class C> int any_part(int part, int family, const KhotMasked& a) {
  return part == kKhotMagnitudes ? gather<C>(a) : part == kKhotProducts ? products<C>(a) : derive<C>(family, a);
}

int run(int part, int family, int dtype, const KhotMasked& a) {
  return dtype == kFloat32 ? any_part<float>(part, family, a) : dtype == kFloat64 ? any_part<double>(part, family, a) : int(kKhotType);
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) const KhotMaskeds KHOT_JOIN(khot_maskeds_, KHOT_ISA) = {run};
