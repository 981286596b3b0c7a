// Passes over a whole row: cut into blocks that the threads share, where it is long.
#pragma once
#include "passes.h"
#include "team.h"

namespace {

template <class C> struct Line {  // one row, and how it is passed over
  Row<C> row;
  int64_t n;
  int threads;
  template <class R, class Fn> R reduce(Fn fn) const { return reduce_blocks<R>(threads, n, fn); }

  Stats stats() const {
    const Row<C> from = row;
    return reduce<Stats>([=](int64_t begin, int64_t size) { return classify(from.from(begin), size); });
  }
  Counts above(Levels<C> levels) const {
    const Row<C> from = row;
    return reduce<Counts>([=](int64_t begin, int64_t size) { return count_above(from.from(begin), size, levels); });
  }
  Gap gap(C level) const {
    const Row<C> from = row;
    return reduce<Gap>([=](int64_t begin, int64_t size) { return gap_at(from.from(begin), size, level); });
  }
};

// Writes a row that needs no threshold: the excluded (-inf), the finite and the certain (+inf) scores get these values.
template <class C> void fill(const Line<C>& line, Row<C> out, double excluded, double finite, double certain) {
  const Row<C> row = line.row;
  line.template reduce<Empty>([=](int64_t begin, int64_t size) {
    C in[kGroup<C>], group[kGroup<C>];
    for (int64_t i = begin; i < begin + size; i += kGroup<C>) {
      Wide<C> v = load_pack<Wide<C>>(row.read(i, begin + size, in, C(0))), inner = C(finite), outer = C(certain);
      inner = select(v == kInf<C>, outer, inner);
      store_pack(out.target(i, begin + size, group), select(v == -kInf<C>, Wide<C>(C(excluded)), inner));
      out.written(i, begin + size, group);
    }
    return Empty();
  });
}

// Sum F and its moments at a threshold. `cache` is where the codes go, or come from, or null.
template <class F, class C, bool kComplement, bool kFromCache> Sums measure_whole(const Line<C>& line, C* cache, const Shift<C>& shift) {
  constexpr int64_t thin_from = 16384;  // see Measure
  const Row<C> row = line.row;
  const Shift<C> s = shift;
  const bool thin = line.n >= thin_from;
  return line.template reduce<Sums>([=](int64_t begin, int64_t size) {
    C* const part = cache ? cache + begin : nullptr;
    if constexpr (F::kMoments == 4 && F::kCached && sizeof(C) == 4) {
      if (thin) return measure<F, C, kComplement, kFromCache, true>(row.from(begin), part, size, s);
    }
    return measure<F, C, kComplement, kFromCache, false>(row.from(begin), part, size, s);
  });
}

// Writes y, each moved by `mend` times its slope; returns its sum.
template <class F, class C> Total emit_mended(const Line<C>& line, Row<C> out, const Shift<C>& shift, C mend) {
  const Row<C> row = line.row;
  const Shift<C> s = shift;
  return line.template reduce<Total>([=](int64_t begin, int64_t size) {
    return emit<F, C, false, true>(row.from(begin), nullptr, out.from(begin), size, s, mend);
  });
}

// Writes y, from what is kept in the cache unless that is null; returns its sum.
template <class F, class C> Total emit_whole(const Line<C>& line, C* cache, Row<C> out, const Shift<C>& shift) {
  const Row<C> row = line.row;
  const Shift<C> s = shift;
  return line.template reduce<Total>([=](int64_t begin, int64_t size) {
    if constexpr (F::kCached || F::kRefined) {
      if (cache) return emit<F, C, true>(row.from(begin), cache + begin, out.from(begin), size, s);
    }
    return emit<F, C, false>(row.from(begin), nullptr, out.from(begin), size, s);
  });
}

}  // namespace
