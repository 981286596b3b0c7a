// Probabilities as whole numbers of a fixed small unit, so that a row sums to k without any rounding.
//
// The same rule as khot.primitives.fixed_point: what a row of floats lacks is spread as p (1 - p), which leaves 0 and 1
// alone; what rounding to units then leaves, at most n/2 of them, goes to one item with room for it.
#pragma once
#include <cmath>

#include "memory.h"
#include "rows.h"

namespace {

constexpr int64_t kUnitBlock = 256;
constexpr int64_t kKept = 2048;  // items whose units are kept from one pass to the next: they fit half of the first-level cache
typedef float HalfF __attribute__((vector_size(KHOT_VECTOR_BYTES / 2)));

KHOT_INLINE VecD widen(const float* p) {
  HalfF v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, VecD);
}
KHOT_INLINE VecD widen(const double* p) { return load(p); }

// From a probability to units. A small value of its own: in a loop that writes bytes it stays in registers.
struct UnitRule {
  double step = 0, scale = 1;
  int64_t special = -1, lack = 0;  // this item takes what is lacking
  const int64_t* exact = nullptr;  // all units, where one item cannot take it

  // Those of the item at place i of the row.
  KHOT_INLINE int64_t of(double value, int64_t i) const { return exact ? exact[i] : rounded(splat(value))[0] + (i == special ? lack : 0); }
  // Those of a block of items from these places, in whole vectors.
  template <class C> KHOT_INLINE void block(const C* p, const int32_t* from, int64_t count, int64_t* out) const {
    if (exact) {
      for (int64_t i = 0; i < count; i++) out[i] = exact[from[i]];
      return;
    }
    round(p, count, out);
    for (int64_t i = 0; i < count; i++) out[i] += from[i] == special ? lack : 0;
  }
  template <class C> KHOT_INLINE void round(const C* p, int64_t count, int64_t* out) const {
    for (int64_t i = 0; i < count; i += kWidth<double>) {
      IntD units = rounded(widen(p + i));
      std::memcpy(out + i, &units, sizeof units);
    }
  }
  // One function for single items and for blocks of them: they must round alike. 2^52 is added so that the units are the
  // last bits of the sum.
  KHOT_INLINE IntD rounded(VecD v) const {
    v = fma(fma(-v, v, v), splat(step), v);
    v = vmin(splat(1.0), vmax(splat(0.0), v)) * scale + 0x1p52;
    return (IntD)v - int64_t(0x4330000000000000);
  }
};

