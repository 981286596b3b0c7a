// Sampling designs: systematic and pivotal, a row at a time.
#pragma once
#include "selection.h"
#include "shuffle.h"
#include "team.h"

namespace {

// One row at a time.
template <class C> class Sampler {
 public:
  void draw(const KhotDraw& a, int design, int64_t r) {
    int64_t row = r % a.rows;
    if (row != last) units.set(static_cast<const C*>(a.probs) + row * a.n, a.n, a.k[row * a.k_stride]), last = row;
    C* out = static_cast<C*>(a.out) + r * a.n;
    if (units.has_nan) return fill(out, a.n, kNan<C>);
    Random random(a.seed, r);
    if (design == kPivotal) return pivotal(a.shuffled, random, out, a.n);
    int64_t start = a.start ? a.start[r] : int64_t(random.next() >> 1) & (units.one - 1);
    a.shuffled ? shuffled_comb(start, random, out, a.n) : comb(start, out, a.n);
  }

 private:
  Units<C> units;
  Shuffle<C> shuffle;
  Memory<uint8_t> hits;
  Memory<int64_t> values;
  Memory<int32_t> places;
  uint8_t* hit = nullptr;  // pivotal: a byte for each item, the phantom included
  int64_t last = -1;  // the row that `units` is of

  static void fill(C* out, int64_t n, C value) {
    for (int64_t i = 0; i < n; i++) out[i] = value;
  }

  // A comb of teeth one apart on the cumulative units: an item that a tooth falls on is drawn.
  __attribute__((noinline)) void comb(int64_t start, C* out, int64_t n) {
    alignas(64) int64_t room[kUnitBlock];
    const int bits = __builtin_ctzll(uint64_t(units.one));
    int64_t reached = start, passed = 0;  // what the items so far reach to, and how many teeth that is
    for (int64_t i = 0; i < n; i += kUnitBlock) {
      const int64_t *block = units.block(i, room), size = least(kUnitBlock, n - i);
      for (int64_t j = 0; j < size; j++) {
        reached += block[j];
        int64_t teeth = reached >> bits;
        out[i + j] = C(int32_t(teeth - passed)), passed = teeth;
      }
    }
  }

  // The same in random order. Of the items that are drawn and those that are not, the fewer are listed.
  struct Comb {
    UnitRule rule;
    int32_t *listed, *last;
    int64_t reached, passed, drawn;  // drawn: whether it is those that are listed, 0 or 1
    int bits;
    KHOT_INLINE void block(const C* p, const int32_t* from, int64_t count) {
      alignas(64) int64_t room[kUnitBlock];
      rule.block(p, from, count, room);
      listed = least(listed, last);  // as many are drawn as foreseen: memory shall not depend on that
      for (int64_t i = 0; i < count; i++) {
        reached += room[i];
        int64_t teeth = reached >> bits, hit = teeth - passed;
        *listed = from[i], listed += hit == drawn, passed = teeth;  // no branch: nothing foretells which
      }
    }
  };
  __attribute__((noinline)) void shuffled_comb(int64_t start, Random& random, C* out, int64_t n) {
    const bool few = 2 * units.size <= units.items();
    const int64_t most_listed = few ? units.size : units.items() - units.size;
    int32_t* list = places.at_least(most_listed + kUnitBlock + 1);
    Comb all{units.rule, list, list + most_listed, start, 0, few, __builtin_ctzll(uint64_t(units.one))};
    shuffle.walk(units, random, all);
    fill(out, n, few ? C(0) : C(1));
    for (const int32_t* i = list; i < all.listed; i++)
      if (*i < n) out[*i] = few ? C(1) : C(0);  // not the phantom
  }

  struct Copy {
    UnitRule rule;
    int64_t* value;
    int32_t* place;
    KHOT_INLINE void block(const C* p, const int32_t* from, int64_t count) {
      rule.block(p, from, count, value);
      std::memcpy(place, from, size_t(count) * sizeof(int32_t));
      value += count, place += count;
    }
  };
  // A balanced tree of duels: one of two is settled at 0 or 1, the other carries what is left of their sum.
  __attribute__((noinline)) void pivotal(bool shuffled, Random& random, C* out, int64_t row) {
    int64_t n = units.items(), *value = values.at_least(n + kUnitBlock);
    int32_t* place = places.at_least(n);
    hit = hits.at_least(n);
    Copy copy{units.rule, value, place};
    if (shuffled) shuffle.walk(units, random, copy);
    else for (int64_t i = 0; i < n; i++) value[i] = units.rule.of(double(units.at(i)), i), place[i] = int32_t(i);
    for (; n > 1; n = (n + 1) / 2) {
      for (int64_t i = 0; i < n / 2; i++) duel(value, place, i, random);
      if (n % 2) value[n / 2] = value[n - 1], place[n / 2] = place[n - 1];
    }
    if (n == 1) hit[place[0]] = value[0] > 0;
    for (int64_t i = 0; i < row; i++) out[i] = C(hit[i]);
  }
  // The neighbours 2 i and 2 i + 1; who goes on stands at i.
  KHOT_INLINE void duel(int64_t* value, int32_t* place, int64_t i, Random& random) {
    const int64_t one = units.one, a = value[2 * i], b = value[2 * i + 1], total = a + b;
    const int32_t from_a = place[2 * i], from_b = place[2 * i + 1];
    bool over = total > one;
    // Odds of a: a to b for staying in, (1 - b) to (1 - a) for being the one taken. A certain winner wins, always.
    uint64_t weight = uint64_t(over ? one - b : a), against = uint64_t(over ? 2 * one - total : total);
    bool a_wins = uint64_t((unsigned __int128)random.next() * against >> 64) < weight;
    bool a_settles = a_wins == over;  // the winner settles when it is taken, the loser when it is dropped
    hit[a_settles ? from_a : from_b] = over;
    value[i] = total - (over ? one : 0), place[i] = a_settles ? from_b : from_a;
  }
};

template <class C> int draw(const KhotDraw& a, int design) {
  int code = 0;  // several threads may set it, all to the same value
  const int64_t all = a.draws * a.rows;
  over_rows(all, a.n, int(least<int64_t>(a.threads, all)), 1, [&](int64_t begin, int64_t end, int) {
    try {
      Sampler<C> sampler;
      for (int64_t r = begin; r < end; r++) sampler.draw(a, design, r);
    } catch (const std::bad_alloc&) {
      __atomic_store_n(&code, 3, __ATOMIC_RELAXED);
    }
  });
  return code;
}

int any_draw(int design, int dtype, const KhotDraw& a) {
  if (design != kSystematic && design != kPivotal) return 1;
  return dtype == kFloat32 ? draw<float>(a, design) : dtype == kFloat64 ? draw<double>(a, design) : 2;
}

}  // namespace
