// Successive halving of every row, forward and backward; rows are shared among the threads.
#include "share.h"

#include "table.h"

#include "bracket.h"

namespace {

template <class T>
bool play_rows(const T* scores, const double* tau, int64_t tau_stride, double boost, int is_power, int64_t* leaves, T* weight, int64_t rows,
               const Shape& shape, int threads) {
  int64_t width = shape.leaves();
  return share_work(threads, rows, shape.n, [=](int64_t begin, int64_t end) {
    Table<T> table(shape);
    for (int64_t r = begin; r < end; r++)
      table.play(scores + r * shape.n, rules_of<T>(is_power, boost, tau[r * tau_stride]), leaves + r * width, weight + r * width);
  });
}

template <class T>
bool play_rows_backward(const T* scores, const double* tau, int64_t tau_stride, double boost, int is_power, const int64_t* leaves,
                        const T* grad, T* grad_scores, double* grad_tau, int64_t rows, const Shape& shape, int threads) {
  return share_work(threads, rows, shape.n, [=](int64_t begin, int64_t end) {
    int64_t width = int64_t(1) << shape.rounds;
    Bracket<T> bracket(width);
    for (int64_t r = begin; r < end; r++) {
      Rules<T> rules = rules_of<T>(is_power, boost, tau[r * tau_stride]);
      double sum = 0;
      T* out = grad_scores + r * shape.n;
      std::fill(out, out + shape.n, T(0));
      for (int64_t p = r * shape.k; p < (r + 1) * shape.k; p++)
        sum += bracket.backward(scores + r * shape.n, rules, leaves + p * width, grad + p * width, out);
      if (grad_tau) grad_tau[r] = sum;
    }
  });
}

bool fits(int64_t rows, const Shape& s) {
  return fits(rows, s.n) && s.k >= 0 && s.k <= s.n && s.rounds >= 0 && s.rounds < 31 && s.leaves() >= s.n && s.byes() < s.n;
}

}  // namespace

// For each of the k places its 2^rounds items, neighbours meeting first, and their weights; 0 < k <= n <= k 2^rounds < 2 n.
// A null pointer for tau means the value beside it, for all rows.
KHOT_API int khot_tournament_forward(int dtype, const void* scores, const double* tau, double tau_value, double boost, int is_power,
                                     int64_t* leaves, void* weight, int64_t rows, int64_t n, int64_t k, int rounds, int threads) {
  Shape shape{n, k, rounds};
  if (!rows || !k) return kDone;
  if (!fits(rows, shape)) return kBadShape;
  return by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return play_rows(static_cast<const T*>(scores), tau ? tau : &tau_value, tau ? 1 : 0, boost, is_power, leaves, static_cast<T*>(weight), rows,
                     shape, threads);
  });
}

KHOT_API int khot_tournament_backward(int dtype, const void* scores, const double* tau, double tau_value, double boost, int is_power,
                                      const int64_t* leaves, const void* grad, void* grad_scores, double* grad_tau, int64_t rows, int64_t n,
                                      int64_t k, int rounds, int threads) {
  Shape shape{n, k, rounds};
  if (!rows || !k) return kDone;
  if (!fits(rows, shape)) return kBadShape;
  return by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return play_rows_backward(static_cast<const T*>(scores), tau ? tau : &tau_value, tau ? 1 : 0, boost, is_power, leaves,
                              static_cast<const T*>(grad), static_cast<T*>(grad_scores), grad_tau, rows, shape, threads);
  });
}
