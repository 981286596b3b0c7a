// Selection and sampling on awkward rows, each at the end of its allocation.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

extern "C" {
int khot_select(int, const void*, const int64_t*, int64_t, void*, void*, void*, int64_t*, int64_t, int64_t, int);
int khot_draw(int, int, const void*, const double*, double, const int64_t*, void*, uint64_t, int64_t, int64_t, int64_t, int, int);
}

template <class T> static int check_selection(int dtype, int64_t rows, int64_t n, int kind, int threads, std::mt19937& random) {
  std::unique_ptr<T[]> x(new T[rows * n]), mask(new T[rows * n]), kth(new T[rows]), next(new T[rows]);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < rows * n; i++) {
    double v = kind == 0 ? normal(random) : kind == 1 ? double(random() % 4) : kind == 2 ? 0.5 : 1e30 * normal(random);
    if (kind == 4) v = random() % 5 ? v : random() % 3 ? -INFINITY : INFINITY;
    float f = float(v);
    uint32_t b;
    std::memcpy(&b, &f, 4);
    if (sizeof(T) == 2) x[i] = T(b >> 16);
    else x[i] = T(v);
  }
  int failures = 0;
  for (int64_t k : {int64_t(0), int64_t(1), n / 3, n - 1, n}) {
    if (k < 0) continue;
    std::unique_ptr<int64_t[]> index(new int64_t[rows * k + 1]);
    failures += khot_select(dtype, x.get(), nullptr, k, mask.get(), kth.get(), next.get(), index.get(), rows, n, threads) != 0;
    for (int64_t i = 0; i < rows * k; i++) failures += index[i] < 0 || index[i] >= n;
    for (int64_t r = 0; r < rows && sizeof(T) > 2; r++) {
      int64_t ones = 0, present = 0;
      for (int64_t i = 0; i < n; i++) ones += mask[r * n + i] == T(1), present += double(x[r * n + i]) > -INFINITY;
      failures += ones != (k < present ? k : present);
    }
  }
  return failures;
}

template <class T> static int check_draw(int design, int dtype, int64_t rows, int64_t n, int shuffled, int threads, std::mt19937& random) {
  std::unique_ptr<T[]> p(new T[rows * n]), out(new T[3 * rows * n]);
  std::vector<double> k(rows);
  for (int64_t r = 0; r < rows; r++) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) p[r * n + i] = T((random() % 1000) / 1000.0), sum += double(p[r * n + i]);
    k[r] = r % 2 ? sum : std::floor(sum);  // a fraction, or a sum that has to be moved to a whole number
  }
  int failures = khot_draw(design, dtype, p.get(), k.data(), 0, nullptr, out.get(), 7, 3, rows, n, shuffled, threads) != 0;
  for (int64_t r = 0; r < 3 * rows; r++) {
    int64_t ones = 0;
    for (int64_t i = 0; i < n; i++) ones += out[r * n + i] == T(1);
    double gap = std::fabs(double(ones) - k[r % rows]);
    failures += !(gap < 1) && !(gap < 1.5 && r % rows % 2 == 0);
  }
  return failures;
}

static int check_hard(std::mt19937& random) {
  int failures = 0;
  for (int64_t n : {1, 2, 7, 31, 32, 33, 100, 257, 1000, 4097, 9000, 20000, 70000})
    for (int threads : {1, 3}) {
      int64_t rows = n < 1000 ? 5 : 2;
      for (int kind = 0; kind < 5; kind++) {
        failures += check_selection<float>(0, rows, n, kind, threads, random) + check_selection<double>(1, rows, n, kind, threads, random);
        failures += check_selection<uint16_t>(2, rows, n, kind, threads, random) + check_selection<uint16_t>(3, rows, n, kind, threads, random);
      }
      for (int design : {0, 1})
        for (int shuffled : {0, 1})
          failures += check_draw<float>(design, 0, rows, n, shuffled, threads, random) + check_draw<double>(design, 1, rows, n, shuffled, threads, random);
    }
  std::printf("selection and sampling: %d failures\n", failures);
  return failures;
}
