// The entry points, the choice of the instruction set and the threads. Compiled once, for the baseline machine.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "kernel.h"

#define KHOT_API extern "C" __attribute__((visibility("default")))

extern "C" const KhotKernels khot_kernels_base;
#ifdef KHOT_HAVE_AVX2
extern "C" const KhotKernels khot_kernels_avx2;
#endif
#ifdef KHOT_HAVE_AVX512
extern "C" const KhotKernels khot_kernels_avx512;
#endif

namespace {

// The best copy this machine can run, or the one that KHOT_ISA names if it can.
const KhotKernels& choose() {
  const char* wanted = std::getenv("KHOT_ISA");
  auto fits = [&](const KhotKernels& k) { return !wanted || !*wanted || !std::strcmp(wanted, k.name); };
  (void)fits;
#ifdef KHOT_HAVE_AVX512
  if (fits(khot_kernels_avx512) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return khot_kernels_avx512;
#endif
#ifdef KHOT_HAVE_AVX2
  if (fits(khot_kernels_avx2) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return khot_kernels_avx2;
#endif
  return khot_kernels_base;
}
const KhotKernels& kernels() {
  static const KhotKernels& chosen = choose();
  return chosen;
}

struct Work {
  std::atomic<int64_t> next{0};
  int64_t count;
  void (*body)(void*, int64_t);
  void* context;
};
void work(void* p) {
  Work& w = *static_cast<Work*>(p);
  for (int64_t i; (i = w.next.fetch_add(1, std::memory_order_relaxed)) < w.count;) w.body(w.context, i);
}

// The OpenMP runtime that PyTorch has loaded; a second one in the process would fight it for the cores.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
GompParallel gomp() {
  static const GompParallel found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) void khot_parallel(int threads, int64_t count, void (*body)(void*, int64_t), void* context) {
  Work w;
  w.count = count, w.body = body, w.context = context;
  if (count < threads) threads = int(count);
  if (threads <= 1) return work(&w);
  if (GompParallel parallel = gomp()) return parallel(work, &w, unsigned(threads), 0);
  std::vector<std::thread> team;
  for (int i = 1; i < threads; i++) team.emplace_back(work, &w);
  work(&w);
  for (std::thread& t : team) t.join();
}

// Families: 0 sigmoid, 1 euclidean, 2 laplace, 3 gaussian. Types: 0 float32, 1 float64, 2 bfloat16, 3 float16.
// A null pointer for k or tau means the value beside it, for all rows. Returns 0, or 1 or 2 for an unknown family or type.
KHOT_API int khot_threshold_forward(int family, int dtype, const void* x, void* y, const double* k, double k_value, const double* tau,
                                    double tau_value, double* shift, int64_t rows, int64_t n, int threads) {
  if (rows <= 0 || n <= 0) return 0;
  KhotForward a{x, y, k ? k : &k_value, tau ? tau : &tau_value, k ? 1 : 0, tau ? 1 : 0, shift, rows, n, threads};
  return kernels().forward(family, dtype, a);
}

KHOT_API int khot_threshold_backward(int family, int dtype, const void* y, const void* g, const void* x, const double* shift, void* gx,
                                     double* gk, double* gtau, const double* tau, double tau_value, int64_t rows, int64_t n, int threads) {
  if (rows <= 0 || n <= 0) {
    for (int64_t r = 0; r < rows; r++) {
      if (gk) gk[r] = 0;
      if (gtau) gtau[r] = 0;
    }
    return 0;
  }
  KhotBackward a{y, g, x, shift, gx, gk, gtau, tau ? tau : &tau_value, tau ? 1 : 0, rows, n, threads};
  return kernels().backward(family, dtype, a);
}

KHOT_API const char* khot_isa() { return kernels().name; }
KHOT_API int khot_version() { return 1; }
KHOT_API int khot_shares_openmp() { return gomp() ? 1 : 0; }
