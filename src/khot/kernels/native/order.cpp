// The order of every row.
#include "share.h"

#include "sort.h"

namespace {

template <class T> bool order_rows(const T* values, int64_t* order, int64_t rows, int64_t n, int threads) {
  return share_work(threads, rows, n, [=](int64_t begin, int64_t end) {
    Sorter<T> sorter(n);
    for (int64_t r = begin; r < end; r++) sorter.sort(values + r * n, order + r * n, n);
  });
}

}  // namespace

// The indices that sort each row from the largest to the smallest, equal values in their order, nan first.
KHOT_API int khot_order(int dtype, const void* values, int64_t* order, int64_t rows, int64_t n, int threads) {
  if (!fits(rows, n)) return kBadShape;
  if (!rows || !n) return kDone;
  return by_type(dtype, [&](auto t) { return order_rows(static_cast<const decltype(t)*>(values), order, rows, n, threads); });
}
