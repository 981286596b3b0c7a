// The arguments of the two kernels, shared by the entry points and the copies for each instruction set.
#pragma once
#include <cstdint>

// What an entry point returns. Python raises for all but the first.
enum KhotCode { kKhotDone = 0, kKhotFamily = 1, kKhotType = 2, kKhotSize = 3, kKhotNull = 4, kKhotMissed = 5 };

// A squashing function as polynomials, see entmax.h. Python fills it: khot.kernels.curve.
struct KhotCurve {
  double a;               // alpha - 1
  const float* singles;   // kTerms<float> rows of kOctaves coefficients
  const double* doubles;  // kTerms<double> rows, likewise
};

struct KhotForward {
  const void* x;
  void* y;
  const double *k, *tau;  // one per row, or a single one with stride 0
  int64_t k_stride, tau_stride;
  double* shift;  // rows, or null
  int64_t rows, n;
  int threads;
  const KhotCurve* curve;  // of the families that have one, or null
};

struct KhotBackward {
  const void *y, *g, *x;  // x only for gtau
  const double* shift;
  void* gx;
  double *gk, *gtau;  // rows, or null
  const double* tau;
  int64_t tau_stride, rows, n;
  int threads;
  const KhotCurve* curve;
};

struct KhotKernels {
  const char* name;
  int (*forward)(int family, int dtype, const KhotForward&);
  int (*backward)(int family, int dtype, const KhotBackward&);
};
