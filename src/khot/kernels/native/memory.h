// Memory that grows and keeps nothing. The containers of the standard library may not be used in code that is compiled once
// for each instruction set: a function of theirs, compiled for one, could end up in the copy for another.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

template <class T> class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data_); }

  // Room for n; throws std::bad_alloc.
  T* at_least(int64_t n) {
    if (n > capacity_) {
      std::free(data_);
      data_ = static_cast<T*>(std::malloc(size_t(n) * sizeof(T)));
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
