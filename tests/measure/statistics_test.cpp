// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/measure/statistics.hpp>

namespace hoist::measure::statistics_test {
namespace {

TEST(Statistics, MedianOfOddEvenAndNone) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(median({}), 0);
}

// The interval must hold the true median in at least 95 % of experiments, whatever the distribution.
TEST(Statistics, IntervalCoversTheMedian) {
  constexpr std::uint64_t kSeed = 3;
  Rng rng(kSeed);
  int covered = 0;
  constexpr int kExperiments = 2000;
  for (int experiment = 0; experiment < kExperiments; ++experiment) {
    std::vector<double> values;
    for (int i = 0; i < 40; ++i) values.push_back(1 / (0.1 + rng.uniform()));  // skewed; median at uniform = 0.5
    const Interval interval = median_interval(values);
    if (interval.low <= 1 / 0.6 && 1 / 0.6 <= interval.high) ++covered;
  }
  EXPECT_GE(covered, 0.94 * kExperiments) << "seed " << kSeed;
  EXPECT_LT(covered, kExperiments) << "an interval that never misses says nothing; seed " << kSeed;
}

// The interval of many values, as that of few, covers about 0.98 sqrt(n) ranks on each side of the middle.
TEST(Statistics, IntervalsOfManyValuesAreNoPoints) {
  for (const std::size_t count : {400u, 500u, 501u, 1000u, 1074u, 1075u, 10000u}) {
    std::vector<double> ranks(count);
    std::iota(ranks.begin(), ranks.end(), 0.0);
    const Interval interval = median_interval(ranks);
    const double half = (interval.high - interval.low) / 2;
    EXPECT_NEAR(half, 0.98 * std::sqrt(static_cast<double>(count)), 2) << count;
    EXPECT_EQ(interval.low + interval.high, static_cast<double>(count - 1)) << count;
  }
}

TEST(Statistics, AClaimHoldsUnlessItsIntervalWidenedByTheControlsIsBeyondTheLimit) {
  const std::vector<double> ratios{0.80, 0.84, 0.88}, quiet{1.0, 1.0, 1.0}, noisy{0.95, 1.0, 1.05};
  EXPECT_TRUE(is_at_least(0.88, ratios, quiet));
  EXPECT_FALSE(is_at_least(0.89, ratios, quiet));
  EXPECT_TRUE(is_at_least(0.92, ratios, noisy));
  EXPECT_FALSE(is_at_least(0.94, ratios, noisy));
  EXPECT_TRUE(is_at_most(0.80, ratios, quiet));
  EXPECT_FALSE(is_at_most(0.79, ratios, quiet));
  EXPECT_TRUE(is_at_most(0.76, ratios, noisy));
  EXPECT_FALSE(is_at_most(0.74, ratios, noisy));
}

}  // namespace
}  // namespace hoist::measure::statistics_test
