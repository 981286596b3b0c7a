// Hard selection and sampling for one instruction set: this file is compiled once for each, with KHOT_ISA naming it.
#include "draw.h"
#include "few.h"
#include "partition.h"
#include "selection.h"
#include "sort.h"
#include "team.h"

namespace {

// 1 for what is selected. -inf never is.
template <class C> __attribute__((noinline)) void write_mask(const Row<C>& x, const Row<C>& y, int64_t n, Cut<C> cut, bool has_nan) {
  C in[kGroup<C>], out[kGroup<C>];
  // Nothing is above nan or equal to it.
  const Vec<C> c = splat(has_nan ? kNan<C> : cut.value), one = splat(C(1)), nothing = has_nan ? splat(kNan<C>) : Vec<C>{};
  int64_t room = cut.value > -kInf<C> ? cut.room : 0;
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    const C* from = x.read(i, n, in, -kInf<C>);
    C* to = y.target(i, n, out);
    IVec<C> level{};
    KHOT_EACH(kUnroll, Vec<C> v = load(from + j * kWidth<C>); level |= v == c; store(to + j * kWidth<C>, v > c ? one : nothing));
    if (room > 0 && lane_bits(level))
      for (int64_t j = 0; j < kGroup<C> && room > 0; j++)
        if (from[j] == cut.value) to[j] = 1, room--;
    y.written(i, n, out);
  }
}

template <class C> __attribute__((noinline)) C smallest_of(const Row<C>& x, int64_t n) {
  C buffer[kGroup<C>];
  Vec<C> least_of_all = splat(kInf<C>);
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    const C* p = x.read(i, n, buffer, kInf<C>);
    KHOT_EACH(kUnroll, least_of_all = vmin(least_of_all, load(p + j * kWidth<C>)));
  }
  return smallest_lane<C>(least_of_all);
}

// The k-th largest and the next. +inf for k = 0, -inf behind the last.
template <class C> struct Ends { C kth, next; };
template <class C> __attribute__((noinline)) Ends<C> ends_of(const Row<C>& x, int64_t n, int64_t k, Cut<C> cut, bool has_nan) {
  if (has_nan) return {kNan<C>, kNan<C>};
  if (k == n) return {smallest_of(x, n), -kInf<C>};
  C buffer[kGroup<C>];
  const Vec<C> c = splat(cut.value), top = splat(kInf<C>);
  Vec<C> above = top, minus_below = top;
  IVec<C> level{};
  for (int64_t i = 0; i < n; i += kGroup<C>) {
    const C* p = x.read(i, n, buffer, kNan<C>);
    KHOT_EACH(kUnroll, Vec<C> v = load(p + j * kWidth<C>); level += v == c; above = vmin(above, v > c ? v : top);
              minus_below = vmin(minus_below, v < c ? -v : top));
  }
  const bool tied = sum_of_counts<C>(level) > cut.room;
  return {k <= 0 ? kInf<C> : cut.room > 0 ? cut.value : smallest_lane<C>(above), tied ? cut.value : -smallest_lane<C>(minus_below)};
}
template <class C> void write_one(const Row<C>& y, C value) {
  if (y.exact()) {
    y.values()[0] = value;
    return;
  }
  C out[kGroup<C>] = {};
  *y.target(0, 1, out) = value;
  y.written(0, 1, out);
}

