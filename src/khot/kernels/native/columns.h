// A row of scores in each lane: searching a level by counting.
#pragma once
#include "pack.h"

namespace {

struct Columns {
  static constexpr int kRows = kWidth<float>;
  const float* data;  // a vector for each of n columns
  const int64_t n;

  // For the rows of `open`, a level with the wanted number of scores above it, or within `near` of one. The interval is cut in the middle
  // and in proportion to the counts by turns.
  __attribute__((noinline)) VecF level_with(VecF wanted, VecF near, IntF open) const {
    VecF low_end = splat(kInf<float>), high_end = -low_end, low_count = splat(float(n)), high_count{}, level{};
    for (int64_t c = 0; c < n; c++) {
      VecF x = load(data + c * kRows);
      low_end = vmin(low_end, x), high_end = vmax(high_end, x);
    }
    low_end -= vabs(low_end) * kEps<float> + std::numeric_limits<float>::min();
    IntF exact{};
    for (int round = 0; round < 64 && any_of(open); round++) {
      VecF share = (low_count - wanted) / (low_count - high_count);
      share = round % 2 ? vmax(splat(0.1f), vmin(splat(0.9f), share)) : splat(0.5f);
      VecF t = fma(high_end - low_end, share, low_end);
      VecF count = count_above(t);
      IntF found = count == wanted, up = open & (count > wanted), down = open & ~up;
      // Of two neighbouring numbers the upper one is a score.
      IntF closed = found | (high_end - low_end <= near) | ~((t > low_end) & (t < high_end));
      level = open ? ((t > low_end) & (t < high_end) ? t : high_end) : level;
      exact |= open & found;
      low_end = up ? t : low_end, low_count = up ? count : low_count;
      high_end = down ? t : high_end, high_count = down ? count : high_count;
      open &= ~closed;
    }
    return exact ? middle_of_gap(level) : level;
  }

 private:
  // Half-way between the scores on either side of the level, where there are both.
  VecF middle_of_gap(VecF level) const {
    VecF below = splat(-kInf<float>), above = splat(kInf<float>);
    for (int64_t c = 0; c < n; c++) {
      VecF x = load(data + c * kRows);
      IntF up = x > level;
      below = vmax(below, up ? splat(-kInf<float>) : x), above = vmin(above, up ? x : splat(kInf<float>));
    }
    VecF middle = below + 0.5f * (above - below);
    return middle - middle == 0.f ? middle : level;
  }
  VecF count_above(VecF level) const {
    IntF count[4] = {};
    int64_t c = 0;
    for (; c + 4 <= n; c += 4) KHOT_EACH(4, count[j] -= load(data + (c + j) * kRows) > level);
    for (; c < n; c++) count[0] -= load(data + c * kRows) > level;
    return __builtin_convertvector((count[0] + count[1]) + (count[2] + count[3]), VecF);
  }
  static bool any_of(IntF mask) {
    int any = 0;
    for (int j = 0; j < kRows; j++) any |= mask[j];
    return any;
  }
};

}  // namespace
