// A row of scores in memory, read and written in groups of a few vectors.
//
// The passes compute in float or double on whole groups. A group that is cut short by the end of the row, or stored
// in half precision, goes through a small buffer; every other one is used in place.
#pragma once
#include "pack.h"

namespace {

enum Stored { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

constexpr int kUnroll = 4;  // vectors in a group
template <class C> using Wide = Pack<C, kUnroll>;
template <class C> constexpr int64_t kGroup = Wide<C>::size;

template <class C> struct Row {  // C is double for kFloat64, float for the others
  void* data;
  Stored type;

  static size_t bytes(Stored type) { return type == kFloat64 ? 8 : type == kFloat32 ? 4 : 2; }
  bool exact() const { return type == kFloat32 || type == kFloat64; }
  Row from(int64_t i) const { return {static_cast<char*>(data) + i * int64_t(bytes(type)), type}; }
  C* values() const { return static_cast<C*>(data); }

  // The group at i: in place, or copied to `buffer` with `fill` behind the last score.
  KHOT_INLINE const C* read(int64_t i, int64_t n, C* buffer, C fill) const {
    if (exact() && i + kGroup<C> <= n) return values() + i;
    return copy(i, n, buffer, fill);
  }
  // Where to write the group at i; `written` brings it home.
  KHOT_INLINE C* target(int64_t i, int64_t n, C* buffer) const {
    return exact() && i + kGroup<C> <= n ? values() + i : buffer;
  }
  KHOT_INLINE void written(int64_t i, int64_t n, const C* buffer) const {
    if (!(exact() && i + kGroup<C> <= n)) put(i, n, buffer);
  }
  C first() const {
    if (exact()) return values()[0];
    C buffer[kGroup<C>];
    return copy(0, 1, buffer, C(0))[0];
  }

 private:
  __attribute__((noinline)) const C* copy(int64_t i, int64_t n, C* buffer, C fill) const {
    int64_t count = least(kGroup<C>, n - i);
    if (exact()) {
      std::memcpy(buffer, values() + i, size_t(count) * sizeof(C));
    } else if constexpr (sizeof(C) == 4) {
      uint16_t raw[kGroup<C>];
      std::memcpy(raw, static_cast<const uint16_t*>(data) + i, size_t(count) * 2);
      for (int64_t j = count; j < kGroup<C>; j++) raw[j] = 0;
      for (int64_t j = 0; j < kGroup<C>; j += kWidth<C>) store(buffer + j, type == kBFloat16 ? load_bfloat16(raw + j) : load_float16(raw + j));
    }
    for (int64_t j = count; j < kGroup<C>; j++) buffer[j] = fill;
    return buffer;
  }
  __attribute__((noinline)) void put(int64_t i, int64_t n, const C* buffer) const {
    int64_t count = least(kGroup<C>, n - i);
    if (exact()) {
      std::memcpy(values() + i, buffer, size_t(count) * sizeof(C));
    } else if constexpr (sizeof(C) == 4) {
      uint16_t raw[kGroup<C>];
      for (int64_t j = 0; j < kGroup<C>; j += kWidth<C>) {
        if (type == kBFloat16) store_bfloat16(raw + j, load(buffer + j));
        else store_float16(raw + j, load(buffer + j));
      }
      std::memcpy(static_cast<uint16_t*>(data) + i, raw, size_t(count) * 2);
    }
  }
};

}  // namespace
