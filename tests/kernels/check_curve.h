// The table that entmax with alpha = 3 wants: its tail is u / 2, so that log2 of it is a logarithm on every octave.
#pragma once
#include <cmath>
#include <vector>

struct Curve {
  double a;
  const float* singles;
  const double* doubles;
};

// As khot.kernels.curve: polynomials through the values at Chebyshev's nodes, the lowest power first.
static std::vector<double> curve_terms(int terms, int octaves) {
  std::vector<std::vector<double>> power(terms, std::vector<double>(terms));
  power[0][0] = power[1][1] = 1;
  for (int j = 2; j < terms; j++)
    for (int i = 0; i < terms; i++) power[j][i] = (i ? 2 * power[j - 1][i - 1] : 0) - power[j - 2][i];
  std::vector<double> out(size_t(terms * octaves));
  for (int octave = 0; octave < octaves; octave++)
    for (int j = 0; j < terms; j++) {
      double c = 0;
      for (int node = 0; node < terms; node++) {
        const double angle = (node + 0.5) * M_PI / terms;
        c += std::cos(j * angle) * (std::log2((std::cos(angle) + 3) / 4) - octave - 1) * (j ? 2.0 : 1.0) / terms;
      }
      for (int i = 0; i <= j; i++) out[size_t(i * octaves + octave)] += c * power[j][i];
    }
  return out;
}

static const void* curve_of(int family) {
  static const std::vector<double> doubles = curve_terms(23, 126), wide = curve_terms(11, 126);
  static const std::vector<float> singles(wide.begin(), wide.end());
  static const Curve curve{2, singles.data(), doubles.data()};
  return family == 5 ? &curve : nullptr;
}
