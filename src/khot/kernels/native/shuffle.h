// The items of a row in random order, a block of them at a time.
#pragma once
#include "random.h"
#include "units.h"

namespace {

// Calls fn.block(p, from, count) with the probabilities and the places of the items of a row, up to kUnitBlock at a time, in an order
// all of which are equally likely. Whole vectors of p may be read; behind the last they are 0.
//
// A row that is long for the caches is dealt at random into buckets first, and each of them is shuffled by itself (Rao 1961,
// Sandelius 1962): every order stays equally likely, and all jumps stay inside a bucket.
template <class C> class Shuffle {
 public:
  struct Item {
    C p;
    int32_t from;
  };
  static bool is_long(int64_t n) { return n > kOneBucket; }

  template <class Fn> void walk(const Units<C>& units, Random& random, Fn& fn) {
    const int64_t n = units.items();
    if (is_long(n)) return buckets(units, random, [&](Item* items, int64_t count) { shuffled(items, count, random, fn); });
    Item* items = items_.at_least(n);
    for (int64_t i = 0; i < n; i++) items[i] = {units.at(i), int32_t(i)};
    shuffled(items, n, random, fn);
  }

  // Deals the items into buckets and calls fn(items, count) with one after the other.
  template <class Fn> void buckets(const Units<C>& units, Random& random, const Fn& fn) {
    const int64_t n = units.items();
    const Random before = random;
    int64_t room = n / kBuckets + 8 * int64_t(std::sqrt(double(n / kBuckets))) + 16;  // eight deviations more than the mean
    while (!deal(units, n, random = before, room)) room *= 2;
    for (int b = 0; b < kBuckets; b++) {
      for (const Item* next = begin(b + 1, room); next < end_[b + 1]; next += 64 / sizeof(Item)) __builtin_prefetch(next, 1, 2);
      fn(begin(b, room), end_[b] - begin(b, room));
    }
  }

 private:
  // Tuned on the machine named in solver.h with 10^6 and 4 10^6 items: 256 buckets and 64 were slower.
  static constexpr int kBuckets = 1024;
  static constexpr int64_t kOneBucket = 65536;  // items: they fit the second-level cache
  static constexpr int64_t kDealt = 1024;       // whose numbers are drawn at a time; a multiple of what one random number holds
  Memory<Item> items_;
  Item* end_[kBuckets + 1];  // of what a bucket holds; the last is never dealt to

  Item* begin(int b, int64_t room) const { return items_.data() + b * room; }

  // False if a bucket has too little room.
  bool deal(const Units<C>& units, int64_t n, Random& random, int64_t room) {
    Item* const items = items_.at_least((kBuckets + 1) * room);
    Item* full[kBuckets];
    for (int b = 0; b <= kBuckets; b++) end_[b] = items + b * room;
    for (int b = 0; b < kBuckets; b++) full[b] = end_[b + 1];
    alignas(64) uint16_t number[kDealt + 4];
    for (int64_t from = 0; from < n; from += kDealt) {
      const int64_t count = least(kDealt, n - from);
      random.fill(number, count);
      for (int64_t i = 0; i < count; i++) {
        const int b = number[i] & (kBuckets - 1);
        Item*& at = end_[b];
        if (__builtin_expect(at == full[b], 0)) return false;
        *at++ = {units.at(from + i), int32_t(from + i)};
      }
    }
    return true;
  }

  // Fisher and Yates: each place draws one of the items that are left.
  template <class Fn> static KHOT_INLINE void shuffled(Item* items, int64_t n, Random& numbers, Fn& visit) {
    alignas(64) C p[kUnitBlock];
    alignas(64) int32_t from[kUnitBlock];
    alignas(64) uint32_t bits[kUnitBlock];
    Random random = numbers;
    Fn fn = visit;
    for (int64_t done = 0, count; done < n; done += count) {
      count = least(kUnitBlock, n - done);
      Item* left = items + done;
      random.fill(bits, count);
      for (int64_t i = 0; i < count; i++) {
        const int64_t j = i + Random::below(bits[i], n - done - i);
        p[i] = left[j].p, from[i] = left[j].from;
        left[j] = left[i];
      }
      for (int64_t i = count; i % kWidth<double>; i++) p[i] = 0;
      fn.block(p, from, count);
    }
    numbers = random, visit = fn;
  }
};

}  // namespace
