// The threshold of each row: up to eight rows at a time, or one long row split into blocks.
//
// A row starts from its mean and variance (short), or from the solution of a sample (long), or, where the scores are
// spread far wider than tau, from a search by counting. Every evaluation gives sum F and its moments; the family's
// step usually lands in one or two. The result is checked: the row that was written is summed. Where the sum misses k
// by more than rounding explains, the row is solved again with the bracket alone to decide, which cannot miss.
#pragma once
#include "kink.h"
#include "narrow.h"
#include "sample.h"
#include "steps.h"

namespace {

// Tuned on an AMD EPYC of the Zen 3 kind (AVX2), one thread, float32, normal scores of spread 1 to 9: half of either constant was slower
// at every length tried, twice was faster at some and slower at others.
constexpr int64_t kSampledFrom = 4096;  // longer rows start from a sample
constexpr double kSharp = 60;           // variance / tau^2 from which a row is searched by counting
constexpr int kBisectFrom = 24;  // rounds after which every other one bisects
constexpr int kMaxRounds = 400;  // more than bisection needs: 64 halvings of ranks, as many of u, each every other round
constexpr int kAttempts = 6;     // times a row is written until its sum is right

template <class F, class C> class Solver {
 public:
  Solver(int64_t length, int team, Memo& memo_, bool loose_ = false) : n(length), threads(team), loose(loose_), memo(memo_) {}

  void add_row(Row<C> source, Row<C> target, double k_, double tau_) { x[rows] = source, y[rows] = target, k[rows] = k_, tau[rows] = tau_, rows++; }

  // False if a sum misses k by several times what rounding explains.
  bool solve() {
    for (int r = 0; r < rows; r++) done[r] = !prepare(r);
    if (n <= kSampledFrom) start_from_moments();
    iterate();
    unsigned open = 0;
    for (int r = 0; r < rows; r++) open |= unsigned(!closed[r]) << r;
    for (int attempt = 0; open && attempt < kAttempts; attempt++) open = write_rows(open, attempt);
    return !missed(open);
  }

  // t = high - low tau, counted from u = kZero; 0 for the rows that have no threshold.
  double threshold(int r) const { return closed[r] ? 0 : double(high[r]) - (low[r] + mend[r] - F::kZero) * tau[r]; }

  bool is_closed(int r) const { return closed[r]; }
  double slope_sum(int r) const { return v[0][r]; }
  double foot(int r) const { return double(high[r]) - low[r] * tau[r]; }
 private:
  const int64_t n;
  const int threads;
  const bool loose;  // an answer to a percent will do
  Memo& memo;
  int rows = 0;
  Row<C> x[kLanes], y[kLanes];
  C high[kLanes];
  bool done[kLanes], closed[kLanes] = {}, searched[kLanes] = {}, cached[kLanes] = {}, strict[kLanes] = {}, mended[kLanes] = {};
  Bracket<C> bracket[kLanes];
  Hint hint[kLanes];
  alignas(64) double k[kLanes] = {}, tau[kLanes] = {}, rest[kLanes] = {}, inv_tau[kLanes] = {}, low[kLanes] = {}, pending[kLanes] = {};
  alignas(64) double quantile[kLanes] = {}, normal[kLanes] = {};
  alignas(64) double missing[kLanes] = {}, v[6][kLanes] = {};
  alignas(64) double step[kLanes], factor[kLanes];
  double probe[kLanes] = {}, reach[kLanes] = {}, off[kLanes] = {};  // reach: a smaller step is as good as exact; off: k - the written sum
  double mend[kLanes] = {};  // the part of the last step that is taken in the values: it is finer than a position can be

  std::conditional_t<F::kFooted, Narrowed<C>, Empty> few[kLanes];
  Line<C> line(int r) const { return {x[r], n, threads}; }
  bool narrows(int r) const { return n >= kNarrowFrom && k[r] < kNarrowShare * double(n) && y[r].exact(); }
  // ---- passes over a whole row ----
  // The output holds what is kept until it is written, unless it is too narrow.
  C* cache(int r) const { return (F::kCached || F::kRefined) && y[r].exact() ? y[r].values() : nullptr; }

  Shift<C> shift(int r) const {
    return {high[r], C(F::kUnit * inv_tau[r]), C(F::kUnit * low[r]), C(F::kRefined ? pending[r] : factor[r]), memo.curve};
  }

  template <bool kComplement> Sums evaluate_row(int r) {
    if constexpr (F::kCached)
      if (cached[r]) return measure_whole<F, C, kComplement, true>(line(r), cache(r), shift(r));
    if constexpr (F::kFooted && !kComplement)
      if (narrows(r) && few[r].serve(line(r), y[r].values(), foot(r), tau[r])) return few[r].template evaluate<F>(line(r), shift(r));
    cached[r] = cache(r) != nullptr;
    return measure_whole<F, C, kComplement, false>(line(r), cache(r), shift(r));
  }
  void evaluate(int r) {
    bool fresh = !cached[r] || F::kRefined, complement = k[r] > 0.5 * double(n);
    Sums s = complement ? evaluate_row<true>(r) : evaluate_row<false>(r);
    reach[r] = step_limit<F, C>();
    if constexpr (F::kKinked && sizeof(C) == 4) reach[r] = most(reach[r], free_way(Pack<double, 1>(s.top)).v[0][0]);
    if (s.part[0] > 0) {
      // The spread of q over a part that holds m slopes is off by a share of 1/sqrt(m), and enters with the cube of the step.
      double spread = s.complete();
      reach[r] = least(reach[r], 2 * std::cbrt(kEps<C> * std::sqrt(s.part[0]) / most(spread, 1e-30)));
    }
    s.y.add(complement ? k[r] - double(n) : -k[r]);
    missing[r] = complement ? s.y.get() : -s.y.get();
    for (int j = 0; j < F::kMoments; j++) v[j][r] = s.v[j];
    if (fresh) probe[r] = s.probe;
  }

  // ---- starting ----
  Position<C> here(int r) const { return {high[r], low[r]}; }
  void move_to(int r, Position<C> p) { high[r] = p.high, low[r] = p.low, pending[r] = mend[r] = 0, cached[r] = false; }

  // False when nothing is left to solve.
  bool prepare(int r) {
    inv_tau[r] = r > 0 && tau[r] == tau[r - 1] ? inv_tau[r - 1] : 1 / tau[r];
    rest[r] = double(n) - k[r];
    bracket[r].tau = tau[r], bracket[r].inv_tau = inv_tau[r];
    const bool ordinary = tau[r] < 1e-6 * std::numeric_limits<C>::max() && inv_tau[r] < kInf<double>;
    if (!(k[r] > 0 && rest[r] > 0 && tau[r] > 0 && ordinary)) return search(r);
    set_quantiles(r, k[r], rest[r]);
    if (n <= kSampledFrom) return true;
    const SampleStart<C> start = start_from_sample<F>(line(r), k[r], tau[r], quantile[r], normal[r], memo.curve);
    hint[r] = start.hint;
    if (!start.near) return search(r);
    move_to(r, bracket[r].position(start.at));
    return true;
  }

  void set_quantiles(int r, double above, double below) { memo.template set<F>(above, below), quantile[r] = memo.quantile, normal[r] = memo.normal; }

  // As if the scores were normal: the mean and the variance of each row, then the start of all rows at once.
  void look(int r) {
    const C reference = x[r].first();
    Stats s = moments(x[r], n, reference);
    missing[r] = s.probe, v[0][r] = double(reference), v[1][r] = s.mean, v[2][r] = s.square;
  }
  void start_from_moments() {
    for (int r = 0; r < rows; r++)
      if (!done[r] && !searched[r]) look(r);
    for (int j = 0; j < kLanes; j += Lanes::size) {
      auto at = [&](const double* a) { return load_pack<Lanes>(a + j); };
      auto start = start_of<F>(at(v[0]), at(v[1]), at(v[2]), at(tau), at(inv_tau), at(quantile), at(normal));
      store_pack(v[3] + j, start.variance), store_pack(step + j, start.at);
    }
    for (int r = 0; r < rows; r++) {
      if (done[r] || searched[r]) continue;
      if (missing[r] == 0 && v[3][r] < kSharp) move_to(r, bracket[r].position(step[r]));
      else done[r] = !search(r);
    }
  }

  // The careful start, and the meaning of infinite scores, of k at its ends and of an infinite tau.
  bool search(int r) {
    searched[r] = true;
    const Stats s = line(r).stats();
    const double present = double(n - s.below), certain = double(s.above);
    if (s.nan || !(k[r] == k[r]) || !(tau[r] > 0)) return close(r, kNan<double>, kNan<double>, kNan<double>);
    if (k[r] >= present) return close(r, 0, 1, 1);
    if (k[r] <= certain) return close(r, 0, 0, k[r] <= 0 ? 0 : k[r] / certain);
    if (k[r] < double(std::numeric_limits<C>::min())) return close(r, 0, 0, 0);  // no weight is that small: exponentials end here
    if (!(C(inv_tau[r]) > 0)) return close(r, 0, (k[r] - certain) / (present - certain), 1);  // all finite scores are the same
    set_quantiles(r, k[r] - certain, present - k[r]);
    bracket_of(r, s);
    Position<C> start = bracket[r].position(locate(line(r), k[r], tau[r], s, hint[r]));
    start.low += F::kCentre;
    move_to(r, bracket[r].inside(start));
    return true;
  }

  // F((min - t) / tau) <= k / n <= F((max - t) / tau) for every increasing F. The slack is for the rounding of the quantile.
  void bracket_of(int r, const Stats& s) {
    if (!(inv_tau[r] < kInf<double>)) inv_tau[r] = std::numeric_limits<double>::max();
    const double slack = 1e-3 * (1 + std::fabs(quantile[r]));
    const C bottom = C(s.low), top = C(s.high);
    bracket[r] = {tau[r], inv_tau[r], bottom, top, {top, quantile[r] - slack}, {bottom, quantile[r] + slack}};
  }

  // Writes a row that needs no threshold. Always false: nothing is left to solve.
  bool close(int r, double excluded, double finite, double certain) {
    fill(line(r), y[r], excluded, finite, certain);
    return closed[r] = done[r] = true, v[0][r] = 0, false;
  }

  // ---- iteration ----
  void find_steps() {
    set_steps<F>(missing, k, rest, v, step);
    if constexpr (F::kMoments == 1)
      for (int r = 0; r < rows; r++) step[r] = far_step(step[r], reach[r], missing[r], k[r], rest[r], v[0][r]);
  }
  void iterate() {
    for (int r = 0; r < kLanes; r++) {
      if (r >= rows) low[r] = 0, k[r] = rest[r] = v[0][r] = 1;
      if (r >= rows || done[r]) missing[r] = 0;
    }
    for (int round = 0; round < kMaxRounds; round++) {
      bool active = false;
      if (F::kCached) set_factors<F>(low, factor);
      for (int r = 0; r < rows; r++) {
        if (done[r]) continue;
        evaluate(r);
        active = true;
      }
      if (!active) return;
      find_steps();
      for (int r = 0; r < rows; r++)
        if (!done[r]) advance(r, round);
    }
  }

  // After an evaluation: done, or at another position.
  void advance(int r, int round) {
    double d = step[r];
    const double size = std::fabs(d);
    if (!searched[r] && (!(probe[r] == 0) || !(size < 8) || round == 6)) {
      done[r] = !search(r);
      return;
    }
    done[r] = true;
    if (is_near(r, size)) return settle(r, d);
    if constexpr (F::kKinked && sizeof(C) == 4)
      if (may_cross(r, size) && cross_kink(line(r), cache(r), factor[r], missing[r], v[0][r], v[1][r], d)) return settle(r, d);
    if (std::fabs(missing[r]) <= kEps<C> * exactness(r)) return;
    if (strict[r] && size <= kEps<C> * std::fabs(low[r])) return;  // finer than a position; see `mend`
    bracket[r].learn(here(r), missing[r] > 0);
    Position<C> next{high[r], low[r] + d};
    if (!F::kCached || !(std::fabs(next.low) <= 16)) next = bracket[r].nearest(next);
    if (!bracket[r].holds(next) || (round >= kBisectFrom && round % 2)) {
      if (!bracket[r].middle(next)) return;  // the bracket is as narrow as numbers allow
    }
    done[r] = false;
    if (F::kCached && next.high == high[r]) low[r] = next.low;  // the codes still hold
    else move_to(r, next);
  }

  // All scores move the same way, so that none is off by more than the sum is.
  double exactness(int r) const {
    const double sum = least(k[r], rest[r]);
    return !strict[r] ? least(1.0, sum) : F::kMoments == 1 ? least(sum, v[0][r]) : sum;
  }

  // Whether the step is as good as exact. In a row whose sum was found wrong every step is followed by an evaluation.
  bool is_near(int r, double size) const {
    if (strict[r]) return false;
    return size <= (loose ? most(reach[r], 0.02) : reach[r]) && in_series(r);
  }
  bool in_series(int r) const { return std::fabs(missing[r]) <= kTrusted * v[0][r]; }
  bool may_cross(int r, double size) const { return cached[r] && !strict[r] && !loose && size <= kCrossing && in_series(r); }

  // The last step: y may have been kept where the row stands now, and is then moved when it is written.
  void settle(int r, double d) {
    if (F::kRefined && cached[r]) {
      pending[r] = d;
      return;
    }
    low[r] += d;
    if (!F::kCached) move_to(r, bracket[r].nearest(here(r)));
  }
  // ---- output ----
  // Returns by how much the sum misses k.
  double write(int r) {
    C* const kept = cached[r] && mend[r] == 0 ? cache(r) : nullptr;
    cached[r] = F::kRefined && kept;  // codes are overwritten
    if constexpr (F::kFooted) few[r].drop();
    Total sum = mend[r] == 0 ? emit_whole<F>(line(r), kept, y[r], shift(r)) : emit_mended<F>(line(r), y[r], shift(r), C(mend[r]));
    low[r] += pending[r], pending[r] = 0;
    sum.add(-k[r]);
    return -sum.get();
  }

  // Writes the open rows; returns those whose sum misses k by more than rounding explains, ready to be written again.
  unsigned write_rows(unsigned open, int attempt) {
    if (F::kCached) set_factors<F>(low, factor);
    unsigned left = 0;
    for (int r = 0; r < rows; r++) {
      if (!(open >> r & 1)) continue;
      const double before = off[r];
      const bool alike = mended[r] && mend[r] != 0;  // the two sums are of values that were made in the same way
      mended[r] = mend[r] != 0, off[r] = write(r);
      if (loose || std::fabs(off[r]) <= limit(r)) continue;
      left |= 1u << r;
      const double shown = 1 - off[r] / before;  // the part of the last step that it made good tells the true slope
      if (alike && shown > 0.1 && shown < 10) v[0][r] *= shown;
      const double d = off[r] / v[0][r];
      // Rounding is made good in the values, or by one more small step. A curved F turns sharply at its foot: only last digits there.
      const bool smooth = !F::kCurved || least(k[r], rest[r]) < 1e-2 || std::fabs(d) <= 16 * kEps<C> * most(1.0, std::fabs(low[r]));
      const bool small = smooth && d * d <= kEps<C> / 4 && (F::kMoments == 1 || std::fabs(off[r]) <= std::sqrt(kEps<C>) / 2 * least(k[r], rest[r]));
      if (small && (F::kMoments > 1 || strict[r])) mend[r] += d;
      else if (attempt != 1 && std::fabs(d) < 1e-3 && (F::kMoments > 1 || strict[r])) settle(r, d);
      else retry(r, attempt);
    }
    if (left) iterate();
    for (int r = 0; r < rows; r++) left &= ~(unsigned(closed[r]) << r);
    return left;
  }
  bool missed(unsigned open) const {
    bool any = false;
    for (int r = 0; r < rows; r++) any |= (open >> r & 1) && !(std::fabs(off[r]) <= 4 * limit(r));
    return any;
  }
  double limit(int r) const { return row_limit<F, C>(n, k[r], v[0][r]); }

  // Not a matter of rounding: from here on the bracket and the sum decide.
  void retry(int r, int attempt) {
    strict[r] = true, done[r] = false;
    move_to(r, here(r));
    if (attempt > 2) done[r] = !search(r);
  }
};

}  // namespace
