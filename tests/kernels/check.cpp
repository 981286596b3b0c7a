// The kernels and the tournament on awkward rows, as a program of its own: what `make asan` runs under the sanitizers, and what can be run
// for another architecture under an emulator. Each row lies at the end of its allocation, so that a read or a write too
// far is seen.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check_curve.h"
#include "check_hard.h"
#include "check_magnitude.h"
#include "check_ordinary.h"
#include "check_shard.h"

extern "C" {
int khot_threshold_forward(int, int, const void*, void*, const double*, double, const double*, double, double*, int64_t, int64_t, int,
                           const void*);
int khot_threshold_backward(int, int, const void*, const void*, const void*, const double*, void*, double*, double*, const double*, double,
                            int64_t, int64_t, int, const void*);
int khot_order(int, const void*, int64_t*, int64_t, int64_t, int);
int khot_tournament_forward(int, const void*, const double*, double, double, int, int64_t*, void*, int64_t, int64_t, int64_t, int, int);
int khot_tournament_backward(int, const void*, const double*, double, double, int, const int64_t*, const void*, void*, double*, int64_t, int64_t,
                             int64_t, int, int);
int khot_bags_forward(int, const void*, const void*, const int64_t*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int);
int khot_bags_backward(int, const void*, const void*, const int64_t*, const void*, void*, void*, int64_t, int64_t, int64_t, int64_t, int64_t, int);
int khot_isotonic(int, const double*, const double*, int64_t*, int64_t, int64_t, int);
int khot_ranks_forward(int, int, int, const void*, const double*, double, double, double, int64_t, void*, int32_t*, int64_t, int64_t, int);
int khot_ranks_backward(int, int, int, const void*, const double*, double, double, double, const int32_t*, const void*, void*, double*, int64_t, int64_t,
                        int);
const char* khot_isa();
}

static float half_bits_to_float(uint16_t h, int dtype) {
  if (dtype == 2) {
    uint32_t b = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &b, 4);
    return f;
  }
  int sign = h >> 15, exponent = h >> 10 & 31, mantissa = h & 1023;
  float f = exponent == 31 ? (mantissa ? NAN : INFINITY) : exponent ? std::ldexp(1024.f + mantissa, exponent - 25) : std::ldexp(float(mantissa), -24);
  return sign ? -f : f;
}

static int failures = 0;

static double value_at(const void* p, int dtype, int64_t i) {
  if (dtype == 0) return static_cast<const float*>(p)[i];
  if (dtype == 1) return static_cast<const double*>(p)[i];
  return half_bits_to_float(static_cast<const uint16_t*>(p)[i], dtype);
}

static void check(int family, int dtype, int64_t rows, int64_t n, int kind, int threads, std::mt19937& random) {
  static const size_t bytes[] = {4, 8, 2, 2};
  size_t total = size_t(rows * n) * bytes[dtype];
  std::unique_ptr<char[]> x(new char[total]), y(new char[total]), g(new char[total]), gx(new char[total]);
  std::vector<double> k(rows), tau(rows), shift(rows), gk(rows), gtau(rows);
  std::normal_distribution<double> normal;
  std::cauchy_distribution<double> cauchy;
  for (int64_t i = 0; i < rows * n; i++) {
    double v = kind == 0 ? normal(random) : kind == 1 ? 100 * normal(random) : kind == 2 ? cauchy(random) : kind == 3 ? double(random() % 4) : 0.5;
    if (kind == 5) v = random() % 5 ? normal(random) : random() % 3 ? -INFINITY : INFINITY;
    if (kind == 6) v = 1e30 * normal(random);
    if (kind == 7) v = i % n ? 1e17 : 0;
    if (kind == 8) v = std::exp(6 * normal(random));
    float f = float(v);
    uint32_t b;
    std::memcpy(&b, &f, 4);
    uint16_t half = dtype == 2 ? uint16_t(b >> 16) : uint16_t((b >> 16 & 0x8000) | 0x3800 | (b >> 13 & 0x3ff));
    if (dtype == 0) std::memcpy(x.get() + 4 * i, &f, 4), std::memcpy(g.get() + 4 * i, &f, 4);
    if (dtype == 1) std::memcpy(x.get() + 8 * i, &v, 8), std::memcpy(g.get() + 8 * i, &v, 8);
    if (dtype > 1) std::memcpy(x.get() + 2 * i, &half, 2), std::memcpy(g.get() + 2 * i, &half, 2);
  }
  for (int64_t r = 0; r < rows; r++) k[r] = double(n) * double(random() % 1001) / 1000, tau[r] = 0.1 + double(random() % 100) / 50;
  int code = khot_threshold_forward(family, dtype, x.get(), y.get(), k.data(), 0, tau.data(), 0, shift.data(), rows, n, threads, curve_of(family));
  code |= khot_threshold_backward(family, dtype, y.get(), g.get(), x.get(), shift.data(), gx.get(), gk.data(), gtau.data(), tau.data(), 0, rows, n,
                                  threads, curve_of(family));
  if (code) failures++, std::printf("family %d type %d n %lld kind %d: code %d\n", family, dtype, (long long)n, kind, code);
  double eps = dtype == 0 ? 1.2e-7 : dtype == 1 ? 2.3e-16 : dtype == 2 ? 8e-3 : 1e-3;
  for (int64_t r = 0; r < rows; r++) {
    long double sum = 0;
    double present = 0;
    for (int64_t i = 0; i < n; i++) sum += value_at(y.get(), dtype, r * n + i), present += value_at(x.get(), dtype, r * n + i) > -INFINITY;
    double expected = std::fmin(k[r], present);
    if (!(std::fabs(double(sum - expected)) <= 6 * eps * std::fmax(1, expected))) {
      failures++;
      std::printf("family %d type %d n %lld kind %d: k %.9g sum %.9g\n", family, dtype, (long long)n, kind, expected, double(sum));
    }
  }
}

