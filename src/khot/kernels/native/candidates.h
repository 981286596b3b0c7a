// The scores of short rows that can still count, where F is 0 below its foot and a bound of the foot is known.
#pragma once
#include "compress.h"
#include "families.h"
#include "rows.h"
#include "transpose.h"

namespace {

// Writes the scores above its `floor` of each row, by columns, with -inf behind the last; returns how many columns there are, or 0, and
// nothing written, if that is more than `most_columns`.
inline int64_t take_candidates(const Row<float>* x, int rows, int64_t n, const double* floor, float* data, int64_t most_columns) {
  constexpr int w = kWidth<float>;
  constexpr int64_t room = 128;
  alignas(64) float chosen[w][room + kGroup<float> + w];
  if (most_columns > room) most_columns = room;
  int64_t count[w], columns = 0;
  for (int r = 0; r < rows; r++) {
    const VecF level = splat(float(floor[r]));
    float buffer[kGroup<float>];
    count[r] = 0;
    for (int64_t i = 0; i < n && count[r] <= room; i += kGroup<float>) {
      const float* from = x[r].read(i, n, buffer, -kInf<float>);
      KHOT_EACH(kUnroll, VecF v = load(from + j * w); count[r] += put_above(chosen[r] + least(count[r], room), v, level));
    }
    columns = most(columns, count[r]);
  }
  columns = most<int64_t>(1, (columns + w - 1) / w) * w;
  if (columns > most_columns) return 0;
  for (int r = 0; r < w; r++) {
    const int from = least(r, rows - 1);
    if (r >= rows) std::memcpy(chosen[r], chosen[from], size_t(columns) * sizeof(float)), count[r] = count[from];
    for (int64_t i = count[r]; i < columns; i++) chosen[r][i] = -kInf<float>;
  }
  for (int64_t c = 0; c < columns; c += w) {
    VecF block[w];
    for (int r = 0; r < w; r++) block[r] = load(chosen[r] + c);
    transpose(block);
    for (int i = 0; i < w; i++) store(data + (c + i) * w, block[i]);
  }
  return columns;
}

// Writes y row by row; the sums go to `total`.
template <class F> void write_values(const Row<float>* x, const Row<float>* y, int rows, int64_t n, const Shift<VecF>& shift, double* total) {
  using P = Wide<float>;
  float in[kGroup<float>], out[kGroup<float>];
  for (int r = 0; r < rows; r++) {
    const Shift<float> s = {shift.high[r], shift.scale[r], shift.low[r], shift.factor[r], shift.curve};
    VecD sum{};
    for (int64_t i = 0; i < n; i += kGroup<float>) {
      const P value = F::value(load_pack<P>(x[r].read(i, n, in, -kInf<float>)), s);
      store_pack(y[r].target(i, n, out), value);
      y[r].written(i, n, out);
      sum += widen_add(fold(value));
    }
    total[r] = sum_lanes(sum);
  }
}

}  // namespace
