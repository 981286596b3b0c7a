// Many short rows, one in each lane of a vector.
//
// With few scores to a row, what is done once per row weighs as much as what is done per score. Here a block of rows
// is transposed, so that sums need no adding across lanes and the steps of all rows are taken at once. Rows that are not
// ordinary (infinite scores, no quick convergence) are left to the careful solver.
#pragma once
#include "candidates.h"
#include "columns.h"
#include "solver.h"

namespace {

// Tuned on the machine named in solver.h, with (4096, 64) and (64, 1024) scores of `python -m bench speed`.
constexpr int64_t kShortMost = 512;
constexpr double kWide = 16;  // variance / tau^2 from which counting is the better start: here it is cheap

template <class F> class ShortRows {
 public:
  static constexpr int kRows = kWidth<float>;

  explicit ShortRows(int64_t length) : n(length), columns((length + kUnroll - 1) / kUnroll * kUnroll), live(columns) {}

  // The k and tau of the rows that come next; each is read at a multiple of its stride.
  void set(const double* k_, int64_t k_stride, const double* tau_, int64_t tau_stride, int rows, Memo& memo) {
    usable = true, curve = memo.curve, complement = k_[0] > 0.5 * double(n);
    for (int r = 0; r < kRows; r++) {
      int from = least(r, rows - 1);
      k[r] = k_[from * k_stride], tau[r] = tau_[from * tau_stride], rest[r] = double(n) - k[r];
      inv_tau[r] = r && tau[r] == tau[r - 1] ? inv_tau[r - 1] : 1 / tau[r];
      usable &= k[r] > 0 && rest[r] > 0 && tau[r] > 0 && inv_tau[r] < kInf<double> && complement == (k[r] > 0.5 * double(n));
      if (!usable) return;
      inv_k[r] = complement ? -1 / rest[r] : 1 / k[r];
      memo.template set<F>(k[r], rest[r]);
      quantile[r] = memo.quantile, normal[r] = memo.normal;
    }
  }

  // Up to kRows rows to a block, and two blocks in turns: the steps of one are found beside those of the other. done: a bit for each row.
  static void solve(ShortRows* blocks, int count, const Row<float>* x, const Row<float>* y, const int* rows, unsigned* done) {
    bool open = false;
    for (int b = 0; b < count; b++) open |= blocks[b].begin(x + b * kRows, rows[b]);
    for (int round = 0; open; round++) {
      for (int b = 0; b < count; b++) blocks[b].pass(round);
      open = false;
      for (int b = 0; b < count; b++) open |= blocks[b].advance(round);
    }
    for (int b = 0; b < count; b++) done[b] = blocks[b].good ? blocks[b].good & blocks[b].write(y + b * kRows, rows[b]) : 0;
  }

  double threshold(int r) const { return double(high[r]) - (low[r] + pending[r] - F::kZero) * tau[r]; }

 private:
  using P = Pack<float, kUnroll>;
  using Lanes = Pack<double, 2>;
  static_assert(Lanes::size == kRows, "a lane of doubles for each row");
  static constexpr bool kNarrowed = F::kFooted;  // scores below the foot do not count: most are left out after the first step
  const int64_t n, columns;  // columns: n and a few that count as excluded
  int64_t live;              // those that are passed over
  const Row<float>* source = nullptr;
  int source_rows = 0;
  bool usable = false, complement = false, open = false;
  unsigned finite = 0, good = 0;  // rows of finite scores; and those that are solved
  const KhotCurve* curve = nullptr;
  VecF sum, square;
  alignas(64) float data[kShortMost * kRows];  // scores by columns; then their codes
  alignas(64) double k[kRows], rest[kRows], tau[kRows], inv_tau[kRows], quantile[kRows], normal[kRows], low[kRows], missing[kRows];
  alignas(64) double inv_k[kRows];  // of the smaller of k and n - k, with a sign
  alignas(64) float high[kRows] = {};
  Lanes v[6], reach, least_low, most_low;  // reach: a smaller step is as good as exact; between the other two is the root
  alignas(64) double pending[kRows];  // kRefined: the last step, taken when y is written
  alignas(64) float kept[F::kRefined ? kShortMost * kRows : kRows];  // and, before it, y,
  alignas(64) float slope[F::kRefined ? kShortMost * kRows : kRows];  // its slope

  static Lanes lanes(const double* a) { return load_pack<Lanes>(a); }
  static Lanes widen(VecF a) {
    Lanes d;
    d.v[0] = widen_low(a), d.v[1] = widen_high(a);
    return d;
  }
  static VecF narrow(Lanes a) { return narrow_both(a.v[0], a.v[1]); }
  template <class M> static unsigned bits_of(M mask) { return sign_bits(mask.v[0]) | sign_bits(mask.v[1]) << kRows / 2; }

  void read(const Row<float>* x, int rows) {
    float buffer[kRows][kGroup<float>];
    const float* from[kRows];
    VecF sums[2] = {}, squares[2] = {}, reference{};
    auto look = [&](VecF value, int at) KHOT_INLINE_LAMBDA {
      VecF d = value - reference;
      sums[at] += d, squares[at] = fma(d, d, squares[at]);
    };
    for (int64_t i = 0; i < n; i += kGroup<float>) {
      for (int r = 0; r < kRows; r++) from[r] = r < rows ? x[r].read(i, n, buffer[r], 0.f) : from[r - 1];
      for (int64_t at = i; at < least(n, i + kGroup<float>); at += kRows) {
        VecF block[kRows];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) block[r] = load(from[r] + (at - i));
        transpose(block);
        if (at == 0) reference = block[0];
#pragma GCC unroll 16
        for (int c = 0; c < kRows; c++) store(data + (at + c) * kRows, block[c]);
        if (at + kRows <= n) {
#pragma GCC unroll 16
          for (int c = 0; c < kRows; c++) look(block[c], c % 2);
        } else {
          for (int64_t c = at; c < n; c++) look(load(data + c * kRows), 0);
        }
      }
    }
    sum = sums[0] + sums[1], square = squares[0] + squares[1];
    store(high, reference);
    for (int64_t c = n; c < columns; c++) store(data + c * kRows, splat(-kInf<float>));
  }

