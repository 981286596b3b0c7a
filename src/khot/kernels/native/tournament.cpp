// Sorting rows, and successive halving on them: who meets whom, what each item weighs, the gradient, the weighted sums.
// Plain C++, compiled once for the baseline machine; rows and bags are shared among the threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#define KHOT_API extern "C" __attribute__((visibility("default")))

extern "C" __attribute__((visibility("hidden"))) void khot_parallel(int threads, int64_t count, void (*body)(void*, int64_t), void* context);

namespace {

constexpr int64_t kWorthThreads = 1 << 13;  // items below which one thread is done before a second has woken up
constexpr double kBase = 20;                // of the published power boost

// fn(begin, end) over pieces of [0, count), where each piece may throw for want of memory; whether all went well.
template <class Fn> bool share_work(int threads, int64_t count, int64_t items_each, const Fn& fn) {
  if (count * items_each < kWorthThreads) threads = 1;
  struct Context { const Fn* fn; int64_t count, pieces; std::atomic<bool> failed; };
  Context context{&fn, count, threads > 1 ? std::min<int64_t>(count, int64_t(threads) * 4) : 1, {false}};
  auto body = [](void* p, int64_t i) {
    Context& c = *static_cast<Context*>(p);
    try {
      (*c.fn)(c.count * i / c.pieces, c.count * (i + 1) / c.pieces);
    } catch (const std::bad_alloc&) {
      c.failed = true;
    }
  };
  khot_parallel(threads, context.pieces, body, &context);
  return !context.failed;
}

// ---------------------------------------------------------------- sorting

template <class T> struct Word;
template <> struct Word<float> { using type = uint32_t; };
template <> struct Word<double> { using type = uint64_t; };

template <class T> struct Entry {
  typename Word<T>::type key;  // ascending where the values descend
  int32_t from;
};

// nan before everything, the two zeros equal.
template <class T> typename Word<T>::type key_of(T value) {
  using W = typename Word<T>::type;
  constexpr W top = W(1) << (8 * sizeof(W) - 1);
  W bits;
  T one_zero = value + T(0);
  std::memcpy(&bits, &one_zero, sizeof bits);
  W flip = bits & top ? W(0) : W(~top);  // what turns sign and magnitude into a descending order
  return value != value ? W(0) : W(bits ^ flip);
}

// Insertion sort that gives up after so many moves. What it leaves then is still a permutation in which equals kept their order.
template <class E> bool insertion_sort(E* e, int64_t n, int64_t moves) {
  for (int64_t i = 1; i < n; i++) {
    if (!(e[i].key < e[i - 1].key)) continue;
    E moved = e[i];
    int64_t j = i;
    for (; j > 0 && moved.key < e[j - 1].key; j--) e[j] = e[j - 1];
    e[j] = moved;
    if ((moves -= i - j) < 0) return false;
  }
  return true;
}

// Least digit first, each pass stable. Returns where the result lies: in `e` or in `spare`.
template <int kBits, class E> E* radix_sort(E* e, E* spare, int64_t n) {
  constexpr int width = 8 * int(sizeof(e->key)), passes = (width + kBits - 1) / kBits, size = 1 << kBits;
  uint32_t count[passes][size];
  std::memset(count, 0, sizeof count);
  auto digit = [](const E& x, int p) { return uint32_t(x.key >> (p * kBits)) & (size - 1); };
  for (int64_t i = 0; i < n; i++)
    for (int p = 0; p < passes; p++) count[p][digit(e[i], p)]++;
  for (int p = 0; p < passes; p++) {
    if (count[p][digit(e[0], p)] == uint64_t(n)) continue;
    uint32_t at = 0;
    for (int b = 0; b < size; b++) {
      uint32_t here = count[p][b];
      count[p][b] = at, at += here;
    }
    for (int64_t i = 0; i < n; i++) spare[count[p][digit(e[i], p)]++] = e[i];
    std::swap(e, spare);
  }
  return e;
}

constexpr int64_t kShort = 32;

// Whether a row longer than kShort begins in no order at all.
template <class E> bool jumbled(const E* e) {
  int descents = 0;
  for (int64_t i = 0; i < kShort; i++) descents += e[i + 1].key < e[i].key;
  return descents > kShort / 4;
}

// Stable; `spare` has room for n. Returns where the result lies.
template <class E> E* sort_entries(E* e, E* spare, int64_t n) {
  if (n <= kShort ? insertion_sort(e, n, n * n) : !jumbled(e) && insertion_sort(e, n, 2 * n)) return e;
  return n < 2048 ? radix_sort<8>(e, spare, n) : radix_sort<11>(e, spare, n);
}

template <class T> Entry<T>* sort_values(const T* values, Entry<T>* e, Entry<T>* spare, int64_t n) {
  for (int64_t i = 0; i < n; i++) e[i] = {key_of(values[i]), int32_t(i)};
  return sort_entries(e, spare, n);
}

template <class T> bool order_rows(const T* values, int64_t* order, int64_t rows, int64_t n, int threads) {
  return share_work(threads, rows, n, [=](int64_t begin, int64_t end) {
    std::vector<Entry<T>> entries(2 * size_t(n));
    for (int64_t r = begin; r < end; r++) {
      const Entry<T>* sorted = sort_values(values + r * n, entries.data(), entries.data() + n, n);
      for (int64_t i = 0; i < n; i++) order[r * n + i] = sorted[i].from;
    }
  });
}

// ---------------------------------------------------------------- duels

// e^r for |r| <= ln(2)/2, times 2^i.
inline float scaled_exp(float r, int32_t i) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits = uint32_t(i + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

// e^-d for d >= 0, or nearly so; nan stays.
inline float exp_minus(float d) {
  constexpr float magic = 12582912.0f;  // adding it rounds to a whole number, which then stands in the low bits
  float t = d > 87.0f ? 87.0f : d;
  float rounded = t * -1.44269504f + magic;
  int32_t whole;
  std::memcpy(&whole, &rounded, 4);
  whole -= 0x4b400000;
  float i = rounded - magic;
  float e = scaled_exp((-t - i * 0.693359375f) + i * 2.12194440e-4f, d == d ? whole : 0);
  return d > 87.0f ? 0.0f : e;
}
inline double exp_minus(double d) { return std::exp(-d); }

// kBase^x. The product with the logarithm is split, so that what is left of it after whole powers of two has all its digits.
inline float power(float x) {
  constexpr float magic = 12582912.0f, log_high = 2.9951171875f, log_low = 6.15086054e-4f;
  float t = x > 30.0f ? 30.0f : x < -30.0f ? -30.0f : x;
  float rounded = t * 4.32192809f + magic;
  int32_t whole;
  std::memcpy(&whole, &rounded, 4);
  whole -= 0x4b400000;
  float i = rounded - magic;
  uint32_t bits;
  std::memcpy(&bits, &t, 4);
  bits &= 0xfffff000u;
  float high;
  std::memcpy(&high, &bits, 4);
  float rest = (high * log_high - i * 0.693359375f) + (high * log_low + (t - high) * (log_high + log_low)) + i * 2.12194440e-4f;
  whole = whole > 128 ? 128 : whole < -127 ? -127 : whole;  // infinite, 0
  return scaled_exp(rest, t == t ? whole : 0);
}
inline double power(double x) { return std::pow(kBase, x); }

template <class T> struct Rules {
  bool is_power;
  T gain, tau;  // gain = boost / tau
};

template <class T> struct Duel { T win, lose, after; };

template <class T> inline Duel<T> decide(T a, T b, T lead) {
  T e = exp_minus(lead), win = 1 / (1 + e), lose = e * win;
  return {win, lose, a - (a - b) * lose};
}

template <class T> bool finite(T v) { return std::fabs(v) <= std::numeric_limits<T>::max(); }
template <class T> constexpr T kInf = std::numeric_limits<T>::infinity();

// Where one of the two is infinite: -inf weighs nothing, two at +inf weigh the same.
template <class T> Duel<T> decide_infinite(T a, T b) {
  T half = a == kInf<T> ? T(0.5) : T(0);
  return a == b ? Duel<T>{half, half, a} : Duel<T>{T(a > b), T(b > a), a};
}

// ---------------------------------------------------------------- the tournament

struct Shape {
  int64_t n, k;
  int rounds;
  int64_t leaves() const { return k << rounds; }      // of a row, byes included
  int64_t byes() const { return leaves() - n; }       // in the first round, for the best
};

template <class T> struct Table {  // what a thread needs to play one row
  explicit Table(const Shape& s)
      : shape(s), entries(2 * size_t(s.n)), order(2 * size_t(s.leaves())), win(size_t(s.leaves())), lose(size_t(s.leaves())),
        value(size_t(s.n) + 1), ordered(size_t(s.n) + 1), worst(size_t(s.n) + 1) {}
  Shape shape;
  std::vector<Entry<T>> entries;
  std::vector<int32_t> order;    // round after round: who sat at each seat
  std::vector<T> win, lose;      // round after round: the shares of the pair at each of the better half's seats
  std::vector<T> value, ordered, worst;

  // All rounds, then back from the k places to the items: every pair becomes two neighbours.
  void play(const T* scores, const Rules<T>& rules, int64_t* leaves, T* weight) {
    int64_t n = shape.n;
    bool has_nan = false, has_infinite = false;
    for (int64_t i = 0; i < n; i++) {
      value[i] = scores[i];
      has_nan |= scores[i] != scores[i];
      has_infinite |= !finite(scores[i]);
    }
    int64_t seats = n, byes = shape.byes(), first_seat = 0, first_pair = 0;
    if (!shape.rounds) sit_down(seats, 0, order.data());
    for (int r = 0; r < shape.rounds; r++, byes = 0) {
      int64_t half = (seats + byes) / 2;
      sit_down(seats, byes, order.data() + first_seat);
      fight(seats, byes, rules, has_infinite, win.data() + first_pair, lose.data() + first_pair);
      first_seat += 2 * half, first_pair += half, seats = half;
    }
    trace_back(first_seat, first_pair, leaves, weight);
    if (has_nan) std::fill(weight, weight + shape.leaves(), std::numeric_limits<T>::quiet_NaN());
    else if (has_infinite)
      for (int64_t i = 0; i < shape.leaves(); i++)
        if (scores[leaves[i]] == -kInf<T>) weight[i] = 0;
  }

 private:
  // Sorts the entrants; the best have a bye, which is a second seat at the other end.
  void sit_down(int64_t entrants, int64_t byes, int32_t* seat) {
    const Entry<T>* sorted = sort_values(value.data(), entries.data(), entries.data() + shape.n, entrants);
    for (int64_t i = 0; i < entrants; i++) {
      seat[i] = sorted[i].from;
      ordered[i] = value[sorted[i].from];
    }
    for (int64_t i = 0; i < byes; i++) seat[entrants + byes - 1 - i] = seat[i];
  }

  void fight(int64_t entrants, int64_t byes, const Rules<T>& rules, bool has_infinite, T* win, T* lose) {
    int64_t half = (entrants + byes) / 2, duels = half - byes;
    for (int64_t i = 0; i < byes; i++) win[i] = 1, lose[i] = 0, value[i] = ordered[i];
    const T *__restrict a = ordered.data() + byes, *last = ordered.data() + entrants - 1;  // none of these overlap: they go in vectors
    T *__restrict b = worst.data(), *__restrict after = value.data() + byes, *__restrict won = win + byes, *__restrict lost = lose + byes;
    for (int64_t i = 0; i < duels; i++) b[i] = last[-i];
    if (rules.is_power)
      for (int64_t i = 0; i < duels; i++) won[i] = power(a[i] / rules.tau) - power(b[i] / rules.tau);
    else
      for (int64_t i = 0; i < duels; i++) won[i] = (a[i] - b[i]) * rules.gain;
    for (int64_t i = 0; i < duels; i++) {
      Duel<T> d = decide(a[i], b[i], won[i]);
      won[i] = d.win, lost[i] = d.lose, after[i] = d.after;
    }
    if (!has_infinite) return;
    for (int64_t i = 0; i < duels; i++) {
      if (finite(a[i]) && finite(b[i])) continue;
      Duel<T> d = decide_infinite(a[i], b[i]);
      won[i] = d.win, lost[i] = d.lose, after[i] = d.after;
    }
  }

  // In place: from the last pair to the first, each becomes its two entrants.
  void trace_back(int64_t first_seat, int64_t first_pair, int64_t* leaves, T* weight) const {
    for (int64_t i = 0; i < shape.k; i++) leaves[i] = shape.rounds ? i : order[i], weight[i] = 1;
    for (int64_t pairs = shape.k; pairs < shape.leaves(); pairs *= 2) {
      first_seat -= 2 * pairs, first_pair -= pairs;
      const int32_t* seat = order.data() + first_seat;
      for (int64_t i = pairs - 1; i >= 0; i--) {
        int64_t s = leaves[i];
        T w = weight[i];
        leaves[2 * i] = seat[s], weight[2 * i] = w * win[first_pair + s];
        leaves[2 * i + 1] = seat[2 * pairs - 1 - s], weight[2 * i + 1] = w * lose[first_pair + s];
      }
    }
  }
};

// ---------------------------------------------------------------- its gradient

template <class T> struct Bracket {  // one place: a heap with the root at 1 and the leaves from `width` on
  explicit Bracket(int64_t width)
      : width(width), value(2 * size_t(width)), mean(2 * size_t(width)), weight(2 * size_t(width)), pull(2 * size_t(width)),
        raised(2 * size_t(width)), win(size_t(width)), lose(size_t(width)) {}
  int64_t width;
  std::vector<T> value, mean;   // of the score, of the gradient in the weights: what comes out of each subtree
  std::vector<T> weight, pull;  // of the subtree in the place; the gradient in its value
  std::vector<T> raised;        // the value as the exponent of the base, if the rules say so
  std::vector<T> win, lose;

  // Adds the gradient in the scores, returns that in tau.
  T backward(const T* scores, const Rules<T>& rules, const int64_t* leaves, const T* grad, T* grad_scores) {
    for (int64_t j = 0; j < width; j++) {
      value[width + j] = scores[leaves[j]];
      mean[width + j] = scores[leaves[j]] == -kInf<T> ? T(0) : grad[j];
    }
    for (int64_t first = width / 2; first > 0; first /= 2) {
      if (rules.is_power)
        for (int64_t i = 2 * first; i < 4 * first; i++) raised[i] = power(value[i] / rules.tau);
      for (int64_t i = first; i < 2 * first; i++) climb(i, rules, is_bye(leaves, i));
    }
    T grad_tau = 0;
    weight[1] = 1, pull[1] = 0;
    for (int64_t i = 1; i < width; i++) grad_tau += push_down(i, rules, is_bye(leaves, i));
    for (int64_t j = 0; j < width; j++) grad_scores[leaves[j]] += pull[width + j];
    return grad_tau;
  }

 private:
  // An item that meets itself has a bye.
  bool is_bye(const int64_t* leaves, int64_t i) const {
    return 2 * i >= width && leaves[2 * i - width] == leaves[2 * i + 1 - width];
  }

  void climb(int64_t i, const Rules<T>& rules, bool bye) {
    int64_t l = 2 * i, r = 2 * i + 1;
    T a = value[l], b = value[r], lead = rules.is_power ? raised[l] - raised[r] : (a - b) * rules.gain;
    Duel<T> d = bye ? Duel<T>{1, 0, a} : finite(a) && finite(b) ? decide(a, b, lead) : decide_infinite(a, b);
    win[i] = d.win, lose[i] = d.lose, value[i] = d.after;
    mean[i] = d.win * mean[l] + d.lose * mean[r];
  }

  T push_down(int64_t i, const Rules<T>& rules, bool bye) {
    int64_t l = 2 * i, r = 2 * i + 1;
    T a = value[l], b = value[r];
    weight[l] = weight[i] * win[i], weight[r] = weight[i] * lose[i];
    pull[l] = pull[i], pull[r] = 0;
    if (bye || !finite(a) || !finite(b)) return 0;
    T in_lead = (weight[i] * (mean[l] - mean[r]) + pull[i] * (a - b)) * win[i] * lose[i];
    pull[l] = pull[i] * win[i], pull[r] = pull[i] * lose[i];
    if (!rules.is_power) {
      pull[l] += in_lead * rules.gain, pull[r] -= in_lead * rules.gain;
      return -in_lead * rules.gain * (a - b) / rules.tau;
    }
    T rate = T(2.995732273553991) / rules.tau, slope_a = rate * raised[l], slope_b = rate * raised[r];  // the logarithm of the base
    pull[l] += in_lead * slope_a, pull[r] -= in_lead * slope_b;
    return -in_lead * (slope_a * a - slope_b * b) / rules.tau;
  }
};

template <class T> Rules<T> rules_of(int is_power, double boost, double tau) { return {is_power != 0, T(boost / tau), T(tau)}; }

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

// ---------------------------------------------------------------- bags

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

// Memory may run out outside the threads too.
template <class Fn> int code_of(const Fn& fn) {
  try {
    return fn() ? 0 : 3;
  } catch (const std::bad_alloc&) {
    return 3;
  }
}

}  // namespace

// Types: 0 float32, 1 float64. All return 0, or 2 for another type, or 3 if there is no memory.
#define KHOT_BY_TYPE(call_float, call_double) \
  return dtype == 0 ? code_of([&] { return call_float; }) : dtype == 1 ? code_of([&] { return call_double; }) : 2

// The indices that sort each row from the largest to the smallest, equal values in their order, nan first.
KHOT_API int khot_order(int dtype, const void* values, int64_t* order, int64_t rows, int64_t n, int threads) {
  if (rows <= 0 || n <= 0) return 0;
  KHOT_BY_TYPE(order_rows(static_cast<const float*>(values), order, rows, n, threads),
               order_rows(static_cast<const double*>(values), order, rows, n, threads));
}

// For each of the k places its 2^rounds items, neighbours meeting first, and their weights; 0 < k <= n <= k 2^rounds < 2 n.
// A null pointer for tau means the value beside it, for all rows.
KHOT_API int khot_tournament_forward(int dtype, const void* scores, const double* tau, double tau_value, double boost, int is_power,
                                     int64_t* leaves, void* weight, int64_t rows, int64_t n, int64_t k, int rounds, int threads) {
  if (rows <= 0 || n <= 0 || k <= 0) return 0;
  int64_t stride = tau ? 1 : 0;
  const double* taus = tau ? tau : &tau_value;
  Shape shape{n, k, rounds};
  KHOT_BY_TYPE(
      play_rows(static_cast<const float*>(scores), taus, stride, boost, is_power, leaves, static_cast<float*>(weight), rows, shape, threads),
      play_rows(static_cast<const double*>(scores), taus, stride, boost, is_power, leaves, static_cast<double*>(weight), rows, shape, threads));
}

KHOT_API int khot_tournament_backward(int dtype, const void* scores, const double* tau, double tau_value, double boost, int is_power,
                                      const int64_t* leaves, const void* grad, void* grad_scores, double* grad_tau, int64_t rows, int64_t n,
                                      int64_t k, int rounds, int threads) {
  if (rows <= 0 || n <= 0 || k <= 0) return 0;
  int64_t stride = tau ? 1 : 0;
  const double* taus = tau ? tau : &tau_value;
  Shape shape{n, k, rounds};
  KHOT_BY_TYPE(play_rows_backward(static_cast<const float*>(scores), taus, stride, boost, is_power, leaves, static_cast<const float*>(grad),
                                  static_cast<float*>(grad_scores), grad_tau, rows, shape, threads),
               play_rows_backward(static_cast<const double*>(scores), taus, stride, boost, is_power, leaves, static_cast<const double*>(grad),
                                  static_cast<double*>(grad_scores), grad_tau, rows, shape, threads));
}

// out (rows, k, d) = the sums of weight * x[item] over bags of `size` items.
KHOT_API int khot_bags_forward(int dtype, const void* x, const void* weight, const int64_t* items, void* out, int64_t rows, int64_t n,
                               int64_t d, int64_t k, int64_t size, int threads) {
  if (rows <= 0 || k <= 0 || d <= 0) return 0;
  Bags b{rows, n, d, k, size};
  KHOT_BY_TYPE(sum_bags(static_cast<const float*>(x), static_cast<const float*>(weight), items, static_cast<float*>(out), b, threads),
               sum_bags(static_cast<const double*>(x), static_cast<const double*>(weight), items, static_cast<double*>(out), b, threads));
}

// Either gradient may be null.
KHOT_API int khot_bags_backward(int dtype, const void* x, const void* weight, const int64_t* items, const void* grad, void* grad_x,
                                void* grad_weight, int64_t rows, int64_t n, int64_t d, int64_t k, int64_t size, int threads) {
  if (rows <= 0 || n <= 0 || k <= 0 || size <= 0) return 0;
  Bags b{rows, n, d, k, size};
  KHOT_BY_TYPE(sum_bags_backward(static_cast<const float*>(x), static_cast<const float*>(weight), items, static_cast<const float*>(grad),
                                 static_cast<float*>(grad_x), static_cast<float*>(grad_weight), b, threads),
               sum_bags_backward(static_cast<const double*>(x), static_cast<const double*>(weight), items, static_cast<const double*>(grad),
                                 static_cast<double*>(grad_x), static_cast<double*>(grad_weight), b, threads));
}
