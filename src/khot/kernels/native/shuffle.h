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
    Item* items = items_.at_least(n);
    int64_t begin[kBuckets + 2] = {};
    deal(units, n, random, items, begin);
    begin[kBuckets + 1] = begin[kBuckets];
    for (int b = 0; b < kBuckets; b++) {
      for (const Item* next = items + begin[b + 1]; next < items + begin[b + 2]; next += 64 / sizeof(Item)) __builtin_prefetch(next, 1, 2);
      fn(items + begin[b], begin[b + 1] - begin[b]);
    }
  }

 private:
  // Tuned on the machine named in solver.h with 10^6 and 4 10^6 items: 256 buckets and 64 were slower.
  static constexpr int kBuckets = 1024;
  static constexpr int64_t kOneBucket = 65536;  // items: they fit the second-level cache
  Memory<Item> items_;
  Memory<uint16_t> numbers_;

  // begin[b] is where bucket b begins.
  void deal(const Units<C>& units, int64_t n, Random& random, Item* items, int64_t* begin) {
    uint32_t size[4][kBuckets] = {};  // four counters each, so that equal neighbours do not wait for one another
    uint16_t* number = numbers_.at_least(n + 4);
    random.fill(number, n);
    for (int64_t i = 0; i < n; i++) size[i & 3][number[i] & (kBuckets - 1)]++;
    Item* next[kBuckets];
    for (int b = 0; b < kBuckets; b++) {
      next[b] = items + begin[b];
      begin[b + 1] = begin[b] + size[0][b] + size[1][b] + size[2][b] + size[3][b];
    }
    for (int64_t i = 0; i < n; i++) *next[number[i] & (kBuckets - 1)]++ = {units.at(i), int32_t(i)};
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
