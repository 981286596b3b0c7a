// The threshold of each row: up to eight rows at a time, or one long row split into blocks.
//
// A row starts from its mean and variance (short), or from the solution of a sample (long), or, where the scores are
// spread far wider than tau, from a search by counting. Every evaluation gives sum F and its moments; the family's
// step usually lands in one or two. The bracket of the root is kept throughout and bisected when a step leaves it.
#pragma once
#include <cstdlib>

#include "passes.h"
#include "team.h"

namespace {

constexpr int kLanes = 8;                 // rows solved side by side
constexpr int64_t kSampledFrom = 4096;    // longer rows start from a sample
constexpr int64_t kSampleMost = 16384;
constexpr int64_t kThinFrom = 16384;      // see Measure
constexpr double kSharp = 60;             // variance / tau^2 from which a row is searched by counting
constexpr int kBisectFrom = 24, kMaxRounds = 400;

// Positions of numbers on the line of representable ones, for a bisection that does not care about scale.
inline int64_t rank_of(float x) {
  int32_t i;
  std::memcpy(&i, &x, sizeof i);
  return i < 0 ? int64_t(INT32_MIN) - i : i;
}
inline int64_t rank_of(double x) {
  int64_t i;
  std::memcpy(&i, &x, sizeof i);
  return i < 0 ? INT64_MIN - i : i;
}
inline void of_rank(int64_t r, float& x) {
  int32_t i = int32_t(r < 0 ? int64_t(INT32_MIN) - r : r);
  std::memcpy(&x, &i, sizeof x);
}
inline void of_rank(int64_t r, double& x) {
  int64_t i = r < 0 ? INT64_MIN - r : r;
  std::memcpy(&x, &i, sizeof x);
}

// The quantiles of the last k and n - k asked for: most often every row has the same.
struct Memo {
  double above = 0, below = 0, quantile = 0, normal = 0;
  template <class F> void set(double above_, double below_) {
    if (above_ == above && below_ == below) return;
    above = above_, below = below_;
    double total = above + below;
    quantile = F::quantile(above / total, below / total), normal = rough_normal_quantile(above / total, below / total);
  }
};

// A step of this size is as good as exact.
template <class F, class C> double step_limit() {
  static const double limit = F::kReach * std::pow(double(kEps<C>), 1.0 / F::kOrder);
  return limit;
}

template <class F, class C> class Solver {
 public:
  Solver(int64_t length, int team, Memo& memo_, bool loose_ = false) : n(length), threads(team), loose(loose_), memo(memo_) {}

  void add_row(Row<C> source, Row<C> target, double k_, double tau_) {
    x[rows] = source, y[rows] = target, k[rows] = k_, tau[rows] = tau_, rows++;
  }

  void solve() {
    for (int r = 0; r < rows; r++) done[r] = !prepare(r);
    if (n <= kSampledFrom) start_from_moments();
    iterate();
    if (F::kCached) set_factors();
    for (int r = 0; r < rows; r++)
      if (!closed[r]) finish(r);
  }

  // t = high - low tau, and F(0) = 1/2 there; 0 for the rows that have no threshold.
  double threshold(int r) const { return closed[r] ? 0 : double(high[r]) - (low[r] - F::kCentre) * tau[r]; }

  bool is_closed(int r) const { return closed[r]; }
  double slope_sum(int r) const { return v[0][r]; }

 private:
  using Lanes = Pack<double, most(1, least(4, kLanes / kWidth<double>))>;
  const int64_t n;
  const int threads;
  const bool loose;  // an answer to a percent will do
  Memo& memo;
  int rows = 0;
  Row<C> x[kLanes], y[kLanes];
  C high[kLanes];
  bool done[kLanes], closed[kLanes] = {}, searched[kLanes] = {}, cached[kLanes] = {};
  double hint_low[kLanes], hint_high[kLanes];
  alignas(64) double k[kLanes] = {}, tau[kLanes] = {}, rest[kLanes] = {}, inv_tau[kLanes] = {}, low[kLanes] = {}, pending[kLanes] = {};
  alignas(64) double bracket_low[kLanes], bracket_high[kLanes], quantile[kLanes] = {}, normal[kLanes] = {};
  alignas(64) double missing[kLanes] = {}, v[6][kLanes] = {};
  alignas(64) double step[kLanes], factor[kLanes];
  double probe[kLanes] = {}, reach[kLanes];  // reach: a smaller step is as good as exact

  // ---- passes over a whole row ----
  template <class R, class Fn> R reduce(Fn fn) const { return reduce_blocks<R>(threads, n, fn); }

  // The output holds what is kept until it is written, unless it is too narrow.
  C* cache(int r) const { return (F::kCached || F::kRefined) && y[r].exact() ? y[r].values() : nullptr; }

  Shift<C> shift(int r) const {
    return {high[r], C(F::kUnit * inv_tau[r]), C(F::kUnit * low[r]), C(F::kRefined ? pending[r] : factor[r])};
  }

  template <bool kComplement, bool kFromCache> Sums evaluate_from(int r) const {
    const Shift<C> s = shift(r);
    const Row<C> row = x[r];
    C* const codes = cache(r);
    return reduce<Sums>([=](int64_t begin, int64_t size) {
      C* const part = codes ? codes + begin : nullptr;
      if constexpr (F::kMoments == 4 && F::kCached && sizeof(C) == 4) {
        if (n >= kThinFrom) return measure<F, C, kComplement, kFromCache, true>(row.from(begin), part, size, s);
      }
      return measure<F, C, kComplement, kFromCache, false>(row.from(begin), part, size, s);
    });
  }
  template <bool kComplement> Sums evaluate_row(int r) {
    if constexpr (F::kCached) {
      if (cached[r]) return evaluate_from<kComplement, true>(r);
    }
    cached[r] = cache(r) != nullptr;
    return evaluate_from<kComplement, false>(r);
  }
  void evaluate(int r) {
    bool fresh = !cached[r] || F::kRefined, complement = k[r] > 0.5 * double(n);
    Sums s = complement ? evaluate_row<true>(r) : evaluate_row<false>(r);
    reach[r] = step_limit<F, C>();
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
  // u is counted from `at`, up to the rounding of high, which goes into low.
  void centre(int r, double at) {
    high[r] = C(at);
    low[r] = bounded((double(high[r]) - at) * inv_tau[r]), pending[r] = 0;
    cached[r] = false;
  }
  // Between a number and the next there are no scores: where these are many tau apart, further is no different.
  static double bounded(double u) { return most(-40.0, least(40.0, u)); }

  // The same threshold seen from a nearer high; the bracket moves along.
  void recentre(int r) {
    C from = high[r];
    double at = double(from) - low[r] * tau[r];
    high[r] = C(at);
    double moved = (double(high[r]) - double(from)) * inv_tau[r];
    low[r] = bounded(low[r] + moved);
    bracket_low[r] += moved, bracket_high[r] += moved;
    cached[r] = false;
  }

  // False when nothing is left to solve.
  bool prepare(int r) {
    inv_tau[r] = r > 0 && tau[r] == tau[r - 1] ? inv_tau[r - 1] : 1 / tau[r];
    rest[r] = double(n) - k[r];
    low[r] = pending[r] = 0, bracket_low[r] = -kInf<double>, bracket_high[r] = kInf<double>;
    hint_low[r] = -kInf<double>, hint_high[r] = kInf<double>;
    if (!(k[r] > 0 && rest[r] > 0 && tau[r] > 0 && inv_tau[r] < kInf<double>)) return search(r);
    set_quantiles(r, k[r], rest[r]);
    return n <= kSampledFrom || start_from_sample(r);
  }

  void set_quantiles(int r, double above, double below) {
    memo.template set<F>(above, below);
    quantile[r] = memo.quantile, normal[r] = memo.normal;
  }

  // F^-1(k/n) - (max - high)/tau <= low <= F^-1(k/n) - (min - high)/tau, for every increasing F.
  void set_bracket(int r, double least_score, double most_score) {
    double slack = 1e-3 * (1 + std::fabs(quantile[r]));
    bracket_low[r] = (double(high[r]) - most_score) * inv_tau[r] + quantile[r] - slack;
    bracket_high[r] = (double(high[r]) - least_score) * inv_tau[r] + quantile[r] + slack;
  }

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
      if (missing[r] == 0 && v[3][r] < kSharp) centre(r, step[r]);
      else done[r] = !search(r);
    }
  }