  // As if the scores were normal, or by counting where they are spread too wide; like the careful solver.
  unsigned start() {
    const Lanes share = 1 / double(n), mean = widen(sum) * share, mean_square = widen(square) * share;
    auto [at, variance, spread] =
        start_of<F>(widen(load(high)), mean, mean_square, lanes(tau), lanes(inv_tau), lanes(quantile), lanes(normal));
    // An infinity or a nan, or numbers whose squares overflow, show in the spread.
    unsigned wide = bits_of(~(variance < kWide)), finite = bits_of(spread - spread == Lanes(0.0));
    store(high, narrow(at));
    store_pack(low, Lanes(0.0)), store_pack(pending, Lanes(0.0));
    if (wide & finite) locate(wide);
    return finite;
  }

  // For the rows of `which`, a level with k scores above it.
  __attribute__((noinline)) void locate(unsigned which) {
    IntF chosen{};
    for (int r = 0; r < kRows; r++) chosen[r] = -int(which >> r & 1);
    const VecF level = Columns{data, n}.level_with(narrow(lanes(k)), narrow(0.5 * lanes(tau)), chosen);
    store(high, chosen ? level : load(high));
    for (int r = 0; r < kRows; r++)
      if (chosen[r]) low[r] = F::kCentre;
  }

  Shift<VecF> shift() const {
    Lanes a = lanes(low) * F::kUnit, factor = F::kRefined ? lanes(pending) : F::kCached ? exp2(a) : a;
    return {load(high), narrow(lanes(inv_tau) * F::kUnit), narrow(a), narrow(factor), curve};
  }

  template <bool kComplement, bool kFresh> void evaluate() {
    const Shift<VecF> s = shift();
    Lanes total = 0.0;
    Moments<F, float, false> sums;
    // Two short loops: in one long one the processor cannot look far enough ahead to overlap the exponentials.
    if constexpr (kFresh && F::kCached)
      for (int64_t c = 0; c < live; c += kUnroll) store_pack(data + c * kRows, F::encode(load_pack<P>(data + c * kRows), s));
    for (int64_t c = 0; c < live; c += kUnroll) {
      P code = load_pack<P>(data + c * kRows);
      auto m = F::template measure<kComplement>(code, s);
      if constexpr (F::kRefined) store_pack(kept + c * kRows, m.kept), store_pack(slope + c * kRows, m.slope);
      sums.add(m.slope, m.q);
      total = total + widen(fold(m.y));
    }
    Lanes off = kComplement ? total - double(columns - n) - lanes(rest) : lanes(k) - total;
    store_pack(missing, off);
    v[0] = widen(sums.v0), v[1] = widen(sums.v1), v[2] = widen(sums.v2);
    v[3] = widen(sums.v3), v[4] = widen(sums.v4), v[5] = widen(sums.v5);
    if constexpr (F::kRefined) F::in_u(v);
    reach = step_limit<F, float>();
    if constexpr (F::kKinked) reach = largest(reach, free_way(widen(sums.top)));
  }

