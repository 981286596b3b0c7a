// The gradient of successive halving at one place, given the items that met there.
#pragma once
#include <vector>

#include "duels.h"

namespace {

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

}  // namespace
