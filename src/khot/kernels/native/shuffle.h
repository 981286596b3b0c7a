// The items of a row in random order.
#pragma once
#include "memory.h"
#include "random.h"
#include "units.h"

namespace {

template <class C> struct Weighed {
  C p;
  int32_t from;
};

// Calls fn(item) for every item of a row, in an order all of which are equally likely. `fn` and the random numbers are copied
// for the loop, so that their state stays in registers.
//
// A row that is long for the caches is dealt at random into buckets first, and each of them is shuffled by itself (Rao 1961,
// Sandelius 1962): every order stays equally likely, and all jumps stay inside a bucket.
template <class C> class Shuffle {
 public:
  template <class Fn> void walk(const Units<C>& units, Random& random, Fn fn) {
    int64_t n = units.items();
    Item* items = items_.at_least(n);
    if (n <= kOneBucket) {
      for (int64_t i = 0; i < n; i++) items[i] = {units.at(i), int32_t(i)};
      shuffled(items, n, random, fn);
      return;
    }
    int64_t begin[kBuckets + 1] = {};
    deal(units, n, random, items, begin);
    for (int b = 0; b < kBuckets; b++) shuffled(items + begin[b], begin[b + 1] - begin[b], random, fn);
  }

 private:
  using Item = Weighed<C>;
  static constexpr int kBuckets = 256;
  static constexpr int64_t kOneBucket = 16384;  // items: their keys fit the second-level cache of the machine named in solver.h
  Memory<Item> items_;
  Memory<uint8_t> bucket_;

  // begin[b] is where bucket b begins.
  void deal(const Units<C>& units, int64_t n, Random& random, Item* items, int64_t* begin) {
    uint8_t* bucket = bucket_.at_least(n + 8);
    for (int64_t i = 0; i < n; i += 8) {
      uint64_t bits = random.next();
      std::memcpy(bucket + i, &bits, 8);
    }
    int64_t size[4][kBuckets] = {};  // four counters each, so that equal neighbours do not wait for one another
    for (int64_t i = 0; i < n; i++) size[i & 3][bucket[i]]++;
    int64_t next[kBuckets], at = 0;
    for (int b = 0; b < kBuckets; b++) begin[b] = next[b] = at, at += size[0][b] + size[1][b] + size[2][b] + size[3][b];
    begin[kBuckets] = at;
    for (int64_t i = 0; i < n; i++) items[next[bucket[i]]++] = {units.at(i), int32_t(i)};
  }

  // Fisher and Yates: each place draws one of the items that are left.
  template <class Fn> static KHOT_INLINE void shuffled(Item* items, int64_t n, Random& numbers, Fn& visit) {
    Random random = numbers;
    Fn fn = visit;
    auto place = [&](int64_t i, uint32_t bits) KHOT_INLINE_LAMBDA {
      int64_t j = i + Random::below(bits, n - i);
      Item chosen = items[j];
      items[j] = items[i];
      fn(chosen);
    };
    int64_t i = 0;
    for (; i + 1 < n; i += 2) {
      uint64_t bits = random.next();
      place(i, uint32_t(bits)), place(i + 1, uint32_t(bits >> 32));
    }
    if (i < n) fn(items[i]);
    numbers = random, visit = fn;
  }
};

}  // namespace
