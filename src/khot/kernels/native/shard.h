// One pass over rows whose other parts lie in other processes, with the threshold given: sums for the search, the mask, and both halves of
// the derivative. Shared by the entry points and the copies for each instruction set.
#pragma once
#include <cstdint>

struct KhotShard {
  const void* x;       // scores; in the derivative the output
  const void* g;       // the gradient, or null
  void* out;           // mask or gradient, or null
  const double* at;    // the threshold of every row, or the mean of its gradient; null for the moments
  const double* low;   // rows: added to (x - at) / tau
  const double* tau;   // one per row, or a single one with stride 0
  int64_t tau_stride;
  double* sums;        // two for every row
  int64_t rows, n;
  int threads;
};

enum KhotPart { kKhotMoments = 0, kKhotMeasure = 1, kKhotMask = 2, kKhotWeigh = 3, kKhotGradient = 4 };

struct KhotShards {
  int (*run)(int part, int family, int dtype, const KhotShard&);
};
