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
  template <class Fn> void walk(const Units<C>& units, Random& random, Fn& fn) {
    int64_t n = units.items();
    Item* items = items_.at_least(n);
    if (n <= kOneBucket) {
      for (int64_t i = 0; i < n; i++) items[i] = {units.at(i), int32_t(i)};
      shuffled(items, n, random, fn);
      return;
    }
    int64_t begin[kBuckets + 2] = {};
    deal(units, n, random, items, begin);
    begin[kBuckets + 1] = begin[kBuckets];
    for (int b = 0; b < kBuckets; b++) {
      for (const Item* next = items + begin[b + 1]; next < items + begin[b + 2]; next += 64 / sizeof(Item)) __builtin_prefetch(next, 1, 2);
      shuffled(items + begin[b], begin[b + 1] - begin[b], random, fn);
    }
  }

 private:
  struct Item {
    C p;
    int32_t from;
  };
  // Tuned on the machine named in solver.h with 10^6 and 4 10^6 items: 256 buckets and 64 were slower.
  static constexpr int kBuckets = 1024;
  static constexpr int64_t kOneBucket = 65536;  // items: they fit the second-level cache
  Memory<Item> items_;

  // fn(i, b) with a random bucket b for every item, four from each random number.
  template <class Fn> static KHOT_INLINE void each(int64_t n, Random& numbers, const Fn& fn) {
    Random random = numbers;  // a copy, which stays in registers
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
      uint64_t bits = random.next();
      for (int64_t j = 0; j < 4; j++) fn(i + j, bits >> 16 * j & (kBuckets - 1));
    }
    for (; i < n; i++) fn(i, random.next() & (kBuckets - 1));
    numbers = random;
  }

  // begin[b] is where bucket b begins. The numbers are drawn twice, which is cheaper than to keep them.
  void deal(const Units<C>& units, int64_t n, Random& random, Item* items, int64_t* begin) {
    uint32_t size[4][kBuckets] = {};  // four counters each, so that equal neighbours do not wait for one another
    Random again = random;
    each(n, again, [&](int64_t i, uint64_t b) KHOT_INLINE_LAMBDA { size[i & 3][b]++; });
    Item* next[kBuckets];
    for (int b = 0; b < kBuckets; b++) {
      next[b] = items + begin[b];
      begin[b + 1] = begin[b] + size[0][b] + size[1][b] + size[2][b] + size[3][b];
    }
    each(n, random, [&](int64_t i, uint64_t b) KHOT_INLINE_LAMBDA { *next[b]++ = {units.at(i), int32_t(i)}; });
  }

  // Fisher and Yates: each place draws one of the items that are left.
  template <class Fn> static KHOT_INLINE void shuffled(Item* items, int64_t n, Random& numbers, Fn& visit) {
    alignas(64) C p[kUnitBlock];
    alignas(64) int32_t from[kUnitBlock];
    Random random = numbers;
    Fn fn = visit;
    for (int64_t done = 0, count; done < n; done += count) {
      count = least(kUnitBlock, n - done);
      Item* left = items + done;
      auto place = [&](int64_t i, uint32_t bits) KHOT_INLINE_LAMBDA {
        int64_t j = i + Random::below(bits, n - done - i);
        p[i] = left[j].p, from[i] = left[j].from;
        left[j] = left[i];
      };
      int64_t i = 0;
      for (; i + 1 < count; i += 2) {
        uint64_t bits = random.next();
        place(i, uint32_t(bits)), place(i + 1, uint32_t(bits >> 32));
      }
      if (i < count) place(i, uint32_t(random.next()));
      for (i = count; i % kWidth<double>; i++) p[i] = 0;
      fn.block(p, from, count);
    }
    numbers = random, visit = fn;
  }
};

}  // namespace