  // Vectors evenly spread over the row, solved as a row of its own. Where the sample leaves the threshold uncertain
  // by more than a fraction of tau, it still tells between which levels to count.
  bool start_from_sample(int r) {
    constexpr int64_t w = 8;
    // A dear evaluation is worth a larger sample, which makes a second one rare: a part of it is solved, all of it tells
    // mean and variance.
    constexpr int64_t parts = F::kRefined ? 4 : 1;
    int64_t groups = least(kSampleMost, most(int64_t(512), n / 64)) / w, m = groups * w;
    C* sample = static_cast<C*>(std::malloc(size_t(parts + 1) * size_t(m) * sizeof(C)));
    if (!sample) return search(r);
    const Stored exact = sizeof(C) == 4 ? kFloat32 : kFloat64;
    C in[kGroup<C>];
    const double stride = double(n / w) / double(parts * groups);
    for (int64_t p = 0; p < parts; p++)
      for (int64_t g = 0; g < groups; g++) {
        const int64_t at = int64_t(double(g * parts + p) * stride) * w;
        std::memcpy(sample + (p * groups + g) * w, x[r].read(at, at + kGroup<C> <= n ? n : at + w, in, C(0)), w * sizeof(C));
      }
    C* const solved = sample + parts * m;
    double share = double(m) / double(n), part = least(most(k[r] * share, 1e-9 * double(m)), double(m) * (1 - 1e-9));
    Memo own;
    Solver<F, C> small(m, 1, own, true);
    small.add_row({sample, exact}, {solved, exact}, part, tau[r]);
    small.solve();
    bool usable = !small.is_closed(0);
    if (usable) {
      Spread y = spread_of(solved, m);
      double spread = std::sqrt(most(0.0, y.square - y.sum * y.sum / double(m))) / small.slope_sum(0);
      if (spread < 0.3) {
        double at = small.foot(0);
        if (parts > 1) at = if_normal(r, {sample, exact}, parts * m, at, 3 * spread * tau[r]);
        std::free(sample);
        centre(r, at);
        return true;
      }
      double wide = 4 * std::sqrt(part * (1 - part / double(m))) + 2;
      if (part - wide > 0) hint_high[r] = small.nearly(0, part - wide);
      if (part + wide < double(m)) hint_low[r] = small.nearly(0, part + wide);
    }
    std::free(sample);
    return search(r);
  }

