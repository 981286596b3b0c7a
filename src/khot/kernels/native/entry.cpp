// The entry points, the choice of the instruction set and the threads. Compiled once, for the baseline machine.
#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "kernel.h"
#include "pages.h"

#define KHOT_API extern "C" __attribute__((visibility("default")))

extern "C" const KhotKernels khot_kernels_base;
#ifdef KHOT_HAVE_AVX2
extern "C" const KhotKernels khot_kernels_avx2;
#endif
#ifdef KHOT_HAVE_AVX512
extern "C" const KhotKernels khot_kernels_avx512;
#endif

namespace {

// The copies that this machine can run, from the plainest to the fastest.
struct Copies {
  const KhotKernels* at[3] = {&khot_kernels_base};
  int count = 1;
  Copies() {
#ifdef KHOT_HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) at[count++] = &khot_kernels_avx2;
#endif
#ifdef KHOT_HAVE_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
      at[count++] = &khot_kernels_avx512;
#endif
  }
};
const Copies& copies() {
  static const Copies all;
  return all;
}
std::atomic<const KhotKernels*>& chosen() {
  static std::atomic<const KhotKernels*> copy{copies().at[copies().count - 1]};
  return copy;
}
const KhotKernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

bool has_size(int64_t rows, int64_t n) { return rows >= 0 && n >= 0 && (n == 0 || rows <= INT64_MAX / 8 / n); }

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

// Families: 0 sigmoid, 1 euclidean, 2 laplace, 3 gaussian, 4 entmax with alpha 1.5, 5 with the alpha of `curve`, both for tau over their
// scale. Types: 0 float32, 1 float64, 2 bfloat16, 3 float16.
// A null pointer for k or tau means the value beside it, for all rows. `shift`, `gk` and `gtau` may be null; gtau needs x and
// shift. Returns a KhotCode. Rows without scores have the threshold 0.
KHOT_API int khot_threshold_forward(int family, int dtype, const void* x, void* y, const double* k, double k_value, const double* tau,
                                    double tau_value, double* shift, int64_t rows, int64_t n, int threads, const KhotCurve* curve) {
  if (!has_size(rows, n)) return kKhotSize;
  if (rows == 0 || n == 0) {
    for (int64_t r = 0; shift && r < rows; r++) shift[r] = 0;
    return kKhotDone;
  }
  if (!x || !y) return kKhotNull;
  in_large_pages(y, bytes_of(dtype, rows * n));
  KhotForward a{x, y, k ? k : &k_value, tau ? tau : &tau_value, k ? 1 : 0, tau ? 1 : 0, shift, rows, n, threads, curve};
  return kernels().forward(family, dtype, a);
}

KHOT_API int khot_threshold_backward(int family, int dtype, const void* y, const void* g, const void* x, const double* shift, void* gx,
                                     double* gk, double* gtau, const double* tau, double tau_value, int64_t rows, int64_t n, int threads,
                                     const KhotCurve* curve) {
  if (!has_size(rows, n)) return kKhotSize;
  if (rows == 0 || n == 0) {
    for (int64_t r = 0; gk && r < rows; r++) gk[r] = 0;
    for (int64_t r = 0; gtau && r < rows; r++) gtau[r] = 0;
    return kKhotDone;
  }
  if (!y || !g || !gx || (gtau && (!x || !shift))) return kKhotNull;
  in_large_pages(gx, bytes_of(dtype, rows * n));
  KhotBackward a{y, g, x, shift, gx, gk, gtau, tau ? tau : &tau_value, tau ? 1 : 0, rows, n, threads, curve};
  return kernels().backward(family, dtype, a);
}

// The instruction sets that this library and this machine both have: the i-th name, or null after the last.
KHOT_API const char* khot_isa_at(int i) { return i >= 0 && i < copies().count ? copies().at[i]->name : nullptr; }
// The one in use.
KHOT_API const char* khot_isa() { return kernels().name; }
// Uses another one from the next call on. Returns 0, or 1 if there is none of that name.
KHOT_API int khot_use_isa(const char* name) {
  for (int i = 0; name && i < copies().count; i++) {
    if (std::strcmp(name, copies().at[i]->name)) continue;
    chosen().store(copies().at[i], std::memory_order_relaxed);
    return 0;
  }
  return 1;
}
KHOT_API int khot_version() { return 6; }
