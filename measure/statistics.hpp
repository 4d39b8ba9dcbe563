// SPDX-License-Identifier: Apache-2.0
// measure/statistics.hpp - the median of paired measurements and its confidence interval.
#pragma once

#include <string>
#include <vector>

namespace hoist::measure {

struct Interval {
  double low = 0;
  double high = 0;
};

double median(std::vector<double> values);

// 95 % confidence interval of the median from order statistics: no assumption about the distribution. With fewer than
// six values it is their whole range.
Interval median_interval(std::vector<double> values);

// "0.987 [0.979, 1.002]": the median and its interval.
std::string median_text(const std::vector<double>& values, int decimals = 3);

// Whether a claim about the median holds: unless its interval, widened by half the width of the control's, is wholly on
// the other side of the limit.
bool is_at_least(double limit, const std::vector<double>& ratios, const std::vector<double>& control);
bool is_at_most(double limit, const std::vector<double>& ratios, const std::vector<double>& control);

}  // namespace hoist::measure
