// Memory that grows. The containers of the standard library may not be used in code that is compiled once for each instruction set: a
// function of theirs, compiled for one, could end up in the copy for another.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

// Large memory in large pages, where the system has them: a page that is touched for the first time costs as much as a thousand items,
// and a large one that the system has to make room for first as much as a million. So a few large pieces are kept for the next call.
constexpr size_t kLargePage = size_t(1) << 21, kLarge = 2 * kLargePage, kMostKept = 8 * kLargePage;
constexpr int kPiecesKept = 2;
struct Piece { size_t bytes; };  // stands at the beginning of a piece while nobody uses it
inline Piece* kept_piece(int i, Piece* other) {
  static Piece* kept[kPiecesKept];  // no more than one thread has a piece: they are only ever exchanged
  return __atomic_exchange_n(&kept[i], other, __ATOMIC_ACQ_REL);
}

inline size_t rounded_up(size_t bytes) { return bytes < kLarge ? bytes : (bytes + kLargePage - 1) / kLargePage * kLargePage; }

// Room for that many bytes, as rounded up, or null.
inline void* allocate(size_t bytes) {
  if (bytes < kLarge) return std::malloc(bytes);
  for (int i = 0; i < kPiecesKept; i++) {
    Piece* piece = kept_piece(i, nullptr);
    if (piece && piece->bytes == bytes) return piece;
    std::free(piece);
  }
  void* data = std::aligned_alloc(kLargePage, bytes);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (data) madvise(data, bytes, MADV_HUGEPAGE);  // a wish: nothing depends on it
#endif
  return data;
}
inline void release(void* data, size_t bytes) {
  if (data && bytes >= kLarge && bytes <= kMostKept) {
    Piece* piece = static_cast<Piece*>(data);
    piece->bytes = bytes;
    for (int i = 0; i < kPiecesKept && piece; i++) piece = kept_piece(i, piece);
    data = piece;
  }
  std::free(data);
}

template <class T> class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { release(data_, bytes_); }

  T* data() const { return data_; }
  // Room for n; throws std::bad_alloc.
  T* at_least(int64_t n) {
    if (n > capacity_) {
      release(data_, bytes_);
      bytes_ = rounded_up(size_t(n) * sizeof(T)), capacity_ = 0;
      data_ = static_cast<T*>(allocate(bytes_));
      if (!data_) throw std::bad_alloc();
      capacity_ = n;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  size_t bytes_ = 0;
  int64_t capacity_ = 0;
};

}  // namespace
