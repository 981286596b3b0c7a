// The kernels on awkward rows, as a program of its own: what `make asan` runs under the sanitizers, and what can be run
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

extern "C" {
int khot_threshold_forward(int, int, const void*, void*, const double*, double, const double*, double, double*, int64_t, int64_t, int);
int khot_threshold_backward(int, int, const void*, const void*, const void*, const double*, void*, double*, double*, const double*, double,
                            int64_t, int64_t, int);
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
    float f = float(v);
    uint32_t b;
    std::memcpy(&b, &f, 4);
    uint16_t half = dtype == 2 ? uint16_t(b >> 16) : uint16_t((b >> 16 & 0x8000) | 0x3800 | (b >> 13 & 0x3ff));
    if (dtype == 0) std::memcpy(x.get() + 4 * i, &f, 4), std::memcpy(g.get() + 4 * i, &f, 4);
    if (dtype == 1) std::memcpy(x.get() + 8 * i, &v, 8), std::memcpy(g.get() + 8 * i, &v, 8);
    if (dtype > 1) std::memcpy(x.get() + 2 * i, &half, 2), std::memcpy(g.get() + 2 * i, &half, 2);
  }
  for (int64_t r = 0; r < rows; r++) k[r] = double(n) * double(random() % 1001) / 1000, tau[r] = 0.1 + double(random() % 100) / 50;
  khot_threshold_forward(family, dtype, x.get(), y.get(), k.data(), 0, tau.data(), 0, shift.data(), rows, n, threads);
  khot_threshold_backward(family, dtype, y.get(), g.get(), x.get(), shift.data(), gx.get(), gk.data(), gtau.data(), tau.data(), 0, rows, n, threads);
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

int main() {
  std::printf("%s\n", khot_isa());
  std::mt19937 random(1);
  const int64_t sizes[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 511, 513, 1000, 4097, 5003, 17000, 70001};
  for (int family = 0; family < 4; family++)
    for (int dtype = 0; dtype < 4; dtype++)
      for (int64_t n : sizes)
        for (int kind = 0; kind < 7; kind++)
          for (int64_t rows : {1, 3, 19})
            if (rows * n < 100000) check(family, dtype, rows, n, kind, 1 + int(random() % 3), random);
  std::vector<std::thread> many;
  for (int t = 0; t < 8; t++) {
    many.emplace_back([t] {
      std::mt19937 own(t);
      for (int i = 0; i < 20; i++) check(t % 4, i % 2, 5, 200 + 300 * i, i % 5, 2, own);
    });
  }
  for (std::thread& t : many) t.join();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