static void require(bool holds, const char* what, int64_t n, int64_t k, int kind) {
  if (holds) return;
  failures++;
  std::printf("%s: n %lld k %lld kind %d\n", what, (long long)n, (long long)k, kind);
}

template <class T> static T any_score(int kind, std::mt19937& random) {
  std::normal_distribution<double> normal;
  if (kind == 1) return T(random() % 4);
  if (kind == 2) return T(random() % 5 ? normal(random) : random() % 3 ? -INFINITY : INFINITY);
  if (kind == 3) return T(random() % 40 ? normal(random) : NAN);
  return T(kind == 4 ? 1e30 * normal(random) : kind == 5 ? 1e-3 * normal(random) : normal(random));
}

// Sorts, plays, sums and differentiates: the order must descend, every item must sit in one place, every place must weigh 1.
template <class T> static void tournament(int dtype, int64_t rows, int64_t n, int64_t k, int kind, bool power, int threads, std::mt19937& random) {
  const int64_t d = 1 + int64_t(random() % 70);
  int rounds = 0;
  while ((k << rounds) < n) rounds++;
  int64_t width = int64_t(1) << rounds, all = rows * k * width;
  std::unique_ptr<T[]> scores(new T[rows * n]), weight(new T[all]), x(new T[rows * n * d]), out(new T[rows * k * d]), gs(new T[rows * n]);
  std::unique_ptr<T[]> gx(new T[rows * n * d]), gw(new T[all]);
  std::unique_ptr<int64_t[]> order(new int64_t[rows * n]), leaves(new int64_t[all]);
  std::vector<double> tau(rows), gtau(rows);
  for (double& t : tau) t = 0.5 + double(random() % 100) / 50;
  for (int64_t i = 0; i < rows * n; i++) scores[i] = any_score<T>(kind, random);
  for (int64_t i = 0; i < rows * n * d; i++) x[i] = 1;
  khot_order(dtype, scores.get(), order.get(), rows, n, threads);
  khot_tournament_forward(dtype, scores.get(), tau.data(), 0, 50, power, leaves.get(), weight.get(), rows, n, k, rounds, threads);
  khot_bags_forward(dtype, x.get(), weight.get(), leaves.get(), out.get(), rows, n, d, k, width, threads);
  khot_bags_backward(dtype, x.get(), weight.get(), leaves.get(), out.get(), gx.get(), gw.get(), rows, n, d, k, width, threads);
  khot_tournament_backward(dtype, scores.get(), tau.data(), 0, 50, power, leaves.get(), gw.get(), gs.get(), gtau.data(), rows, n, k, rounds, threads);
  for (int64_t r = 0; r < rows; r++) {
    const T* s = scores.get() + r * n;
    std::vector<int> seen(n);
    bool descends = true, once = true, has_nan = false;
    int64_t present = 0;
    for (int64_t i = 0; i < n; i++) has_nan |= s[i] != s[i], present += s[i] > -INFINITY;
    for (int64_t i = 1; i < n; i++) descends &= !(s[order[r * n + i - 1]] < s[order[r * n + i]]);
    for (int64_t i = 0; i < k * width; i++) seen[leaves[r * k * width + i]]++;
    for (int count : seen) once &= count == 1 || count == 2;
    require(descends, "order", n, k, kind);
    require(once, "leaves", n, k, kind);
    if (has_nan || (power && kind == 4)) continue;  // powers overflow
    double sum = 0;
    for (int64_t p = r * k; p < (r + 1) * k; p++) sum += out[p * d];
    require(std::fabs(sum - double(present < k ? present : k)) < 1e-5 * double(k), "weights", n, k, kind);
    for (int64_t i = 0; i < n; i++) require(std::isfinite(gs[r * n + i]), "gradient", n, k, kind);
  }
}

