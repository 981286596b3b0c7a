// The arguments of the selection, shared by the entry points and the copies for each instruction set.
#pragma once
#include <cstdint>

struct KhotSelection {
  const void* x;
  const int64_t* k;  // one per row, or a single one with stride 0
  int64_t k_stride;
  void* mask;      // like x, or null
  void* kth;       // a value for each row, or null
  int64_t* index;  // k for each row (then stride 0), or null
  int64_t rows, n;
  int threads;
};

struct KhotSelect {
  int (*select)(int dtype, const KhotSelection&);
};
