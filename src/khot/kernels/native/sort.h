// Sorting one row from the largest to the smallest, as indices: stable, nan first, the two zeros equal.
//
// Short rows are sorted by counting for every value how many stand before it: n^2 / 2 comparisons without a branch, many at a
// time. Longer rows that are nearly in order are sorted by insertion, all others by their bits, least digit first.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

template <class T> struct Word;
template <> struct Word<float> { using type = uint32_t; using same = int32_t; };
template <> struct Word<double> { using type = uint64_t; using same = int64_t; };

template <class T> struct Entry {
  typename Word<T>::type key;  // ascending where the values descend
  int32_t from;
};

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

constexpr int64_t kLook = 32;

// Whether a row longer than kLook begins in no order at all.
template <class E> bool jumbled(const E* e) {
  int descents = 0;
  for (int64_t i = 0; i < kLook; i++) descents += e[i + 1].key < e[i].key;
  return descents > kLook / 4;
}

// From here on sorting by bits is quicker (float32, Zen 2 with AVX2: 9 against 12 ns for each of 128 items).
template <class T> constexpr int64_t kCounted = sizeof(T) == 4 ? 128 : 64;

// The place of every item of a short row without nan. place[i] counts the j with x[j] before x[i].
template <class T> void count_places(const T* x, typename Word<T>::same* place, int64_t n) {
  for (int64_t i = 0; i < n; i++) place[i] = 0;
  for (int64_t j = 0; j + 1 < n; j++) {
    typename Word<T>::same ahead = 0;  // of how many later ones this stands
    for (int64_t i = j + 1; i < n; i++) {
      typename Word<T>::same before = x[j] >= x[i];
      place[i] += before, ahead += before;
    }
    place[j] += (n - 1 - j) - ahead;
  }
}

template <class T> class Sorter {
 public:
  explicit Sorter(int64_t most) : entries_(2 * size_t(most)) {}

  // order[i] becomes the index of the i-th largest.
  template <class I> void sort(const T* values, I* order, int64_t n) {
    if (n <= kCounted<T> && !has_nan(values, n)) return falls(values, n) ? in_order(order, n) : count(values, order, n);
    Entry<T>*e = entries_.data(), *spare = e + n;
    for (int64_t i = 0; i < n; i++) e[i] = {key_of(values[i]), int32_t(i)};
    bool done = n <= kLook ? insertion_sort(e, n, n * n) : !jumbled(e) && insertion_sort(e, n, 2 * n);
    if (!done) e = n < 2048 ? radix_sort<8>(e, spare, n) : radix_sort<11>(e, spare, n);
    for (int64_t i = 0; i < n; i++) order[i] = I(e[i].from);
  }

 private:
  static bool has_nan(const T* values, int64_t n) {
    bool found = false;
    for (int64_t i = 0; i < n; i++) found |= values[i] != values[i];
    return found;
  }

  static bool falls(const T* values, int64_t n) {
    bool rises = false;
    for (int64_t i = 1; i < n; i++) rises |= values[i - 1] < values[i];
    return !rises;
  }

  template <class I> static void in_order(I* order, int64_t n) {
    for (int64_t i = 0; i < n; i++) order[i] = I(i);
  }

  template <class I> static void count(const T* values, I* order, int64_t n) {
    typename Word<T>::same place[kCounted<T>];
    count_places(values, place, n);
    for (int64_t i = 0; i < n; i++) order[place[i]] = I(i);
  }

  std::vector<Entry<T>> entries_;
};

}  // namespace