// The indices of what is selected, from the largest to the smallest.
template <class C> class Ordered {
 public:
  void write(const Row<C>& x, int64_t n, int64_t k, Cut<C> cut, bool has_nan, int64_t* index) {
    int64_t found = has_nan ? copy_all(x, n) : collect(x, n, k, cut);
    int32_t* order = order_.at_least(found);
    if (found > sorted_) sorter_ = Sorter<C>(sorted_ = found);
    sorter_.sort(values_.at_least(found), order, found);
    const int32_t* from = from_.at_least(found);
    for (int64_t i = 0; i < k; i++) index[i] = from[order[i]];
  }

 private:
  Memory<C> values_;
  Memory<int32_t> from_, order_;
  int64_t sorted_ = 0;  // how many the sorter has room for
  Sorter<C> sorter_{0};

  // A nan comes first in a sort, whatever the cut.
  int64_t copy_all(const Row<C>& x, int64_t n) {
    C* values = values_.at_least(n);
    int32_t* from = from_.at_least(n);
    for (int64_t i = 0; i < n; i++) values[i] = x.from(i).first(), from[i] = int32_t(i);
    return n;
  }
  __attribute__((noinline)) int64_t collect(const Row<C>& x, int64_t n, int64_t k, Cut<C> cut) {
    C buffer[kGroup<C>], *values = values_.at_least(k);
    int32_t* from = from_.at_least(k);
    const Vec<C> c = splat(cut.value);
    int64_t found = 0;
    for (int64_t i = 0; i < n && found < k; i += kGroup<C>) {
      const C* p = x.read(i, n, buffer, -kInf<C>);
      for (int64_t part = 0; part < kGroup<C>; part += kWidth<C>) {
        for (unsigned set = lane_bits(load(p + part) >= c); set && found < k; set &= set - 1) {
          int64_t j = part + __builtin_ctz(set);
          if (p[j] == cut.value && cut.room-- <= 0) continue;
          values[found] = p[j], from[found++] = int32_t(i + j);
        }
      }
    }
    return found;
  }
};

// One row of whose scores few are selected. False if it takes more care.
template <class C> bool select_few(const KhotSelection& a, Few<C>& few, const Row<C>& x, const Row<C>& y, int64_t r, int64_t k) {
  if (!Few<C>::suits(a.n, k) || (k > 2 && !a.index) || (a.mask && !y.exact()) || !few.find(x, a.n, k + (a.next != nullptr))) return false;
  if (a.mask) {
    std::memset(y.values(), 0, size_t(a.n) * sizeof(C));
    for (int64_t i = 0; i < k; i++) y.values()[few.index[i]] = 1;
  }
  if (a.kth) write_one(Row<C>{a.kth, x.type}.from(r), few.value[k - 1]);
  if (a.next) write_one(Row<C>{a.next, x.type}.from(r), few.value[k]);
  for (int64_t i = 0; a.index && i < k; i++) a.index[r * k + i] = few.index[i];
  return true;
}

template <class C> void select_rows(const KhotSelection& a, Stored type, int64_t begin, int64_t end) {
  Selector<C> selector;
  Ordered<C> ordered;
  Few<C> few;
  for (int64_t r = begin; r < end; r++) {
    const Row<C> x = Row<C>{const_cast<void*>(a.x), type}.from(r * a.n), y = Row<C>{a.mask, type}.from(a.mask ? r * a.n : 0);
    const int64_t k = most<int64_t>(0, least(a.n, a.k[r * a.k_stride]));
    if (select_few(a, few, x, y, r, k)) continue;
    typename Selector<C>::Result found = selector.find(x, a.n, k);
    if (a.mask) write_mask(x, y, a.n, found.cut, found.has_nan);
    if (a.kth) {
      const Ends<C> ends = ends_of(x, a.n, k, found.cut, found.has_nan);
      write_one(Row<C>{a.kth, type}.from(r), ends.kth);
      if (a.next) write_one(Row<C>{a.next, type}.from(r), ends.next);
    }
    if (a.index) ordered.write(x, a.n, k, found.cut, found.has_nan, a.index + r * k);
  }
}

template <class C> int select(const KhotSelection& a, Stored type) {
  int code = 0;  // several threads may set it, all to the same value
  over_rows(a.rows, a.n, int(least<int64_t>(a.threads, a.rows)), 1, [&](int64_t begin, int64_t end, int) {
    try {
      select_rows<C>(a, type, begin, end);
    } catch (const std::bad_alloc&) {
      __atomic_store_n(&code, 3, __ATOMIC_RELAXED);
    }
  });
  return code;
}

int any_select(int dtype, const KhotSelection& a) {
  if (dtype < kFloat32 || dtype > kFloat16) return 2;
  return dtype == kFloat64 ? select<double>(a, kFloat64) : select<float>(a, Stored(dtype));
}

}  // namespace

#define KHOT_JOIN2(a, b) a##b
#define KHOT_JOIN(a, b) KHOT_JOIN2(a, b)
extern "C" __attribute__((visibility("hidden"))) const KhotSelect KHOT_JOIN(khot_select_, KHOT_ISA) = {any_select, any_draw};
