// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/measure/latency_histogram.hpp>

namespace hoist::measure::latency_histogram_test {
namespace {

TEST(LatencyHistogram, EmptyIsZero) {
  const LatencyHistogram histogram;
  EXPECT_EQ(histogram.count(), 0u);
  EXPECT_EQ(histogram.percentile(0.5), Nanoseconds(0));
}

TEST(LatencyHistogram, PercentilesAgreeWithSortingOverSevenDecades) {
  constexpr std::uint64_t kSeed = 7;
  LatencyHistogram histogram;
  std::vector<std::int64_t> all;
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const auto latency = static_cast<std::int64_t>(std::pow(10.0, 2 + 7 * random_uniform(kSeed, i)));
    all.push_back(latency);
    histogram.record(Nanoseconds(latency));
  }
  std::sort(all.begin(), all.end());
  for (const double share : {0.001, 0.1, 0.5, 0.9, 0.99, 0.999}) {
    const auto exact = static_cast<double>(all[static_cast<std::size_t>(std::ceil(share * 20000)) - 1]);
    const auto found = static_cast<double>(histogram.percentile(share).count());
    EXPECT_NEAR(found / exact, 1.0, 0.016) << "share " << share << " seed " << kSeed;
  }
  EXPECT_EQ(histogram.max(), Nanoseconds(all.back()));
  EXPECT_EQ(histogram.percentile(1.0), histogram.max());
}

TEST(LatencyHistogram, SmallAndHugeValuesHaveABucket) {
  for (const std::int64_t value :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, std::int64_t{65}, INT64_MAX}) {
    LatencyHistogram histogram;
    for (int i = 0; i < 2; ++i) histogram.record(Nanoseconds(value));  // of one, the median is the exact maximum
    const auto exact = static_cast<double>(value);
    EXPECT_NEAR(static_cast<double>(histogram.percentile(0.5).count()), exact, exact / 64) << value;
    EXPECT_EQ(histogram.max(), Nanoseconds(value));
  }
}

TEST(LatencyHistogram, AddingIsRecordingBoth) {
  LatencyHistogram a, b;
  for (int i = 0; i < 100; ++i) {
    a.record(Nanoseconds(1000));
    b.record(Nanoseconds(9000));
  }
  a.add(b);
  EXPECT_EQ(a.count(), 200u);
  EXPECT_NEAR(static_cast<double>(a.percentile(0.4).count()), 1000, 16);
  EXPECT_NEAR(static_cast<double>(a.percentile(0.6).count()), 9000, 144);
  EXPECT_EQ(a.max(), Nanoseconds(9000));
}

}  // namespace
}  // namespace hoist::measure::latency_histogram_test
