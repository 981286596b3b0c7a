// The few largest of a short row, one after the other: each is the largest of what the ones before it left.
#pragma once
#include "compress.h"
#include "select.h"

namespace {

constexpr int64_t kFew = 4, kFewAmong = 256;

template <class C> class Few {
 public:
  static bool suits(int64_t n, int64_t k) { return k > 0 && k <= kFew && k < n && n <= kFewAmong; }

  // The k largest and where they are, equal ones in their order. False if the row has a nan or fewer than k scores above -inf, whose
  // order takes more care.
  bool find(const Row<C>& x, int64_t n, int64_t k) {
    const int64_t groups = (n + kGroup<C> - 1) / kGroup<C>;
    if (groups == 1) return find_in_one(x, n, k);
    if (!copy(x, n)) return false;
    for (int64_t i = 0; i < k; i++) {
      value[i] = largest(groups);
      if (!(value[i] > -kInf<C>)) return false;
      left_[index[i] = first(value[i])] = -kInf<C>;
    }
    return true;
  }
  C value[kFew + 1];
  int64_t index[kFew + 1];

 private:
  alignas(64) C left_[kFewAmong + kGroup<C>];

  // The same among one group, which stays in registers: what was just written cannot be read again as a whole without waiting.
  bool find_in_one(const Row<C>& x, int64_t n, int64_t k) {
    C buffer[kGroup<C>];
    const C* from = x.read(0, n, buffer, -kInf<C>);
    Vec<C> v[kUnroll];
    IVec<C> strange{}, place;
    KHOT_EACH(kUnroll, v[j] = load(from + j * kWidth<C>); strange |= v[j] != v[j]);
    if (lane_bits(strange)) return false;
    for (int i = 0; i < kWidth<C>; i++) place[i] = i;
    for (int64_t i = 0; i < k; i++) {
      value[i] = -smallest_lane<C>(-vmax(vmax(v[0], v[1]), vmax(v[2], v[3])));
      if (!(value[i] > -kInf<C>)) return false;
      const Vec<C> top = splat(value[i]), gone = splat(-kInf<C>);
      uint64_t equal = 0;
      KHOT_EACH(kUnroll, equal |= uint64_t(lane_bits(v[j] == top)) << (j * kWidth<C>));
      const int at = __builtin_ctzll(equal);
      index[i] = at;
      KHOT_EACH(kUnroll, v[j] = place == at - j * kWidth<C> ? gone : v[j]);
    }
    return true;
  }
  bool copy(const Row<C>& x, int64_t n) {
    C buffer[kGroup<C>];
    IVec<C> strange{};
    for (int64_t i = 0; i < n; i += kGroup<C>) {
      const C* from = x.read(i, n, buffer, -kInf<C>);
      KHOT_EACH(kUnroll, Vec<C> v = load(from + j * kWidth<C>); strange |= v != v; store(left_ + i + j * kWidth<C>, v));
    }
    return !lane_bits(strange);
  }
  C largest(int64_t groups) const {
    Vec<C> most[kUnroll];
    KHOT_EACH(kUnroll, most[j] = load(left_ + j * kWidth<C>));
    for (int64_t g = 1; g < groups; g++) KHOT_EACH(kUnroll, most[j] = vmax(most[j], load(left_ + g * kGroup<C> + j * kWidth<C>)));
    for (int j = 1; j < kUnroll; j++) most[0] = vmax(most[0], most[j]);
    return -smallest_lane<C>(-most[0]);
  }
  int64_t first(C value) const {
    const Vec<C> v = splat(value);
    for (int64_t i = 0;; i += kGroup<C>) {
      uint64_t equal = 0;
      KHOT_EACH(kUnroll, equal |= uint64_t(lane_bits(load(left_ + i + j * kWidth<C>) == v)) << (j * kWidth<C>));
      if (equal) return i + __builtin_ctzll(equal);
    }
  }
};

}  // namespace
