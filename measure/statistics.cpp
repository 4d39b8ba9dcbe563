// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>

#include <fmt/format.h>

#include <hoist/measure/statistics.hpp>

namespace hoist::measure {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Interval median_interval(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const std::size_t count = values.size();
  // The number of values below the true median is binomial(count, 1/2): leave out k values on each side for the largest
  // k whose tail, P(at most k below), is at most 2.5 %. Of many values, by the normal distribution: 2^-count is 0 then.
  if (count > 500) {
    const auto n = static_cast<double>(count);
    const auto low = static_cast<std::size_t>((n - 1.96 * std::sqrt(n)) / 2 - 1);
    return {values[low], values[count - 1 - low]};
  }
  double probability = std::pow(0.5, static_cast<double>(count));
  double tail = 0;
  std::size_t left_out = 0;
  for (std::size_t below = 0; below < count / 2; ++below) {
    tail += probability;
    if (tail > 0.025) break;
    left_out = below;
    probability *= static_cast<double>(count - below) / static_cast<double>(below + 1);
  }
  return {values[left_out], values[count - 1 - left_out]};
}

std::string median_text(const std::vector<double>& values, int decimals) {
  const auto [low, high] = median_interval(values);
  return fmt::format("{1:.{0}f} [{2:.{0}f}, {3:.{0}f}]", decimals, median(values), low, high);
}

namespace {

double noise_of(const std::vector<double>& control) {
  const Interval interval = median_interval(control);
  return (interval.high - interval.low) / 2;
}

}  // namespace

bool is_at_least(double limit, const std::vector<double>& ratios, const std::vector<double>& control) {
  return median_interval(ratios).high + noise_of(control) >= limit;
}

bool is_at_most(double limit, const std::vector<double>& ratios, const std::vector<double>& control) {
  return median_interval(ratios).low - noise_of(control) <= limit;
}

}  // namespace hoist::measure