static void tournaments(std::mt19937& random) {
  for (int64_t n : {1, 2, 3, 5, 8, 31, 33, 64, 100, 500, 2047, 2500})
    for (int64_t k : {1, 2, 3, 8, 31, 400})
      for (int kind = 0; kind < 6; kind++)
        for (int64_t rows : {1, 5}) {
          if (k > n) continue;
          tournament<float>(0, rows, n, k, kind, kind % 2, 1 + int(random() % 3), random);
          tournament<double>(1, rows, n, k, kind, random() % 2, 1 + int(random() % 3), random);
        }
}

// Soft ranks and sorted values: finite rows must keep their sum, ranks must stay in range, gradients must be finite.
template <class T> static void ranks(int dtype, int law, int64_t rows, int64_t n, int kind, int threads, std::mt19937& random) {
  std::unique_ptr<T[]> x(new T[rows * n]), out(new T[rows * n]), g(new T[rows * n]), gx(new T[rows * n]);
  std::unique_ptr<double[]> wide(new double[rows * n]), y(new double[rows * n]), w(new double[rows * n]);
  std::unique_ptr<int32_t[]> items(new int32_t[rows * n]);
  std::unique_ptr<int64_t[]> ids(new int64_t[rows * n]);
  std::vector<double> tau(rows), gtau(rows);
  for (double& t : tau) t = 0.1 + double(random() % 100) / 25;
  for (int64_t i = 0; i < rows * n; i++) x[i] = any_score<T>(kind, random), g[i] = any_score<T>(0, random), y[i] = w[i] = double(g[i]);
  require(!khot_ranks_forward(dtype, law, 0, x.get(), tau.data(), 0, 1, 1, 0, out.get(), items.get(), rows, n, threads), "code", n, law, kind);
  require(!khot_ranks_backward(dtype, law, 0, x.get(), tau.data(), 0, 1, 1, items.get(), g.get(), gx.get(), gtau.data(), rows, n, threads), "code", n,
          law, kind);
  require(!khot_isotonic(law % 2, y.get(), w.get(), ids.get(), rows, n, threads), "code", n, law, kind);
  for (int64_t r = 0; r < rows; r++) {
    double sum = 0, before = 0, largest = 1;
    bool has_nan = false, is_finite = true;
    for (int64_t i = r * n; i < (r + 1) * n; i++) {
      has_nan |= x[i] != x[i], is_finite &= std::isfinite(x[i]);
      sum += double(out[i]), before += double(x[i]), largest = std::fmax(largest, std::fabs(double(x[i])));
    }
    if (has_nan || (law > 1 && !is_finite)) continue;
    for (int64_t i = r * n; i < (r + 1) * n; i++) {
      require(std::isfinite(gx[i]), "gradient of ranks", n, law, kind);
      require(law > 1 || (out[i] > 1 - 1e-3 && out[i] < double(n) * (1 + 1e-5) + 1e-3), "range of ranks", n, law, kind);
    }
    double expected = law < 2 ? 0.5 * double(n) * double(n + 1) : before;
    if (law < 3) require(std::fabs(sum - expected) <= 1e-5 * double(n) * (law < 2 ? double(n) : largest + double(n) / tau[r]), "sum of ranks", n, law, kind);
  }
  require(khot_ranks_forward(7, law, 0, x.get(), nullptr, 1, 1, 1, 0, out.get(), items.get(), rows, n, threads) == 2, "unknown type", n, law, kind);
  require(khot_ranks_forward(dtype, law, 1, x.get(), nullptr, 1, -1, -1, n, wide.get(), items.get(), rows, n, threads) == 0, "centre", n, law, kind);
}

static void all_ranks(std::mt19937& random) {
  for (int64_t n : {1, 2, 3, 5, 31, 64, 65, 128, 129, 500, 2500})
    for (int kind = 0; kind < 6; kind++)
      for (int law = 0; law < 4; law++) {
        ranks<float>(0, law, 3, n, kind, 1 + int(random() % 3), random);
        ranks<double>(1, law, 3, n, kind, 1 + int(random() % 3), random);
      }
}

int main() {
  std::printf("%s\n", khot_isa());
  std::mt19937 random(1);
  const int64_t sizes[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 511, 513, 1000, 4097, 5003, 17000, 70001};
  for (int family = 0; family < 6; family++)
    for (int dtype = 0; dtype < 4; dtype++)
      for (int64_t n : sizes)
        for (int kind = 0; kind < 9; kind++)
          for (int64_t rows : {1, 3, 19})
            if (rows * n < 100000) check(family, dtype, rows, n, kind, 1 + int(random() % 3), random);
  all_ranks(random);
  tournaments(random);
  std::vector<std::thread> many;
  for (int t = 0; t < 8; t++) {
    many.emplace_back([t] {
      std::mt19937 own(t);
      for (int i = 0; i < 20; i++) check(t % 6, i % 2, 5, 200 + 300 * i, i % 5, 2, own);
    });
  }
  for (std::thread& t : many) t.join();
  failures += check_hard(random) + check_magnitudes(random) + check_ordinary(random) + check_shard(random);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
