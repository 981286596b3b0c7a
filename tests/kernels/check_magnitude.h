// Shrinkage by magnitude on awkward rows, each at the end of its allocation.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

extern "C" int khot_magnitude(int, const void*, const double*, double, const double*, double, double, void*, double*, int64_t, int64_t, int);

// Shares at either side of the threshold must be too many and too few.
template <class T> static int check_magnitude(int dtype, int64_t rows, int64_t n, double power, int threads, std::mt19937& random) {
  std::unique_ptr<T[]> x(new T[rows * n]), y(new T[rows * n]);
  std::vector<double> k(rows), t(rows);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < rows * n; i++) x[i] = T(random() % 7 ? normal(random) : double(random() % 3));
  for (double& wanted : k) wanted = double(n) * double(1 + random() % 998) / 1000;
  int failures = khot_magnitude(dtype, x.get(), k.data(), 0, nullptr, 0.5, power, y.get(), t.data(), rows, n, threads) != 0;
  for (int64_t r = 0; r < rows; r++) {
    double many = 0, few = 0, present = 0;
    for (int64_t i = r * n; i < (r + 1) * n; i++) {
      const double size = std::fabs(double(x[i])), low = t[r] * (1 - 1e-15), high = t[r] * (1 + 1e-15);
      present += size > 0;
      if (size > low) many += std::fmin(1, std::pow((size - low) / 0.5, power) / low);
      if (size > high) few += std::fmin(1, std::pow((size - high) / 0.5, power) / high);
      failures += (x[i] > 0 && y[i] < 0) || (x[i] < 0 && y[i] > 0);
    }
    const double wanted = std::fmin(k[r], present);
    if (many < wanted * (1 - 1e-9) || few > wanted * (1 + 1e-9))
      failures++, std::printf("magnitude: n %lld k %g power %g: %.12g to %.12g\n", (long long)n, k[r], power, few, many);
  }
  return failures;
}

static int check_magnitudes(std::mt19937& random) {
  int failures = 0;
  for (int64_t n : {1, 2, 7, 8, 9, 64, 513})
    for (double power : {1.0, 2.0, 3.0, 1.43, 0.5})
      failures += check_magnitude<float>(0, 5, n, power, 1 + int(random() % 3), random) + check_magnitude<double>(1, 5, n, power, 1, random);
  return failures;
}
