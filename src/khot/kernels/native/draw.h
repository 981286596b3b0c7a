// Sampling designs: systematic and pivotal, a row at a time.
#pragma once
#include "selection.h"
#include "shuffle.h"
#include "team.h"

namespace {

// One row at a time. `hit` has a byte for each item, the phantom included.
template <class C> class Sampler {
 public:
  void draw(const KhotDraw& a, int design, int64_t r) {
    int64_t row = r % a.rows;
    if (row != last) units.set(static_cast<const C*>(a.probs) + row * a.n, a.n, a.k[row * a.k_stride]), last = row;
    C* out = static_cast<C*>(a.out) + r * a.n;
    if (units.has_nan) return fill(out, a.n);
    hit = hits.at_least(units.items());
    Random random(a.seed, r);
    if (design == kPivotal) {
      pivotal(a.shuffled, random);
    } else {
      int64_t start = a.start ? a.start[r] : int64_t(random.next() >> 1) & (units.one - 1);
      if (!a.shuffled) return comb(start, out, a.n);
      shuffled_comb(start, random);
    }
    for (int64_t i = 0; i < a.n; i++) out[i] = C(hit[i]);
  }

 private:
  Units<C> units;
  Shuffle<C> shuffle;
  Memory<uint8_t> hits;
  Memory<int64_t> values;
  Memory<int32_t> places;
  uint8_t* hit = nullptr;
  int64_t last = -1;  // the row that `units` is of

  static void fill(C* out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = kNan<C>;
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
  struct Comb {
    UnitRule rule;
    uint8_t* hit;
    int64_t past;  // how far the last item reaches behind the last tooth
    int bits;
    KHOT_INLINE void operator()(const Weighed<C>& item) {
      past += rule.of(double(item.p), item.from);
      int64_t tooth = past >> bits;  // 0 or 1, and no branch: nothing foretells which
      past -= tooth << bits;
      hit[item.from] = uint8_t(tooth);
    }
  };
  __attribute__((noinline)) void shuffled_comb(int64_t start, Random& random) {
    shuffle.walk(units, random, Comb{units.rule, hit, start, __builtin_ctzll(uint64_t(units.one))});
  }

  struct Copy {
    UnitRule rule;
    int64_t* value;
    int32_t* place;
    KHOT_INLINE void operator()(const Weighed<C>& item) { *value++ = rule.of(double(item.p), item.from), *place++ = item.from; }
  };
  // A balanced tree of duels: one of two is settled at 0 or 1, the other carries what is left of their sum.
  __attribute__((noinline)) void pivotal(bool shuffled, Random& random) {
    int64_t n = units.items(), *value = values.at_least(n + kUnitBlock);
    int32_t* place = places.at_least(n);
    Copy copy{units.rule, value, place};
    if (shuffled) shuffle.walk(units, random, copy);
    else for (int64_t i = 0; i < n; i++) copy({units.at(i), int32_t(i)});
    for (; n > 1; n = (n + 1) / 2) {
      for (int64_t i = 0; i < n / 2; i++) duel(value, place, i, random);
      if (n % 2) value[n / 2] = value[n - 1], place[n / 2] = place[n - 1];
    }
    if (n == 1) hit[place[0]] = value[0] > 0;
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
