// The step of a family whose slope has a kink at u = 0 (Laplace) over the scores that cross it.
//
// The family's own step is exact but for those: with v = u + d where a score lands, it is told 1 - cosh(v) too much for each that comes
// from below, and as much too little for each from above. They are few, and the codes of a row are at hand: one light pass finds
// them, and Newton's method on the whole equation, with them in it, saves another evaluation of the row.
#pragma once
#include <cmath>

#include "compress.h"
#include "whole.h"

namespace {

constexpr int64_t kCrossers = 4096;  // that are looked at, in all blocks together
constexpr double kCrossing = 0.3;    // the longest step for which it is worth it, in units of tau
constexpr double kMargin = 1.25;     // how much farther than the first step is looked

// Writes the numbers strictly between the bounds to `out`, which has room for a vector more; returns how many, or -1 if there is no room.
inline int64_t put_between(const float* from, int64_t n, float low, float high, float* out, int64_t room) {
  const VecF bottom = splat(low), top = splat(high);
  int64_t count = 0, i = 0;
  for (; i + kGroup<float> <= n; i += kGroup<float>) {
    const Wide<float> g = load_pack<Wide<float>>(from + i);
    IntF some{}, in[kUnroll];
    KHOT_EACH(kUnroll, in[j] = (g.v[j] > bottom) & (g.v[j] < top), some |= in[j]);
    if (!lane_bits(some)) continue;
    for (int j = 0; j < kUnroll; j++) {
      count += put_chosen(out + count, g.v[j], in[j]);
      if (count > room) return -1;
    }
  }
  for (; i < n; i++) {
    if (!(from[i] > low && from[i] < high)) continue;
    if (count == room) return -1;
    out[count++] = from[i];
  }
  return count;
}

class Crossing {
 public:
  // The scores that a step of up to kMargin d may carry over the kink: those whose codes exp(-u) / factor lie between 1 and exp(kMargin d).
  Crossing(const float* codes, int64_t n, int threads, double factor, double d) {
    const double far = std::exp(kMargin * d);
    const float low = float(least(1.0, far) / factor), high = float(most(1.0, far) / factor);
    const int64_t size = n <= kBlock ? n : block_size(n), blocks = (n + size - 1) / size, room = kCrossers / blocks;
    struct Count { bool full = false; void add(const Count& o) { full |= o.full; } };
    float* const to = found;
    int64_t* const many = counts;
    full = reduce_blocks<Count>(threads, n, [=](int64_t begin, int64_t part) {
      const int64_t b = begin / size, c = put_between(codes + begin, part, low, high, to + b * (room + kWidth<float>), room);
      many[b] = most<int64_t>(c, 0);
      return Count{c < 0};
    }).full;
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t j = 0; j < counts[b]; j++) u[number++] = place(double(found[b * (room + kWidth<float>) + j]) * factor);
  }

  // The step that brings sum F to k, from d; nan if it is not found. `below` and `above` are the sums of the tails on either side.
  double step(double missing, double below, double above, double d) {
    if (full) return kNan<double>;
    const double first = d, side = d < 0 ? -1 : 1;
    for (int64_t j = number; j < number + kWidth<double>; j++) u[j] = -side;  // such a score stays where it is
    for (int round = 0; round < 6; round++) {
      const double g = std::exp(d);
      VecD beyond{}, slopes{};
      for (int64_t j = 0; j < number; j += kWidth<double>) {
        const VecD v = vmax(splat(0.0), (load(u + j) + d) * side), square = v * v;  // how far behind the kink
        beyond += square * (0.5 + square * (1.0 / 24 + square * (1.0 / 720)));      // cosh(v) - 1
        slopes += v * (1.0 + square * (1.0 / 6 + square * (1.0 / 120)));            // sinh(v)
      }
      const double slope = below * g + above / g - sum_lanes(slopes);
      const double change = (below * (g - 1) + above * (1 - 1 / g) - side * sum_lanes(beyond) - missing) / slope;
      d -= change;
      if (!(std::fabs(d) <= kMargin * std::fabs(first)) || !(slope > 0)) return kNan<double>;
      if (std::fabs(change) <= 1e-5) return d;  // what is left is about its square
    }
    return kNan<double>;
  }

 private:
  bool full;
  int64_t number = 0, counts[kMostBlocks];
  alignas(64) float found[kCrossers + kMostBlocks * kWidth<float> + kWidth<float>];
  alignas(64) double u[kCrossers + kWidth<double>];

  // -log e near 1.
  static double place(double e) {
    const double w = (1 - e) / (1 + e), s = w * w;
    return 2 * w * (1 + s * (1.0 / 3 + s * (1.0 / 5 + s * (1.0 / 7 + s / 9))));
  }
};

// Makes the step d exact; false if too many scores cross, or it is not found.
template <class C>
__attribute__((noinline)) bool cross_kink(const Line<C>& line, const C* codes, double factor, double missing, double v0, double v1, double& d) {
  const double better = Crossing(codes, line.n, line.threads, factor, d).step(missing, 0.5 * (v0 + v1), 0.5 * (v0 - v1), d);
  if (!(better == better)) return false;
  d = better;
  return true;
}

}  // namespace
