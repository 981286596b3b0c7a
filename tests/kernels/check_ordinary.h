// The entry points of the ordinary call, against the general ones.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>

extern "C" {
int khot_threshold_forward(int, int, const void*, void*, const double*, double, const double*, double, double*, int64_t, int64_t, int,
                           const void*);
int khot_threshold_backward(int, int, const void*, const void*, const void*, const double*, void*, double*, double*, const double*, double,
                            int64_t, int64_t, int, const void*);
int khot_ordinary_forward(const void*, void*, const void*);
int khot_ordinary_backward(const void*, const void*, void*, const void*);
int khot_ordinary_mask(const void*, void*, const void*);
}

static int check_ordinary(std::mt19937& random) {
  struct { double k, tau; int64_t scores, n; int32_t family, dtype, threads; } ask{};
  int failures = 0;
  std::normal_distribution<float> normal;
  for (int64_t rows : {0, 1, 5, 40})
    for (int64_t n : {1, 8, 65, 1000, 5000})
      for (int family = 0; family < 4; family++) {
        const size_t all = size_t(rows * n);
        std::unique_ptr<float[]> x(new float[all]), one(new float[all]), other(new float[all]), g(new float[all]), gx(new float[all]), hx(new float[all]);
        for (size_t i = 0; i < all; i++) x[i] = normal(random), g[i] = normal(random);
        ask.k = double(n / 3), ask.tau = 0.7, ask.scores = rows * n, ask.n = n, ask.family = family, ask.dtype = 0, ask.threads = 2;
        failures += khot_ordinary_forward(x.get(), one.get(), &ask) != 0;
        khot_threshold_forward(family, 0, x.get(), other.get(), nullptr, ask.k, nullptr, ask.tau, nullptr, rows, n, 2, nullptr);
        failures += std::memcmp(one.get(), other.get(), all * sizeof(float)) != 0;
        failures += khot_ordinary_backward(one.get(), g.get(), gx.get(), &ask) != 0;
        khot_threshold_backward(family, 0, one.get(), g.get(), nullptr, nullptr, hx.get(), nullptr, nullptr, nullptr, ask.tau, rows, n, 2, nullptr);
        failures += std::memcmp(gx.get(), hx.get(), all * sizeof(float)) != 0;
        failures += khot_ordinary_mask(x.get(), one.get(), &ask) != 0;
        double ones = 0;
        for (size_t i = 0; i < all; i++) ones += one[i];
        failures += ones != double(rows) * ask.k;
      }
  ask.family = 9, ask.scores = ask.n = 1;
  float v = 0;
  failures += khot_ordinary_forward(&v, &v, &ask) != 1;
  return failures;
}