  // Where the start from mean and variance agrees with that of the sample, it is the nearer of the two.
  double if_normal(int r, Row<C> sample, int64_t m, double at, double within) const {
    const C reference = sample.first();
    Stats s = moments(sample, m, reference);
    auto all = [](double a) { return Lanes(a); };
    double guess = start_of<F>(all(double(reference)), all(s.mean), all(s.square), all(tau[r]), all(inv_tau[r]), all(quantile[r]), all(normal[r]))
                       .at.v[0][0];
    return std::fabs(guess - at) < within ? guess : at;
  }

 public:
  double foot(int r) const { return double(high[r]) - low[r] * tau[r]; }
  // A level with about that many scores above it, by counting.
  double nearly(int r, double above) const {
    const Row<C> row = x[r];
    Stats s = reduce<Stats>([=](int64_t begin, int64_t size) { return classify(row.from(begin), size); });
    return locate(r, above, s, -kInf<double>, kInf<double>);
  }

 private:
  // The careful start, and the semantics of infinite scores and of k at its ends.
  bool search(int r) {
    const Row<C> row = x[r];
    searched[r] = true;
    Stats s = reduce<Stats>([=](int64_t begin, int64_t size) { return classify(row.from(begin), size); });
    double present = double(n - s.below), certain = double(s.above);
    if (s.nan || !(k[r] == k[r]) || !(tau[r] > 0)) return close(r, kNan<double>, kNan<double>, kNan<double>);
    if (k[r] >= present) return close(r, 0, 1, 1);
    if (k[r] <= certain) return close(r, 0, 0, k[r] <= 0 ? 0 : k[r] / certain);
    if (k[r] < std::numeric_limits<double>::min()) return close(r, 0, 0, 0);  // no weight is that small: exponentials end here
    set_quantiles(r, k[r] - certain, present - k[r]);
    if (!(inv_tau[r] < kInf<double>)) inv_tau[r] = std::numeric_limits<double>::max();
    double at = locate(r, k[r], s, hint_low[r], hint_high[r]);
    centre(r, at);
    low[r] += F::kCentre;
    set_bracket(r, s.low, s.high);
    return true;
  }

