// Random numbers by counting: a hash of (seed, row, how many were drawn before). Rows are independent of each other and of
// the thread that works on them.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

// SplitMix64 (Steele, Lea and Flood 2014): a counter with an odd stride behind a strong mixing function.
class Random {
 public:
  Random(uint64_t seed, int64_t row) : state_(mix(mix(seed) + kStride * (uint64_t(row) + 1))) {}

  uint64_t next() { return mix(state_ += kStride); }
  // n words of 16 or 32 random bits, as many from each of the next numbers as it holds; room for 8 bytes more is written to.
  template <class T> void fill(T* out, int64_t n) {
    constexpr int64_t each = sizeof(uint64_t) / sizeof(T);
    const int64_t numbers = (n + each - 1) / each;
    for (int64_t i = 0; i < numbers; i++) {
      const uint64_t number = mix(state_ + kStride * uint64_t(i + 1));
      std::memcpy(out + each * i, &number, sizeof number);
    }
    state_ += kStride * uint64_t(numbers);
  }

  // Below `bound`, from 32 random bits: each number has probability 1 / bound, to 2^-32.
  static int64_t below(uint32_t bits, int64_t bound) { return int64_t(uint64_t(bits) * uint64_t(bound) >> 32); }

 private:
  static constexpr uint64_t kStride = 0x9e3779b97f4a7c15;
  uint64_t state_;

  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
};

}  // namespace
