// The scores of a row that can still count, where F is 0 below its foot and few scores lie above that. They are kept in the output until
// it is written, so that all evaluations but the first pass over them alone.
#pragma once
#include "compress.h"
#include "whole.h"

namespace {

constexpr int64_t kNarrowFrom = 256;  // scores of a row that is worth it
constexpr double kNarrowShare = 0.125;  // and the share of k
constexpr double kNarrowBelow = 0.25;  // how far below the foot they are taken, in tau: a start is seldom off by more
constexpr int kNarrowings = 3;

// Writes the scores above `level` to `out` and returns how many, or -1 if they are more than half. `probe` gets 0 times every score.
template <class C> int64_t put_all_above(const C* from, int64_t n, C level, C* out, double& probe) {
  const Vec<C> bound = splat(level);
  const int64_t room = n / 2 - kGroup<C>;
  Vec<C> strange{};
  C rest = 0;
  int64_t count = 0, i = 0;
  for (; room > kGroup<C> && i + kGroup<C> <= n; i += kGroup<C>) {
    if (count > room) return -1;
    KHOT_EACH(kUnroll, const Vec<C> v = load(from + i + j * kWidth<C>); strange = fma(v, Vec<C>{}, strange);
              count += put_above(out + count, v, bound));
  }
  for (; i < n; i++) {
    rest += from[i] * C(0);
    if (from[i] > level) out[count++] = from[i];
  }
  probe = sum_lanes(strange) + double(rest);
  return count;
}

template <class C> class Narrowed {
 public:
  // Whether they are here and F is 0 for all others; they are taken anew where the foot has come too low.
  bool serve(const Line<C>& line, C* room, double foot, double tau) {
    if (!there || !covers(foot, tau)) there = times++ < kNarrowings && take(line, room, foot, tau);
    return there;
  }
  void drop() { there = false, times = kNarrowings; }

  template <class F> Sums evaluate(const Line<C>& line, const Shift<C>& shift) const {
    const Shift<C> s = shift;
    const Row<C> from{kept, sizeof(C) == 4 ? kFloat32 : kFloat64};
    const int64_t *const many = counts, size = block_of(line.n);
    Sums sums = line.template reduce<Sums>([=](int64_t begin, int64_t) {
      return measure<F, C, false, false, false>(from.from(begin), nullptr, many[begin / size], s);
    });
    sums.probe = probe;
    return sums;
  }

 private:
  bool there = false;
  int times = 0;
  C* kept = nullptr;
  C level = 0;
  double probe = 0;
  int64_t counts[kMostBlocks];  // of each block, at whose beginning they stand

  static int64_t block_of(int64_t n) { return n <= kBlock ? most<int64_t>(n, 1) : block_size(n); }
  // The last digits of a foot are those of the scores, not of tau.
  bool covers(double foot, double tau) const { return double(level) <= foot - (1e-3 * tau + 4 * double(kEps<C>) * std::fabs(foot)); }

  __attribute__((noinline)) bool take(const Line<C>& line, C* room, double foot, double tau) {
    level = C(foot - kNarrowBelow * tau), kept = room;
    if (!covers(foot, tau)) return false;
    struct Found {
      double probe = 0;
      bool full = false;
      void add(const Found& o) { probe += o.probe, full |= o.full; }
    };
    const Row<C> row = line.row;
    int64_t *const many = counts, size = block_of(line.n);
    const C above = level;
    const Found found = line.template reduce<Found>([=](int64_t begin, int64_t part) {
      Found here;
      many[begin / size] = put_all_above(row.values() + begin, part, above, room + begin, here.probe);
      here.full = many[begin / size] < 0;
      return here;
    });
    probe = found.probe;
    return !found.full;
  }
};

}  // namespace
