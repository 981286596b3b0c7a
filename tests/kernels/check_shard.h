// The passes over a part of a row: they agree with each other, and read and write nothing but their rows.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>

extern "C" int khot_shard(int part, int family, int dtype, const void* x, const void* g, void* out, const double* at, const double* low,
                          const double* tau, double tau_value, double* sums, int64_t rows, int64_t n, int threads);

template <class T> int check_shard_of(int family, int64_t rows, int64_t n, std::mt19937& random) {
  const int dtype = sizeof(T) == 4 ? 0 : 1, threads = 1 + int(random() % 3);
  std::normal_distribution<double> normal;
  std::unique_ptr<T[]> x(new T[size_t(rows * n)]), y(new T[size_t(rows * n)]), g(new T[size_t(rows * n)]), gx(new T[size_t(rows * n)]);
  std::unique_ptr<double[]> at(new double[size_t(rows)]), low(new double[size_t(rows)]), tau(new double[size_t(rows)]), sums(new double[size_t(2 * rows)]);
  for (int64_t i = 0; i < rows * n; i++) x[i] = T(normal(random)), g[i] = T(normal(random));
  for (int64_t r = 0; r < rows; r++) at[r] = normal(random), low[r] = 0.1 * normal(random), tau[r] = 0.5 + std::fabs(normal(random));
  int bad = khot_shard(0, family, dtype, x.get(), nullptr, nullptr, nullptr, nullptr, nullptr, 1, sums.get(), rows, n, threads) != 0;
  bad += khot_shard(1, family, dtype, x.get(), nullptr, nullptr, at.get(), low.get(), tau.get(), 0, sums.get(), rows, n, threads) != 0;
  std::unique_ptr<double[]> measured(new double[size_t(rows)]);
  for (int64_t r = 0; r < rows; r++) measured[r] = sums[2 * r];
  bad += khot_shard(2, family, dtype, x.get(), nullptr, y.get(), at.get(), low.get(), tau.get(), 0, sums.get(), rows, n, threads) != 0;
  for (int64_t r = 0; r < rows; r++) bad += !(std::fabs(sums[2 * r] - measured[r]) <= 1e-5 * double(n));
  bad += khot_shard(3, family, dtype, y.get(), g.get(), gx.get(), nullptr, nullptr, nullptr, 1, sums.get(), rows, n, threads) != 0;
  for (int64_t r = 0; r < rows; r++) at[r] = sums[2 * r + 1] == 0 ? 0 : sums[2 * r] / sums[2 * r + 1];
  bad += khot_shard(4, family, dtype, y.get(), g.get(), gx.get(), at.get(), nullptr, tau.get(), 0, sums.get(), rows, n, threads) != 0;
  for (int64_t r = 0; r < rows; r++) {
    double total = 0;  // the derivative of a row that sums to k sums to 0
    for (int64_t i = 0; i < n; i++) total += double(gx[r * n + i]);
    bad += !(std::fabs(total) <= 1e-4 * double(n));
  }
  if (bad) std::printf("shard: family %d, type %d, %lld x %lld\n", family, dtype, (long long)rows, (long long)n);
  return bad;
}

inline int check_shard(std::mt19937& random) {
  int bad = 0;
  for (int family = 0; family < 4; family++)
    for (int64_t n : {1, 7, 31, 32, 33, 100, 1000, 16385, 40000})
      for (int64_t rows : {1, 3}) bad += check_shard_of<float>(family, rows, n, random) + check_shard_of<double>(family, rows, n, random);
  bad += khot_shard(1, 9, 0, &bad, nullptr, nullptr, nullptr, nullptr, nullptr, 1, nullptr, 1, 1, 1) != 4;  // no memory for the sums
  bad += khot_shard(0, 0, 0, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, nullptr, 0, 5, 1) != 0;
  return bad;
}