template <class C> class Units {
 public:
  int64_t one = 0;     // the whole, in units
  int64_t size = 0;    // how many are drawn
  double phantom = 0;  // the probability of an item behind the row that makes a fractional k whole; 0 where k is whole
  bool has_nan = false;

  // `wanted` is what the row sums to, but for rounding; where it does not, its own sum, rounded, is drawn.
  void set(const C* probs, int64_t n, double wanted) {
    p = probs, count = n, rule = {};
    int bits = 62 - int(64 - __builtin_clzll(uint64_t(n + 1)));
    bits = least(bits, 52), one = int64_t(1) << bits, rule.scale = double(one);
    double sum = 0, room = 0;
    totals(sum, room);
    has_nan = !(sum == sum);
    if (has_nan) return;
    if (!(std::fabs(sum - wanted) < 0.5)) wanted = std::round(sum);
    size = int64_t(std::ceil(wanted)), phantom = double(C(double(size) - wanted));
    sum += phantom, room += phantom * (1 - phantom);
    double lacking = (double(size) - sum) / room;
    rule.step = lacking == lacking ? least(1.0, most(-1.0, lacking)) : 0;
    if (items() <= kKept) return keep();
    settle(size * one - total());
  }
  int64_t items() const { return count + (phantom > 0); }
  C at(int64_t i) const { return i < count ? p[i] : C(phantom); }

  UnitRule rule;

  // Those of the items from `begin` on, up to a block of them: where they are kept, or in `room`.
  const int64_t* block(int64_t begin, int64_t* room) const {
    if (rule.exact) return rule.exact + begin;
    raw_block(begin, room);
    if (rule.special >= begin && rule.special < begin + kUnitBlock) room[rule.special - begin] += rule.lack;
    return room;
  }

 private:
  const C* p = nullptr;
  int64_t count = 0;
  Memory<int64_t> memory;

  // Whole vectors are written; behind the last item they are 0.
  void raw_block(int64_t begin, int64_t* out) const {
    int64_t size = least(kUnitBlock, items() - begin), given = least(kUnitBlock, count - begin);
    C buffer[kUnitBlock];
    const C* from = p + begin;
    if (given < size || size % kWidth<double>) {
      for (int64_t i = 0; i < given; i++) buffer[i] = from[i];
      if (given < size) buffer[given] = C(phantom);
      for (int64_t i = size; i % kWidth<double>; i++) buffer[i] = 0;
      from = buffer;
    }
    rule.round(from, size, out);
  }
  __attribute__((noinline)) void totals(double& sum, double& room) const {
    VecD s[2] = {}, r[2] = {};
    int64_t i = 0;
    for (; i + 2 * kWidth<double> <= count; i += 2 * kWidth<double>) {
      VecD a = widen(p + i), b = widen(p + i + kWidth<double>);
      s[0] += a, r[0] += a - a * a, s[1] += b, r[1] += b - b * b;
    }
    sum = sum_lanes(s[0] + s[1]), room = sum_lanes(r[0] + r[1]);
    for (; i < count; i++) sum += double(p[i]), room += double(p[i]) - double(p[i]) * double(p[i]);
  }
  __attribute__((noinline)) int64_t total() const {
    alignas(64) int64_t units[kUnitBlock];
    int64_t sum = 0;
    for (int64_t i = 0; i < items(); i += kUnitBlock) {
      raw_block(i, units);
      IntD part{};
      for (int64_t j = 0; j < least(kUnitBlock, items() - i); j += kWidth<double>) {
        IntD v;
        std::memcpy(&v, units + j, sizeof v);
        part += v;
      }
      for (int j = 0; j < kWidth<double>; j++) sum += part[j];
    }
    return sum;
  }
  void keep() {
    int64_t *all = memory.at_least((items() / kUnitBlock + 1) * kUnitBlock), sum = 0;
    for (int64_t i = 0; i < items(); i += kUnitBlock) raw_block(i, all + i);
    for (int64_t i = 0; i < items(); i++) sum += all[i];
    settle(size * one - sum);
    if (rule.exact) return;
    if (rule.special >= 0) all[rule.special] += rule.lack;
    rule.exact = all;
  }
  // Gives what is lacking to one item that is far from 0 and 1, or has the most room of all; else to all that have some.
  void settle(int64_t lacking) {
    if (!lacking) return;
    rule.lack = lacking;
    double best = 0;
    for (int64_t i = 0; i < items() && best < 1.0 / 64; i++) {
      double room = double(at(i)) * (1 - double(at(i)));
      if (room > best) best = room, rule.special = i;
    }
    if (rule.special >= 0) {
      int64_t moved = rule.of(double(at(rule.special)), rule.special);
      if (moved > 0 && moved < one) return;  // off 0 and 1, which are certain
    }
    absorb(lacking);
  }
  // The cumulative sum is moved by what is lacking, but stays between the least and the most that the items so far can hold.
  void absorb(int64_t lacking) {
    int64_t *all = memory.at_least((items() / kUnitBlock + 1) * kUnitBlock), sum = 0, floor = 0, ceiling = 0, before = 0;
    for (int64_t i = 0; i < items(); i += kUnitBlock) raw_block(i, all + i);
    for (int64_t i = 0; i < items(); i++) {
      sum += all[i], ceiling += all[i] > 0 ? one : 0, floor += all[i] == one ? one : 0;
      int64_t now = least(most(sum + lacking, floor), ceiling);
      all[i] = now - before, before = now;
    }
    rule.exact = all;
  }
};

}  // namespace
