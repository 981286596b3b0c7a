// The arguments of selection and sampling, shared by the entry points and the copies for each instruction set.
#pragma once
#include <cstdint>

struct KhotSelection {
  const void* x;
  const int64_t* k;  // one per row, or a single one with stride 0
  int64_t k_stride;
  void* mask;      // like x, or null
  void *kth, *next;  // a value for each row, or null: the k-th largest and the one after it
  int64_t* index;  // k for each row (then stride 0), or null
  int64_t rows, n;
  int threads;
};

enum KhotDesign { kSystematic = 0, kPivotal = 1 };

struct KhotDraw {
  const void* probs;      // (rows, n)
  const double* k;        // one per row, or a single one with stride 0
  int64_t k_stride;
  const int64_t* start;   // systematic: one per draw and row in place of a random one, or null
  void* out;              // (draws, rows, n)
  uint64_t seed;
  int64_t draws, rows, n;
  bool shuffled;
  int threads;
};

struct KhotSelect {
  int (*select)(int dtype, const KhotSelection&);
  int (*draw)(int design, int dtype, const KhotDraw&);
};
