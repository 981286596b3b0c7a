// Successive halving of one row: who meets whom, and what each item weighs.
#pragma once
#include <algorithm>
#include <vector>

#include "duels.h"

#include "sort.h"

namespace {

struct Shape {
  int64_t n, k;
  int rounds;
  int64_t leaves() const { return k << rounds; }      // of a row, byes included
  int64_t byes() const { return leaves() - n; }       // in the first round, for the best
};

template <class T> struct Table {  // what a thread needs to play one row
  explicit Table(const Shape& s)
      : shape(s), sorter(s.n), order(2 * size_t(s.leaves())), win(size_t(s.leaves())), lose(size_t(s.leaves())),
        value(size_t(s.n) + 1), ordered(size_t(s.n) + 1), worst(size_t(s.n) + 1) {}
  Shape shape;
  Sorter<T> sorter;
  std::vector<int32_t> order;    // round after round: who sat at each seat
  std::vector<T> win, lose;      // round after round: the shares of the pair at each of the better half's seats
  std::vector<T> value, ordered, worst;

  // All rounds, then back from the k places to the items: every pair becomes two neighbours.
  void play(const T* scores, const Rules<T>& rules, int64_t* leaves, T* weight) {
    int64_t n = shape.n;
    bool has_nan = false, has_infinite = false;
    for (int64_t i = 0; i < n; i++) {
      value[i] = scores[i];
      has_nan |= scores[i] != scores[i];
      has_infinite |= !finite(scores[i]);
    }
    int64_t seats = n, byes = shape.byes(), first_seat = 0, first_pair = 0;
    if (!shape.rounds) sit_down(seats, 0, order.data());
    for (int r = 0; r < shape.rounds; r++, byes = 0) {
      int64_t half = (seats + byes) / 2;
      sit_down(seats, byes, order.data() + first_seat);
      fight(seats, byes, rules, has_infinite, win.data() + first_pair, lose.data() + first_pair);
      first_seat += 2 * half, first_pair += half, seats = half;
    }
    trace_back(first_seat, first_pair, leaves, weight);
    if (has_nan) std::fill(weight, weight + shape.leaves(), std::numeric_limits<T>::quiet_NaN());
    else if (has_infinite)
      for (int64_t i = 0; i < shape.leaves(); i++)
        if (scores[leaves[i]] == -kInf<T>) weight[i] = 0;
  }

 private:
  // Sorts the entrants; the best have a bye, which is a second seat at the other end.
  void sit_down(int64_t entrants, int64_t byes, int32_t* seat) {
    sorter.sort(value.data(), seat, entrants);
    for (int64_t i = 0; i < entrants; i++) ordered[i] = value[seat[i]];
    for (int64_t i = 0; i < byes; i++) seat[entrants + byes - 1 - i] = seat[i];
  }

  void fight(int64_t entrants, int64_t byes, const Rules<T>& rules, bool has_infinite, T* win, T* lose) {
    int64_t half = (entrants + byes) / 2, duels = half - byes;
    for (int64_t i = 0; i < byes; i++) win[i] = 1, lose[i] = 0, value[i] = ordered[i];
    const T *__restrict a = ordered.data() + byes, *last = ordered.data() + entrants - 1;  // none of these overlap: they go in vectors
    T *__restrict b = worst.data(), *__restrict after = value.data() + byes, *__restrict won = win + byes, *__restrict lost = lose + byes;
    for (int64_t i = 0; i < duels; i++) b[i] = last[-i];
    if (rules.is_power)
      for (int64_t i = 0; i < duels; i++) won[i] = power(a[i] / rules.tau) - power(b[i] / rules.tau);
    else
      for (int64_t i = 0; i < duels; i++) won[i] = (a[i] - b[i]) * rules.gain;
    for (int64_t i = 0; i < duels; i++) {
      Duel<T> d = decide(a[i], b[i], won[i]);
      won[i] = d.win, lost[i] = d.lose, after[i] = d.after;
    }
    if (!has_infinite) return;
    for (int64_t i = 0; i < duels; i++) {
      if (finite(a[i]) && finite(b[i])) continue;
      Duel<T> d = decide_infinite(a[i], b[i]);
      won[i] = d.win, lost[i] = d.lose, after[i] = d.after;
    }
  }

  // In place: from the last pair to the first, each becomes its two entrants.
  void trace_back(int64_t first_seat, int64_t first_pair, int64_t* leaves, T* weight) const {
    for (int64_t i = 0; i < shape.k; i++) leaves[i] = shape.rounds ? i : order[i], weight[i] = 1;
    for (int64_t pairs = shape.k; pairs < shape.leaves(); pairs *= 2) {
      first_seat -= 2 * pairs, first_pair -= pairs;
      const int32_t* seat = order.data() + first_seat;
      for (int64_t i = pairs - 1; i >= 0; i--) {
        int64_t s = leaves[i];
        T w = weight[i];
        leaves[2 * i] = seat[s], weight[2 * i] = w * win[first_pair + s];
        leaves[2 * i + 1] = seat[2 * pairs - 1 - s], weight[2 * i + 1] = w * lose[first_pair + s];
      }
    }
  }
};

}  // namespace
