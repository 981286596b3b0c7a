// The kernels for one instruction set: this file is compiled once for each, with KHOT_ISA naming it.
#include "kernel.h"

#include "backward.h"
#include "solver.h"

namespace {

constexpr int64_t kGrain = 8192;  // scores that are worth a thread

inline int team_for(int threads, int64_t rows, int64_t n) {
  int64_t worth = rows * n / kGrain;
  return int(least<int64_t>(most(threads, 1), most<int64_t>(worth, 1)));
}

template <class F, class S> void forward_rows(const KhotForward& a, int64_t from, int64_t to, int threads) {
  Solver<F, S> solver(a.n, threads);
  for (int64_t r = from; r < to; r++) {
    solver.add_row(static_cast<const S*>(a.x) + r * a.n, static_cast<S*>(a.y) + r * a.n, a.k[r * a.k_stride], a.tau[r * a.tau_stride]);
  }
  solver.solve();
  if (a.shift)
    for (int64_t r = from; r < to; r++) a.shift[r] = solver.threshold(int(r - from));
}

template <class F, class S> int forward(const KhotForward& a) {
  struct Context { const KhotForward* a; int64_t lanes, groups, chunks; };
  int threads = team_for(a.threads, a.rows, a.n);
  int64_t lanes = a.n > kSampledFrom ? 1 : kLanes, groups = (a.rows + lanes - 1) / lanes;
  if (lanes == 1 && groups < threads) {  // few long rows: the threads share each of them
    for (int64_t r = 0; r < a.rows; r++) forward_rows<F, S>(a, r, r + 1, threads);
    return 0;
  }
  Context context{&a, lanes, groups, threads > 1 ? least<int64_t>(groups, 4 * threads) : 1};
  auto body = [](void* p, int64_t i) {
    Context& c = *static_cast<Context*>(p);
    for (int64_t g = c.groups * i / c.chunks; g < c.groups * (i + 1) / c.chunks; g++)
      forward_rows<F, S>(*c.a, g * c.lanes, least(c.a->rows, (g + 1) * c.lanes), 1);
  };
  if (threads > 1) khot_parallel(threads, context.chunks, body, &context);
  else body(&context, 0);
  return 0;
}

template <class F, class S> void backward_row(const KhotBackward& a, int64_t r, int threads) {
  int64_t at = r * a.n;
  const S* x = static_cast<const S*>(a.x);
  Backward<F, S>::row(static_cast<const S*>(a.y) + at, static_cast<const S*>(a.g) + at, x ? x + at : nullptr,
                      static_cast<S*>(a.gx) + at, a.n, a.tau[r * a.tau_stride], a.gtau ? a.shift[r] : 0,
                      a.gk ? a.gk + r : nullptr, a.gtau ? a.gtau + r : nullptr, threads);
}

template <class F, class S> int backward(const KhotBackward& a) {
  struct Context { const KhotBackward* a; int64_t chunks; };
  int threads = team_for(a.threads, a.rows, a.n);
  if (a.n > kSampledFrom && a.rows < threads) {
    for (int64_t r = 0; r < a.rows; r++) backward_row<F, S>(a, r, threads);
    return 0;
  }
  Context context{&a, threads > 1 ? least<int64_t>(a.rows, 4 * threads) : 1};
  auto body = [](void* p, int64_t i) {
    Context& c = *static_cast<Context*>(p);
    for (int64_t r = c.a->rows * i / c.chunks; r < c.a->rows * (i + 1) / c.chunks; r++) backward_row<F, S>(*c.a, r, 1);
  };
  if (threads > 1) khot_parallel(threads, context.chunks, body, &context);
  else body(&context, 0);
  return 0;
}

template <class F> int forward_of(int dtype, const KhotForward& a) {
  switch (dtype) {
    case 0: return forward<F, float>(a);
    case 1: return forward<F, double>(a);
    case 2: return forward<F, BFloat16>(a);
    case 3: return forward<F, Float16>(a);
  }
  return 2;
}
template <class F> int backward_of(int dtype, const KhotBackward& a) {
  switch (dtype) {
    case 0: return backward<F, float>(a);
    case 1: return backward<F, double>(a);
    case 2: return backward<F, BFloat16>(a);
    case 3: return backward<F, Float16>(a);
  }
  return 2;
}

int any_forward(int family, int dtype, const KhotForward& a) {
  switch (family) {
    case kSigmoid: return forward_of<Sigmoid>(dtype, a);
    case kEuclidean: return forward_of<Euclidean>(dtype, a);
    case kLaplace: return forward_of<Laplace>(dtype, a);
    case kGaussian: return forward_of<Gaussian>(dtype, a);
  }
  return 1;
}
int any_backward(int family, int dtype, const KhotBackward& a) {
  switch (family) {
    case kSigmoid: return backward_of<Sigmoid>(dtype, a);
    case kEuclidean: return backward_of<Euclidean>(dtype, a);
    case kLaplace: return backward_of<Laplace>(dtype, a);
    case kGaussian: return backward_of<Gaussian>(dtype, a);
  }
  return 1;
}

}  // namespace

#define KHOT_STRING2(x) #x
#define KHOT_STRING(x) KHOT_STRING2(x)
#define KHOT_JOIN2(a, b) a##b
#define KHOT_JOIN(a, b) KHOT_JOIN2(a, b)
extern "C" __attribute__((visibility("hidden"))) const KhotKernels KHOT_JOIN(khot_kernels_, KHOT_ISA) = {KHOT_STRING(KHOT_ISA), any_forward, any_backward};
