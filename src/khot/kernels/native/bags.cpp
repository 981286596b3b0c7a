// Weighted sums over bags of items, forward and backward.
#include <vector>

#include "share.h"

namespace {

constexpr int64_t kColumns = 32, kAhead = 6;  // columns that stay in registers; rows fetched ahead of their use

// out = sum of weight[s] * x[items[s]] over the columns [c, c + columns).
template <class T> void sum_bag(const T* x, const T* weight, const int64_t* items, int64_t size, int64_t d, int64_t c, int64_t columns, T* out) {
  T sum[kColumns] = {};
  for (int64_t s = 0; s < size; s++) {
    if (s + kAhead < size) {
      const char* next = reinterpret_cast<const char*>(x + items[s + kAhead] * d + c);
      __builtin_prefetch(next), __builtin_prefetch(next + 64);
    }
    if (weight[s] == 0) continue;
    const T* row = x + items[s] * d + c;
    if (columns == kColumns)
      for (int64_t j = 0; j < kColumns; j++) sum[j] += weight[s] * row[j];
    else
      for (int64_t j = 0; j < columns; j++) sum[j] += weight[s] * row[j];
  }
  std::copy(sum, sum + columns, out + c);
}

template <class T> T dot(const T* a, const T* b, int64_t n) {
  T part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; j++) part[j] += a[i + j] * b[i + j];
  T sum = ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
  for (; i < n; i++) sum += a[i] * b[i];
  return sum;
}

struct Bags { int64_t rows, n, d, k, size; };

template <class T> bool sum_bags(const T* x, const T* weight, const int64_t* items, T* out, const Bags& b, int threads) {
  return share_work(threads, b.rows * b.k, b.size * (1 + b.d / 8), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for (int64_t c = 0; c < b.d; c += kColumns)
        sum_bag(x + i / b.k * b.n * b.d, weight + i * b.size, items + i * b.size, b.size, b.d, c, std::min(kColumns, b.d - c), out + i * b.d);
  });
}

// Item by item, so that x and its gradient are passed over in order. No item stands in two bags.
template <class T> struct Whereabouts {
  explicit Whereabouts(size_t count) : bag(count, -1), weight(count), slope(count) {}
  std::vector<int64_t> bag;
  std::vector<T> weight, slope;  // what the item weighs in its bag, and the gradient in that
};

template <class T>
bool sum_bags_backward(const T* x, const T* weight, const int64_t* items, const T* grad, T* grad_x, T* grad_weight, const Bags& b, int threads) {
  Whereabouts<T> of(size_t(b.rows * b.n));
  int64_t slots = b.k * b.size;
  bool ok = share_work(threads, b.rows, slots, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin * slots; s < end * slots; s++) {
      int64_t item = s / slots * b.n + items[s];
      of.bag[item] = s / b.size, of.weight[item] += weight[s];
    }
  });
  ok &= share_work(threads, b.rows * b.n, 1 + b.d / 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T* g = of.bag[i] < 0 ? nullptr : grad + of.bag[i] * b.d;
      if (grad_weight && g) of.slope[i] = dot(x + i * b.d, g, b.d);
      if (grad_x)
        for (int64_t j = 0; j < b.d; j++) grad_x[i * b.d + j] = g ? of.weight[i] * g[j] : T(0);
    }
  });
  if (!grad_weight) return ok;
  return ok & share_work(threads, b.rows, slots, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin * slots; s < end * slots; s++) grad_weight[s] = of.slope[s / slots * b.n + items[s]];
  });
}

bool fits(const Bags& b) { return fits(b.rows, b.n) && b.d >= 0 && b.k >= 0 && b.size >= 0; }

}  // namespace

// out (rows, k, d) = the sums of weight * x[item] over bags of `size` items.
KHOT_API int khot_bags_forward(int dtype, const void* x, const void* weight, const int64_t* items, void* out, int64_t rows, int64_t n,
                               int64_t d, int64_t k, int64_t size, int threads) {
  Bags b{rows, n, d, k, size};
  if (!fits(b)) return kBadShape;
  if (!rows || !k || !d) return kDone;
  return by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return sum_bags(static_cast<const T*>(x), static_cast<const T*>(weight), items, static_cast<T*>(out), b, threads);
  });
}

// Either gradient may be null.
KHOT_API int khot_bags_backward(int dtype, const void* x, const void* weight, const int64_t* items, const void* grad, void* grad_x,
                                void* grad_weight, int64_t rows, int64_t n, int64_t d, int64_t k, int64_t size, int threads) {
  Bags b{rows, n, d, k, size};
  if (!fits(b)) return kBadShape;
  if (!rows || !n || !k || !size) return kDone;
  return by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return sum_bags_backward(static_cast<const T*>(x), static_cast<const T*>(weight), items, static_cast<const T*>(grad), static_cast<T*>(grad_x),
                             static_cast<T*>(grad_weight), b, threads);
  });
}
