// Soft shrinkage to the k values of largest magnitude: for every row the t at which the shares
//   m_i = min(((|x_i| - t)_+ / tau)^m / t, 1)
// sum to k, and from it |y_i| = |x_i| where m_i = 1, |x_i| - t + m_i t where it is between, and 0 below t.
//
// The sum falls with t: Newton's steps inside a bracket, which is halved where they leave it or crawl. Values below the bracket have no
// share, so that after a few rounds few are left to look at.
#include "share.h"

#include <cmath>
#include <vector>

#include "pack.h"

namespace {

constexpr double kNear = 1e-13;   // of k and of t, as in the reference
constexpr int kMostRounds = 256;  // more than twice what halving all bits of a double needs

struct Regulariser {
  double k, tau, power;
};
struct Looked {
  double excess, slope;  // of the shares over k, and how fast that falls with t
};

using Four = Pack<double, 4>;
constexpr int64_t kFour = Four::size;  // behind the values there is room for a pack, filled with 0, which has no share

// rise^(power - 1): by products for a whole power that is known; else by the library.
template <int kPower> KHOT_INLINE Four lower_power(Four rise, double power) {
  if (kPower == 1) return 1.0;
  if (kPower == 2) return rise;
  if (kPower == 3) return rise * rise;
  KHOT_EACH(4, for (int i = 0; i < kWidth<double>; i++) rise.v[j][i] = rise.v[j][i] > 0 ? std::pow(rise.v[j][i], power - 1) : 0);
  return rise;
}

template <int kPower> Looked look(const double* size, int64_t count, double t, const Regulariser& r) {
  const double over_tau = 1 / r.tau, over_t = 1 / t, rate = r.power * over_tau * over_t;
  VecD sum{}, slope{};
  for (int64_t i = 0; i < count; i += kFour) {
    const Four rise = atleast(0.0, load_pack<Four>(size + i) - t) * over_tau, lower = lower_power<kPower>(rise, r.power);
    const Four share = lower * rise * over_t, change = lower * rate + share * over_t;
    sum += fold(atmost(1.0, share));
    slope += fold(select((rise > 0.0) & (share < 1.0), change, Four(0.0)));
  }
  return {sum_lanes(sum) - r.k, sum_lanes(slope)};
}
Looked look(const double* size, int64_t count, double t, const Regulariser& r) {
  if (r.power == 1) return look<1>(size, count, t, r);
  if (r.power == 2) return look<2>(size, count, t, r);
  return r.power == 3 ? look<3>(size, count, t, r) : look<0>(size, count, t, r);
}

// Drops the values that are not above `low`; returns how many are left.
int64_t keep_above(double* size, int64_t count, double low) {
  int64_t left = 0;
  for (int64_t i = 0; i < count; i++) size[left] = size[i], left += size[i] > low;
  std::fill_n(size + left, kFour, 0.0);
  return left;
}

// The threshold of the positive values `size`, whose order is lost.
double threshold_of(double* size, int64_t count, double largest, const Regulariser& r) {
  double high = largest, low = r.k <= 0 ? high : 0, before = std::numeric_limits<double>::infinity(), t = 0.5 * (low + high);
  for (int round = 0; round < kMostRounds && low < t && t < high; round++) {
    const Looked at = look(size, count, t, r);
    const double left = std::fabs(at.excess);
    if (left <= kNear * r.k && left <= kNear * at.slope * t) return t;
    (at.excess >= 0 ? low : high) = t;
    if (at.excess >= 0) count = keep_above(size, count, low);
    const double there = t + at.excess / at.slope;
    t = there > low && there < high && left < 0.5 * before ? there : 0.5 * (low + high);
    before = left;
  }
  return std::max(high, std::numeric_limits<double>::min());
}

template <class T> void shrink(const T* x, T* y, int64_t n, double t, const Regulariser& r) {
  for (int64_t i = 0; i < n; i++) {
    const double size = std::fabs(double(x[i])), away = size - t;
    double kept = 0;
    if (away > 0) {
      const double rise = away / r.tau, share = (r.power == 3 ? rise * rise * rise : std::pow(rise, r.power)) / t;
      kept = share < 1 ? away + share * t : size;
    }
    y[i] = std::copysign(T(kept), x[i]);
  }
}

// The magnitudes, 0 behind them, and the largest, or nan where one is infinite or nan.
template <class T> double magnitudes(const T* x, int64_t n, double* size) {
  for (int64_t i = 0; i < n; i++) size[i] = std::fabs(double(x[i]));
  std::fill_n(size + n, kFour, 0.0);
  VecD top{}, probe{};
  for (int64_t i = 0; i < n; i += kWidth<double>) {
    const VecD v = load(size + i);
    top = vmax(top, v), probe += v * 0.0;
  }
  double largest = 0;
  for (int j = 0; j < kWidth<double>; j++) largest = std::max(largest, double(top[j]));
  return sum_lanes(probe) == 0 ? largest : kNan<double>;
}

// False if a value is infinite or nan: then there is no threshold.
template <class T> bool one_row(const T* x, T* y, double* t, int64_t n, const Regulariser& r, double* size) {
  const double largest = magnitudes(x, n, size);
  if (!(largest == largest)) return false;
  *t = threshold_of(size, n, largest, r);
  shrink(x, y, n, *t, r);
  return true;
}

}  // namespace

// Types: 0 float32, 1 float64. A null pointer for k or tau means the value beside it, for all rows. Returns 4 where a value is not finite.
KHOT_API int khot_magnitude(int dtype, const void* x, const double* k, double k_value, const double* tau, double tau_value, double power, void* y,
                            double* t, int64_t rows, int64_t n, int threads) {
  constexpr int not_finite = 4;
  if (!fits(rows, n)) return kBadShape;
  std::atomic<bool> finite{true};
  const int code = by_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    return share_work(threads, rows, n, [&](int64_t begin, int64_t end) {
      std::vector<double> size(size_t(n + kFour));
      for (int64_t r = begin; r < end; r++) {
        const Regulariser rule{k ? k[r] : k_value, tau ? tau[r] : tau_value, power};
        if (!one_row(static_cast<const T*>(x) + r * n, static_cast<T*>(y) + r * n, t + r, n, rule, size.data())) finite = false;
      }
    });
  });
  return code == kDone && !finite ? not_finite : code;
}
