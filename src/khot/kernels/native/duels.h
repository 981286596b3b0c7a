// A duel: the share that each of two values keeps, and the value that goes on.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr double kBase = 20;  // of the published power boost

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

template <class T> Rules<T> rules_of(int is_power, double boost, double tau) { return {is_power != 0, T(boost / tau), T(tau)}; }

}  // namespace
