// SPDX-License-Identifier: Apache-2.0
// bench/pairs.hpp - two legs in alternating order, and the JSON of their ratios.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <hoist/measure/statistics.hpp>

namespace hoist::bench {

struct Pairs {
  std::vector<double> first, second;
  std::vector<double> ratios;  // of the first to the second
};

inline Pairs alternate(unsigned count, const std::function<double()>& first, const std::function<double()>& second) {
  Pairs pairs;
  for (unsigned pair = 0; pair < count; ++pair) {
    if (pair % 2 == 0) pairs.first.push_back(first());
    pairs.second.push_back(second());
    if (pair % 2 != 0) pairs.first.push_back(first());
    pairs.ratios.push_back(pairs.first.back() / pairs.second.back());
  }
  return pairs;
}

inline std::string interval_json(const std::vector<double>& ratios) {
  const auto [low, high] = measure::median_interval(ratios);
  return fmt::format("[{},{}]", low, high);
}

// Two members of an object.
inline std::string ratio_json(const std::vector<double>& ratios) {
  return fmt::format(R"("ratio":{},"interval":{})", measure::median(ratios), interval_json(ratios));
}

}  // namespace hoist::bench
