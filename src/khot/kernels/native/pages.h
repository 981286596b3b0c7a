// Large pages for a large result that nobody has touched yet: mapping it in small ones takes several times as long as computing it.
#pragma once
#include <cstddef>
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

// From this size on the C library maps memory anew for every tensor; smaller ones lie in pages that were used before.
constexpr size_t kMappedAnew = size_t(1) << 25;

inline void in_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t(1) << 21;
  if (!data || bytes < kMappedAnew) return;
  const uintptr_t from = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page, to = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);  // a wish: nothing depends on it
#endif
}

// Of float32, float64, bfloat16, float16, by number.
inline size_t bytes_of(int dtype, int64_t items) { return size_t(items) * (dtype == 1 ? 8 : dtype == 0 ? 4 : 2); }

}  // namespace
