// Soft ranks and soft sorting of every row: one sort, one isotonic regression, and back.
#include <limits>

#include "share.h"

#include "rank_laws.h"
#include "sort.h"

namespace {

// What a thread keeps: one row, multiplied by `sign`, in descending order.
template <class T> struct Ordered {
  explicit Ordered(int64_t n) : sorter(n), values(size_t(n)), x(size_t(n)), order(size_t(n)) { blocks.reserve(size_t(n)); }
  Sorter<T> sorter;
  std::vector<T> values;
  std::vector<double> x, grad, out;
  std::vector<int32_t> order;
  std::vector<Block> blocks;

  void sort(const T* row, T sign, int64_t n) {
    for (int64_t i = 0; i < n; i++) values[i] = sign * row[i];
    sorter.sort(values.data(), order.data(), n);
    for (int64_t i = 0; i < n; i++) x[i] = values[order[i]];
  }

  // From what the forward pass wrote down: the order, with ~i in place of i where a block begins.
  void recall(const T* row, T sign, const int32_t* items, int64_t n) {
    blocks.clear();
    for (int64_t i = 0; i < n; i++) {
      if (items[i] < 0) blocks.push_back({i, 0, 0, 0});
      blocks.back().count++;
      order[i] = items[i] < 0 ? ~items[i] : items[i];
      x[i] = sign * row[order[i]];
    }
    grad.resize(size_t(n)), out.resize(size_t(n));
  }
};

struct Job {
  const double* tau;
  int64_t tau_stride;
  double sign, factor;  // of the scores before, of what comes out
  int64_t centre;       // ranks are told relative to the rank of the item at this place, and infinite scores stay; 0: as they are
  int64_t rows, n;
  int threads;
};

template <class Law, class T, class O>
void rank_row(Ordered<T>& row, const T* scores, double tau, const Job& job, O* out, int32_t* items) {
  const int64_t n = job.n;
  row.sort(scores, T(job.sign), n);
  for (int64_t i = 0; i < n; i++) items[i] = row.order[i];
  if (row.x[0] != row.x[0]) {  // nan comes first
    items[0] = ~items[0];
    return std::fill(out, out + n, std::numeric_limits<O>::quiet_NaN());
  }
  Law law;
  law.x = row.x.data(), law.rate = 1 / tau, law.n = n;
  pool(law, n, row.blocks);
  double centre = 0;
  for (const Block& b : row.blocks) {
    items[b.first] = ~items[b.first];
    if (b.first < job.centre && job.centre <= b.first + b.count) centre = law.value(b, job.centre - 1);
  }
  for (const Block& b : row.blocks)
    for (int64_t i = b.first; i < b.first + b.count; i++)
      out[Law::ranks ? row.order[i] : i] = O(job.factor * (law.value(b, i) - centre));
  if (!job.centre) return;
  for (int64_t i = 0; i < n; i++)
    if (std::isinf(scores[i])) out[i] = O(scores[i]);
}

template <class Law, class T, class O>
double rank_row_backward(Ordered<T>& row, const T* scores, double tau, const Job& job, const int32_t* items, const O* grad, T* grad_scores) {
  const int64_t n = job.n;
  row.recall(scores, T(job.sign), items, n);
  if (row.x[0] != row.x[0]) {
    std::fill(grad_scores, grad_scores + n, std::numeric_limits<T>::quiet_NaN());
    return std::numeric_limits<double>::quiet_NaN();
  }
  Law law;
  law.x = row.x.data(), law.rate = 1 / tau, law.n = n;
  for (int64_t i = 0; i < n; i++) row.grad[i] = job.factor * grad[Law::ranks ? row.order[i] : i];
  double in_tau = 0, scale = Law::ranks ? job.sign / tau : job.sign;
  for (const Block& b : row.blocks) {
    law.pull(b, row.grad.data(), row.out.data());
    in_tau += law.in_tau(b, row.grad.data(), row.out.data());
  }
  for (int64_t i = 0; i < n; i++) grad_scores[row.order[i]] = Law::ranks && std::isinf(row.x[i]) ? T(0) : T(scale * row.out[i]);
  return in_tau / tau;
}

// fn(Law()) for the law with this number.
template <class Fn> bool by_law(int law, const Fn& fn) {
  return law == 0 ? fn(RankL2()) : law == 1 ? fn(RankKl()) : law == 2 ? fn(SortL2()) : fn(SortKl());
}

template <class Law, class T, class O> bool rank_rows(const T* scores, O* out, int32_t* items, const Job& job) {
  return share_work(job.threads, job.rows, job.n, [=](int64_t begin, int64_t end) {
    Ordered<T> row(job.n);
    for (int64_t r = begin; r < end; r++)
      rank_row<Law>(row, scores + r * job.n, job.tau[r * job.tau_stride], job, out + r * job.n, items + r * job.n);
  });
}

template <class Law, class T, class O>
bool rank_rows_backward(const T* scores, const int32_t* items, const O* grad, T* grad_scores, double* grad_tau, const Job& job) {
  return share_work(job.threads, job.rows, job.n, [=](int64_t begin, int64_t end) {
    Ordered<T> row(job.n);
    for (int64_t r = begin; r < end; r++) {
      int64_t at = r * job.n;
      double in_tau = rank_row_backward<Law>(row, scores + at, job.tau[r * job.tau_stride], job, items + at, grad + at, grad_scores + at);
      if (grad_tau) grad_tau[r] = in_tau;
    }
  });
}

}  // namespace

// Laws: 0 ranks, 1 ranks by relative entropy, 2 and 3 sorted values. `wide`: what comes out is float64. `items` receives the order of
// each row, with ~i where a block begins. A null pointer for tau means the value beside it, for all rows.
KHOT_API int khot_ranks_forward(int dtype, int law, int wide, const void* scores, const double* tau, double tau_value, double sign,
                                double factor, int64_t centre, void* out, int32_t* items, int64_t rows, int64_t n, int threads) {
  if (!fits(rows, n) || law < 0 || law > 3 || centre < 0 || centre > n) return kBadShape;
  if (!rows || !n) return kDone;
  Job job{tau ? tau : &tau_value, tau ? 1 : 0, sign, factor, centre, rows, n, threads};
  return by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return by_law(law, [&](auto l) {
      using Law = decltype(l);
      const T* x = static_cast<const T*>(scores);
      return wide ? rank_rows<Law>(x, static_cast<double*>(out), items, job) : rank_rows<Law>(x, static_cast<T*>(out), items, job);
    });
  });
}

// The gradient in tau may be null.
KHOT_API int khot_ranks_backward(int dtype, int law, int wide, const void* scores, const double* tau, double tau_value, double sign,
                                 double factor, const int32_t* items, const void* grad, void* grad_scores, double* grad_tau, int64_t rows,
                                 int64_t n, int threads) {
  if (!fits(rows, n) || law < 0 || law > 3) return kBadShape;
  if (!rows || !n) return kDone;
  Job job{tau ? tau : &tau_value, tau ? 1 : 0, sign, factor, 0, rows, n, threads};
  return by_type(dtype, [&](auto t) {
    using T = decltype(t);
    return by_law(law, [&](auto l) {
      using Law = decltype(l);
      const T* x = static_cast<const T*>(scores);
      T* gx = static_cast<T*>(grad_scores);
      return wide ? rank_rows_backward<Law>(x, items, static_cast<const double*>(grad), gx, grad_tau, job)
                  : rank_rows_backward<Law>(x, items, static_cast<const T*>(grad), gx, grad_tau, job);
    });
  });
}
