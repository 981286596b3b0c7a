// Isotonic regression of every row, in float64: which neighbours share a value.
#include "share.h"

#include "pool.h"

namespace {

// The weighted mean. stat: how far it lies above the first value; other: the weight.
struct Mean {
  const double *y, *w;
  Block one(int64_t i) const { return {i, 1, 0, w ? w[i] : 1}; }
  double rise(const Block& a, const Block& b) const { return (y[b.first] - y[a.first]) + (b.stat - a.stat); }
  bool pools(const Block& a, const Block& b) const { return rise(a, b) >= 0; }
  void take(Block& a, const Block& b) const {
    double both = a.other + b.other;
    a.stat += rise(a, b) * (b.other / both), a.other = both;
  }
};

inline double log_add(double a, double b) { return a > b ? a + std::log1p(std::exp(b - a)) : b + std::log1p(std::exp(a - b)); }

// log sum e^y - log sum e^w. stat and other: the two sums about the first values.
struct LogMean {
  const double *y, *w;
  Block one(int64_t i) const { return {i, 1, 0, 0}; }
  bool pools(const Block& a, const Block& b) const {
    return (y[a.first] - y[b.first]) - (w[a.first] - w[b.first]) + (a.stat - b.stat) - (a.other - b.other) <= 0;
  }
  void take(Block& a, const Block& b) const {
    a.stat = log_add(a.stat, y[b.first] - y[a.first] + b.stat), a.other = log_add(a.other, w[b.first] - w[a.first] + b.other);
  }
};

template <class Law> bool pool_rows(const double* y, const double* w, int64_t* ids, int64_t rows, int64_t n, int threads) {
  return share_work(threads, rows, n, [=](int64_t begin, int64_t end) {
    std::vector<Block> blocks;
    blocks.reserve(size_t(n));
    for (int64_t r = begin; r < end; r++) {
      pool(Law{y + r * n, w ? w + r * n : nullptr}, n, blocks);
      for (size_t b = 0; b < blocks.size(); b++) std::fill_n(ids + r * n + blocks[b].first, blocks[b].count, int64_t(b));
    }
  });
}

}  // namespace

// The number of the block of every entry, from 0. `logs`: y and w are logarithms, and the value of a block is that of a ratio of sums;
// else w are the weights of a mean, and may be null for equal ones.
KHOT_API int khot_isotonic(int logs, const double* y, const double* w, int64_t* ids, int64_t rows, int64_t n, int threads) {
  if (!fits(rows, n) || (logs && !w)) return kBadShape;
  if (!rows || !n) return kDone;
  return code_of([&] { return logs ? pool_rows<LogMean>(y, w, ids, rows, n, threads) : pool_rows<Mean>(y, w, ids, rows, n, threads); });
}
