// Memory that grows and keeps nothing. The containers of the standard library may not be used in code that is compiled once
// for each instruction set: a function of theirs, compiled for one, could end up in the copy for another.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

// Large memory in large pages, where the system has them: a page that is touched for the first time costs as much as a thousand items.
inline void* allocate(size_t bytes) {
  constexpr size_t page = size_t(1) << 21;
  if (bytes < 2 * page) return std::malloc(bytes);
  bytes = (bytes + page - 1) / page * page;
  void* data = std::aligned_alloc(page, bytes);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (data) madvise(data, bytes, MADV_HUGEPAGE);  // a wish: nothing depends on it
#endif
  return data;
}

template <class T> class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data_); }

  T* data() const { return data_; }
  // Room for n; throws std::bad_alloc.
  T* at_least(int64_t n) {
    if (n > capacity_) {
      std::free(data_);
      data_ = static_cast<T*>(allocate(size_t(n) * sizeof(T)));
      capacity_ = data_ ? n : 0;
      if (!data_) throw std::bad_alloc();
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace
