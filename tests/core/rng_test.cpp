// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>

namespace hoist::test::rng_test {
namespace {

TEST(Rng, IsSplitMix64) {
  // The published generator's first outputs for seed 1234567.
  constexpr std::uint64_t kKnown[] = {6457827717110365317u, 3203168211198807973u, 9817491932198370423u,
                                      4593380528125082431u, 16408922859458223821u};
  for (std::uint64_t i = 0; i < std::size(kKnown); ++i) EXPECT_EQ(random_bits(1234567, i), kKnown[i]) << i;
}

TEST(Rng, TheSequentialViewIsTheCounter) {
  Rng rng(5);
  EXPECT_EQ(rng.bits(), random_bits(5, 0));
  EXPECT_EQ(rng.uniform(), random_uniform(5, 1));
  EXPECT_EQ(rng.below(10), random_bits(5, 2) % 10);
}

TEST(Rng, UniformLooksUniform) {
  constexpr int kCount = 200000, kBins = 64;
  std::array<int, kBins> bins{};
  double sum = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const double x = random_uniform(42, i);
    ASSERT_GE(x, 0.0);
    ASSERT_LT(x, 1.0);
    sum += x;
    ++bins[static_cast<std::size_t>(x * kBins)];
  }
  EXPECT_NEAR(sum / kCount, 0.5, 5 * std::sqrt(1.0 / 12 / kCount));
  double chi2 = 0;
  for (const int bin : bins) chi2 += std::pow(bin - kCount / double{kBins}, 2) / (kCount / double{kBins});
  EXPECT_NEAR(chi2, kBins - 1, 5 * std::sqrt(2.0 * (kBins - 1)));
}

TEST(Rng, EveryBitIsBalancedAndSeedsAreUnrelated) {
  constexpr int kCount = 20000;
  std::array<int, 64> ones{};
  double differing = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const std::uint64_t x = random_bits(7, i);
    for (std::size_t bit = 0; bit < 64; ++bit) ones[bit] += static_cast<int>((x >> bit) & 1);
    differing += std::popcount(x ^ random_bits(8, i));
  }
  for (std::size_t bit = 0; bit < 64; ++bit) EXPECT_NEAR(ones[bit], kCount / 2, 5 * std::sqrt(kCount / 4.0)) << bit;
  EXPECT_NEAR(differing / kCount, 32, 5 * std::sqrt(16.0 / kCount));
}

TEST(Rng, NormalHasItsMoments) {
  constexpr int kCount = 200000;
  double sum = 0, squares = 0, fourths = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const double x = random_normal(3, i);
    ASSERT_TRUE(std::isfinite(x));
    sum += x;
    squares += x * x;
    fourths += x * x * x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 5 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1, 5 * std::sqrt(2.0 / kCount));
  EXPECT_NEAR(fourths / kCount, 3, 5 * std::sqrt(96.0 / kCount));
}

}  // namespace
}  // namespace hoist::test::rng_test
