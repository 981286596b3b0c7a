// Weights times the soft mask over their magnitudes: a pass that gathers the magnitudes, the products, and their derivative in two.
// Shared by the entry point and the copies for each instruction set.
#pragma once
#include <cstdint>

struct KhotMasked {
  int count;               // of weights
  const int64_t* sizes;    // of each
  const void* const* w;    // the weights
  const void* const* g;    // the gradients of the products, each may be null for 0; only for the derivative
  void* const* out;        // the products, or the gradients of the weights, of which each may be null; not for the magnitudes
  void* flat;              // the magnitudes, one weight behind the other; afterwards the mask
  double* sums;            // of the magnitudes and of their squares
  double tau;
  int threads;
};

enum KhotMaskedPart { kKhotMagnitudes = 0, kKhotProducts = 1, kKhotDerivative = 2 };

struct KhotMaskeds {
  int (*run)(int part, int family, int dtype, const KhotMasked&);
};
