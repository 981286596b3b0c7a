// The four isotonic problems behind soft ranks and soft sorting, with their derivatives.
//
// Each law sees a row x in descending order and the places n, n - 1, ..., 1 beside it. value(block, i) is what comes out for the i-th
// of the row. pull(block, g, out) gives the gradient in x / tau (ranks) or in x (sorted values) from the gradient g in what comes out,
// in_tau(block, g, out) the gradient in tau times tau. All arrays are in the order of the row.
#pragma once
#include "pool.h"

namespace {

// high - low for values in descending order, 0 for two equal infinities.
inline double drop(double high, double low) { return high == low ? 0 : high - low; }

struct Places {
  const double* x;
  double rate;  // 1 / tau
  int64_t n;
  double away(const Block& b, int64_t i) const { return -drop(x[b.first], x[i]) * rate; }
  // The ranks depend on tau through x / tau alone, and a block does not feel a constant added to it.
  double in_tau(const Block& b, const double*, const double* out) const {
    double sum = 0;
    for (int64_t i = b.first; i < b.first + b.count; i++) sum -= out[i] * away(b, i);
    return sum;
  }
};

// Ranks: fit of x / tau - place in least squares. stat: the sum of how far each value lies below the first, over tau.
// The means of two neighbours a, b violate the order if distance + stat_b / count_b - stat_a / count_a <= (count_a + count_b) / 2.
struct RankL2 : Places {
  static constexpr bool ranks = true;
  Block one(int64_t i) const { return {i, 1, 0, 0}; }
  double distance(const Block& a, const Block& b) const { return drop(x[a.first], x[b.first]) * rate; }
  bool pools(const Block& a, const Block& b) const {
    double ca = double(a.count), cb = double(b.count);
    return distance(a, b) * ca * cb + b.stat * ca - a.stat * cb <= 0.5 * (ca + cb) * ca * cb;  // exact for whole numbers
  }
  void take(Block& a, const Block& b) const { a.stat += double(b.count) * distance(a, b) + b.stat; }
  double value(const Block& b, int64_t i) const {
    return double(n - b.first) - 0.5 * double(b.count - 1) + (b.stat / double(b.count) + away(b, i));
  }
  void pull(const Block& b, const double* g, double* out) const {
    double mean = 0;
    for (int64_t i = b.first; i < b.first + b.count; i++) mean += g[i];
    mean /= double(b.count);
    for (int64_t i = b.first; i < b.first + b.count; i++) out[i] = b.count == 1 ? 0 : g[i] - mean;
  }
};

// Ranks by relative entropy: a block's value is log sum e^(x / tau) - log sum of places. stat: the sum of e^((x - x_first) / tau).
struct RankKl : Places {
  static constexpr bool ranks = true;
  Block one(int64_t i) const { return {i, 1, 1, 0}; }
  double places(const Block& b) const { return double(b.count) * (double(n - b.first) - 0.5 * double(b.count - 1)); }
  bool pools(const Block& a, Block& b) const {
    b.other = std::exp(-drop(x[a.first], x[b.first]) * rate) * b.stat;  // the sum as the first block sees it, kept for take
    return a.stat * places(b) <= b.other * places(a);
  }
  void take(Block& a, const Block& b) const { a.stat += b.other; }
  double value(const Block& b, int64_t i) const { return places(b) * (std::exp(away(b, i)) / b.stat); }
  void pull(const Block& b, const double* g, double* out) const {
    double total = 0, dot = 0;
    for (int64_t i = b.first; i < b.first + b.count; i++) {
      double share = b.count == 1 ? 1 : std::exp(away(b, i));
      out[i] = share, total += share, dot += share * g[i];
    }
    for (int64_t i = b.first; i < b.first + b.count; i++) out[i] = b.count == 1 ? 0 : places(b) * (out[i] / total) * (g[i] - dot / total);
  }
};

// Sorted values: fit of place / tau - x in least squares. stat: how far the mean lies below the first value.
struct SortL2 : Places {
  static constexpr bool ranks = false;
  Block one(int64_t i) const { return {i, 1, 0, 0}; }
  double between(const Block& a, const Block& b) const { return (x[a.first] - x[b.first]) + (b.stat - a.stat); }
  bool pools(const Block& a, const Block& b) const { return between(a, b) >= 0.5 * double(a.count + b.count) * rate; }
  void take(Block& a, const Block& b) const { a.stat += between(a, b) * (double(b.count) / double(a.count + b.count)); }
  double step(const Block& b, int64_t i) const { return (0.5 * double(b.count - 1) - double(i - b.first)) * rate; }
  double value(const Block& b, int64_t i) const { return (x[b.first] - b.stat) + step(b, i); }
  void pull(const Block& b, const double* g, double* out) const {
    double mean = 0;
    for (int64_t i = b.first; i < b.first + b.count; i++) mean += g[i];
    mean /= double(b.count);
    for (int64_t i = b.first; i < b.first + b.count; i++) out[i] = mean;
  }
  double in_tau(const Block& b, const double* g, const double*) const {
    double sum = 0;
    for (int64_t i = b.first; i < b.first + b.count; i++) sum -= g[i] * step(b, i);
    return sum;
  }
};

// The same by relative entropy: a block's value is log sum e^(place / tau) - log sum e^x. Both sums are kept as logarithms about the
// first, since here the blocks reach as far as the values do. stat: log sum e^(x - x_first); other: log sum_{j < count} e^(-j / tau).
struct SortKl : Places {
  static constexpr bool ranks = false;
  Block one(int64_t i) const { return {i, 1, 0, 0}; }
  bool pools(const Block& a, const Block& b) const {
    return double(a.count) * rate + a.other - b.other <= (x[a.first] - x[b.first]) + a.stat - b.stat;
  }
  void take(Block& a, const Block& b) const {
    double low = x[b.first] - x[a.first] + b.stat - a.stat;
    a.stat += low > 0 ? low + std::log1p(std::exp(-low)) : std::log1p(std::exp(low));
    a.other = std::log(std::expm1(-double(a.count + b.count) * rate) / std::expm1(-rate));  // a geometric series
  }
  double value(const Block& b, int64_t i) const { return x[b.first] + (b.stat - b.other - double(i - b.first) * rate); }
  void pull(const Block& b, const double* g, double* out) const {
    double total = 0, sum = 0;
    for (int64_t i = b.first; i < b.first + b.count; i++) out[i] = std::exp(x[i] - x[b.first]), total += out[i], sum += g[i];
    for (int64_t i = b.first; i < b.first + b.count; i++) out[i] *= sum / total;
  }
  double in_tau(const Block& b, const double* g, const double*) const {
    double total = 0, mean = 0, sum = 0;
    for (int64_t j = 0; j < b.count; j++) {
      double weight = std::exp(-double(j) * rate);
      total += weight, mean += weight * double(j);
    }
    for (int64_t j = 0; j < b.count; j++) sum += g[b.first + j] * (double(j) - mean / total) * rate;
    return sum;
  }
};

}  // namespace