  // False if there is nothing to solve here.
  bool begin(const Row<float>* x, int rows) {
    good = 0, open = usable;
    if (!usable) return false;
    read(x, rows);
    source = x, source_rows = rows, live = columns;
    finite = start(), open = finite != 0;
    least_low = -kInf<double>, most_low = kInf<double>;
    return open;
  }
  void pass(int round) {
    if (!open) return;
    if (complement) round ? evaluate<true, false>() : evaluate<true, true>();
    else round ? evaluate<false, false>() : evaluate<false, true>();
  }

  // Takes a step; false when there are no more, because all are small or there were too many.
  bool advance(int round) {
    if (!open) return false;
    Lanes d = F::step(lanes(missing), lanes(k), lanes(rest), v);
    [[maybe_unused]] const Lanes straight = d;
    if constexpr (F::kMoments == 1) d = select(absolute(d) > 0.03, tail_step(d), d);
    auto near = (absolute(d) <= reach) & (absolute(lanes(missing)) <= kTrusted * v[0]);
    auto settled = absolute(lanes(missing)) <= double(kEps<float>) * smallest(Lanes(1.0), smallest(lanes(k), lanes(rest)));
    const unsigned done = bits_of(near | settled);
    // A row that is settled stays. A step that goes far, or leaves the bracket, is cut short.
    Lanes move = select((d == d) & ~(settled & ~near), atleast(-8.0, atmost(8.0, d)), Lanes(0.0)), at = lanes(low), next = at + move;
    if (done == (1u << kRows) - 1 || round == 8) {
      store_pack(F::kRefined ? pending : low, F::kRefined ? move : next);
      good = done & finite, open = false;
      return false;
    }
    auto up = lanes(missing) > 0.0;
    least_low = select(up, largest(least_low, at), least_low), most_low = select(up, most_low, smallest(most_low, at));
    if constexpr (kNarrowed) {
      if (round == 0 && !complement) leave_out(straight);
    }
    store_pack(low, select(((next > least_low) & (next < most_low)) | settled, next, 0.5 * (least_low + most_low)));
    return true;
  }

  // Where many scores are cut off the sum S grows like the tail of a distribution: its logarithm is straighter than S itself, see far_step.
  // With r = missing / k, log(k / S) is r (1 - r / 2 - r^2 / 6) / (1 - r), nearly.
  Lanes tail_step(Lanes straight) const {
    const Lanes r = lanes(missing) * lanes(inv_k);
    return select(absolute(r) < 1.0, straight * (1.0 - r * (0.5 + (1.0 / 6) * r)), straight);
  }

  // Towards lower scores the sum grows ever faster, nearly always: a straight step goes too far. Where it did not, the sum of what is
  // written will tell.
  void leave_out(Lanes straight) {
    constexpr double margin = 0.05;
    alignas(64) double floor[kRows];
    store_pack(floor, widen(load(high)) - (lanes(low) + select(straight > 0.0, straight, Lanes(0.0)) + margin) * lanes(tau));
    if (const int64_t found = take_candidates(source, source_rows, n, floor, data, columns / 2)) live = found;
  }

  KHOT_INLINE P value(int64_t at, const Shift<VecF>& s) const {
    if constexpr (F::kRefined) return F::refine(load_pack<P>(data + at), load_pack<P>(kept + at), load_pack<P>(slope + at), s);
    else return F::value(load_pack<P>(data + at), s);
  }

  unsigned write(const Row<float>* y, int rows) {
    const Shift<VecF> s = shift();
    if constexpr (kNarrowed) {
      if (live < columns) {
        alignas(64) double sums[kRows] = {};
        write_values<F>(source, y, rows, n, s, sums);
        return are_right(lanes(sums));
      }
    }
    float buffer[kRows][kGroup<float>];
    float* to[kRows];
    Lanes total = 0.0;
    for (int64_t i = 0; i < n; i += kGroup<float>) {
      for (int r = 0; r < rows; r++) to[r] = y[r].target(i, n, buffer[r]);
      for (int64_t at = i; at < least(n, i + kGroup<float>); at += kRows) {
        VecF block[kRows];
#pragma GCC unroll 4
        for (int c = 0; c < kRows; c += kUnroll) {
          P v = at + c < columns ? value((at + c) * kRows, s) : P(0.f);
          KHOT_EACH(kUnroll, block[c + j] = v.v[j]);
          total = total + widen(fold(v));
        }
        transpose(block);
        if (rows == kRows) {
#pragma GCC unroll 16
          for (int r = 0; r < kRows; r++) store(to[r] + (at - i), block[r]);
        } else {
          for (int r = 0; r < rows; r++) store(to[r] + (at - i), block[r]);
        }
      }
      for (int r = 0; r < rows; r++) y[r].written(i, n, buffer[r]);
    }
    return are_right(total);
  }
  unsigned are_right(Lanes total) const { return bits_of(absolute(lanes(k) - total) <= sum_limit<F>(kEps<float>, lanes(k), v[0])); }
};

}  // namespace