  // Writes a row that needs no threshold: the excluded, the finite and the certain scores get these values.
  bool close(int r, double excluded, double finite, double certain) {
    const Row<C> row = x[r];
    const Row<C> out = y[r];
    auto write = [=](int64_t begin, int64_t size) {
      C in[kGroup<C>], group[kGroup<C>];
      for (int64_t i = begin; i < begin + size; i += kGroup<C>) {
        Wide<C> v = load_pack<Wide<C>>(row.read(i, begin + size, in, C(0))), inner = C(finite), outer = C(certain);
        inner = select(v == kInf<C>, outer, inner);
        store_pack(out.target(i, begin + size, group), select(v == -kInf<C>, Wide<C>(C(excluded)), inner));
        out.written(i, begin + size, group);
      }
      return Empty();
    };
    reduce<Empty>(write);
    closed[r] = true, done[r] = true, v[0][r] = 0;
    return false;
  }

  // A level with k scores above it: in the middle of the gap where there is one, else to a fraction of tau. Four
  // levels are counted in a pass; they divide the interval evenly by value and by rank in turn, so that neither a
  // wide range nor a few outliers take many passes.
  double locate(int r, double above, const Stats& s, double from, double to) const {
    const Row<C> row = x[r];
    C lo, hi = C(s.high);
    of_rank(rank_of(C(s.low)) - 1, lo);
    for (int round = 0; round < 64; round++) {
      double width = double(hi) - double(lo);
      if (width <= 0.5 * tau[r]) return double(lo) + 0.5 * width;
      C level[4];
      int inside = 0;
      const uint64_t rank = uint64_t(rank_of(lo)), span = uint64_t(rank_of(hi)) - rank;
      bool hinted = round == 0 && (from > double(lo) || to < double(hi));
      double a = hinted ? most(from, double(lo)) : double(lo), b = hinted ? least(to, double(hi)) : double(hi);
      for (int j = 0; j < 4; j++) {
        C t;
        if (hinted) t = C(a + (b - a) * j / 3);
        else if (round & 1) of_rank(int64_t(rank + span / 5 * uint64_t(j + 1)), t);
        else t = C(a + (b - a) * ((j + 1) / 5.0));
        if (t > lo && t < hi) level[inside++] = t;
      }
      if (!inside && span > 1) {  // fewer than five numbers are left between: take them in turn
        of_rank(int64_t(rank + span / 2), level[inside++]);
      }
      if (!inside) return double(hi);  // neighbours: all that is left is a tie at hi
      for (int j = inside; j < 4; j++) level[j] = level[inside - 1];
      const Levels<C> levels = {{level[0], level[1], level[2], level[3]}};
      Counts c = reduce<Counts>([=](int64_t begin, int64_t size) { return count_above(row.from(begin), size, levels); });
      for (int j = 0; j < 4; j++) {
        double count = double(c.c[j]);
        if (count == above) {
          C t = level[j];
          Gap g = reduce<Gap>([=](int64_t begin, int64_t size) { return gap_at(row.from(begin), size, t); });
          return g.above < kInf<double> ? 0.5 * g.below + 0.5 * g.above : double(t);
        }
        if (count > above) lo = most(lo, level[j]);
        else hi = least(hi, level[j]);
      }
    }
    return double(lo) + 0.5 * (double(hi) - double(lo));
  }

