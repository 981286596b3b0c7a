// Finding the level of a row by counting: what a search starts from where the scores are spread far wider than tau.
#pragma once
#include "position.h"
#include "whole.h"

namespace {

struct Hint { double low = -kInf<double>, high = kInf<double>; };  // between which levels to count first

// Up to four levels strictly between lo and hi. They divide the interval evenly by value and by rank in turn, so that
// neither a wide range nor a few outliers take many passes. Returns how many there are.
template <class C> int levels_between(C lo, C hi, int round, const Hint& hint, C* level) {
  const uint64_t rank = uint64_t(rank_of(lo)), span = uint64_t(rank_of(hi)) - rank;
  const bool hinted = round == 0 && (hint.low > double(lo) || hint.high < double(hi));
  const double a = hinted ? most(hint.low, double(lo)) : double(lo), b = hinted ? least(hint.high, double(hi)) : double(hi);
  int inside = 0;
  for (int j = 0; j < 4; j++) {
    C t;
    if (hinted) t = C(a + (b - a) * j / 3);
    else if (round & 1) of_rank(int64_t(rank + span / 5 * uint64_t(j + 1)), t);
    else t = C(a + (b - a) * ((j + 1) / 5.0));
    if (t > lo && t < hi) level[inside++] = t;
  }
  if (!inside && span > 1) of_rank(int64_t(rank + span / 2), level[inside++]);  // fewer than five numbers between: one by one
  return inside;
}

// A level with so many scores above it: in the middle of the gap where there is one, else to a fraction of tau.
template <class C> double locate(const Line<C>& line, double wanted, double tau, const Stats& s, const Hint& hint) {
  C lo, hi = C(s.high);
  of_rank(rank_of(C(s.low)) - 1, lo);
  for (int round = 0; round < 64; round++) {
    const double width = double(hi) - double(lo);
    if (width <= 0.5 * tau) return double(lo) + 0.5 * width;
    C level[4];
    const int inside = levels_between(lo, hi, round, hint, level);
    if (!inside) return double(hi);  // neighbours: all that is left is a tie at hi
    for (int j = inside; j < 4; j++) level[j] = level[inside - 1];
    const Counts c = line.above({{level[0], level[1], level[2], level[3]}});
    for (int j = 0; j < 4; j++) {
      const double count = double(c.c[j]);
      if (count == wanted) {
        const Gap g = line.gap(level[j]);
        return g.above < kInf<double> ? 0.5 * g.below + 0.5 * g.above : double(level[j]);
      }
      if (count > wanted) lo = most(lo, level[j]);
      else hi = least(hi, level[j]);
    }
  }
  return double(lo) + 0.5 * (double(hi) - double(lo));
}

}  // namespace