  // ---- iteration ----
  void set_factors() {
    for (int j = 0; j < kLanes; j += Lanes::size) store_pack(factor + j, exp2(load_pack<Lanes>(low + j) * F::kUnit));
  }
  void set_steps() {
    for (int j = 0; j < kLanes; j += Lanes::size) {
      auto at = [&](const double* a) { return load_pack<Lanes>(a + j); };
      Lanes moments[6];
      for (int i = 0; i < F::kMoments; i++) moments[i] = at(v[i]);
      store_pack(step + j, F::step(at(missing), at(k), at(rest), moments));
    }
    if constexpr (F::kMoments == 1) {
      // Far from k the scores that are cut off count: there the sum grows like the tail of a distribution, not straight.
      for (int r = 0; r < rows; r++) {
        if (done[r] || std::fabs(step[r]) <= reach[r] || !(std::fabs(missing[r]) > 0.75 * least(k[r], rest[r]))) continue;
        double sum = k[r] - missing[r], other = rest[r] + missing[r];
        double far = logit_step(missing[r], k[r], rest[r], v[0][r], v[0][r] * v[0][r] * (other - sum) / (sum * other));
        if (std::fabs(far) > reach[r]) step[r] = far;  // else the straight one is exact
      }
    }
  }
  void iterate() {
    for (int r = 0; r < kLanes; r++) {
      if (r >= rows) low[r] = 0, k[r] = rest[r] = 1;
      if (r < rows && !done[r]) continue;
      missing[r] = 0, v[0][r] = 1;
      for (int j = 1; j < F::kMoments; j++) v[j][r] = 0;
    }
    for (int round = 0; round < kMaxRounds; round++) {
      bool active = false;
      if (F::kCached) set_factors();
      for (int r = 0; r < rows; r++) {
        if (done[r]) continue;
        evaluate(r);
        active = true;
      }
      if (!active) return;
      set_steps();
      for (int r = 0; r < rows; r++)
        if (!done[r]) advance(r, round);
    }
  }

  void advance(int r, int round) {
    double d = step[r], size = std::fabs(d);
    if (!searched[r] && (!(probe[r] == 0) || !(size < 8) || round == 6)) {
      done[r] = !search(r);
      return;
    }
    if (size <= (loose ? most(reach[r], 0.02) : reach[r])) {
      settle(r, d);
      done[r] = true;
      return;
    }
    // All scores move the same way, so that none is off by more than the sum is.
    if (std::fabs(missing[r]) <= kEps<C> * least(1.0, least(k[r], rest[r]))) {
      done[r] = true;
      return;
    }
    if (missing[r] > 0) bracket_low[r] = most(bracket_low[r], low[r]);
    else bracket_high[r] = least(bracket_high[r], low[r]);
    double next = low[r] + d;
    bool inside = next > bracket_low[r] && next < bracket_high[r];
    if (!inside || (round >= kBisectFrom && round % 2)) {
      next = 0.5 * (bracket_low[r] + bracket_high[r]);
      if (!(next > bracket_low[r] && next < bracket_high[r])) {  // the bracket is as narrow as numbers allow
        done[r] = true;
        return;
      }
    }
    low[r] = next;
    if (!F::kCached || std::fabs(low[r]) > 16) recentre(r);
  }

  // The last step: y may have been kept where the row stands now, and is then moved when it is written.
  void settle(int r, double d) {
    if (F::kRefined && cached[r]) {
      pending[r] = d;
      return;
    }
    low[r] += d;
    if (!F::kCached) recentre(r);
  }

  // ---- output ----
  // Returns by how much the sum misses k.
  double write(int r) {
    const Shift<C> s = shift(r);
    const Row<C> row = x[r];
    const Row<C> out = y[r];
    C* const kept = cached[r] ? cache(r) : nullptr;
    cached[r] = F::kRefined && kept;  // codes are overwritten
    Total sum = reduce<Total>([=](int64_t begin, int64_t size) {
      if constexpr (F::kCached || F::kRefined) {
        if (kept) return emit<F, C, true>(row.from(begin), kept + begin, out.from(begin), size, s);
      }
      return emit<F, C, false>(row.from(begin), nullptr, out.from(begin), size, s);
    });
    low[r] += pending[r], pending[r] = 0;
    sum.add(-k[r]);
    return -sum.get();
  }
  // Writes the row, and again if its sum misses k by more than rounding explains.
  void finish(int r) {
    for (int attempt = 0; attempt < 5; attempt++) {
      double off = write(r);
      if (loose || std::fabs(off) <= 2 * kEps<C> * most(1.0, k[r])) return;
      double d = off / v[0][r];
      if (std::fabs(d) < 1e-3) {
        settle(r, d);
      } else if (attempt < 2 && std::fabs(d) < kInf<double>) {  // not a matter of rounding: solve again, from a counted start
        for (int j = 0; j < rows; j++) done[j] = true;
        done[r] = !search(r);
        iterate();
        if (closed[r]) return;
      } else {
        return;
      }
      if (F::kCached) set_factors();
    }
  }
};

}  // namespace
