// SPDX-License-Identifier: Apache-2.0
// Moments of bf16: the arithmetic is that of fp32 moments, and what is stored is rounded as update.hpp says.
#include <cmath>

#include "packed_tile.hpp"

namespace hoist::optim::test::bf16_moments_test {
namespace {

constexpr Form kSplit{"split", DType::bf16, MomentType::bf16}, kWhole{"whole", DType::fp32, MomentType::bf16};

std::uint16_t stochastic(float value, std::uint32_t random) {
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) + random) >> 16);
}

class Bf16Moments : public ::testing::TestWithParam<std::tuple<NamedOptions, DType, bool>> {};
INSTANTIATE_TEST_SUITE_P(All, Bf16Moments,
                         ::testing::Combine(::testing::ValuesIn(every_optimizer()), ::testing::ValuesIn(kDTypes),
                                            ::testing::Bool()));

// Every instruction set, at every count up to past two of the widest vectors, unaligned: masters as with fp32 moments,
// moments those of fp32 rounded.
TEST_P(Bf16Moments, AreFp32MomentsRounded) {
  const auto& [optimizer, dtype, split] = GetParam();
  const UpdateCoefficients c(optimizer.options, 3, 0.5);
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (std::size_t count = 0; count < 150; count += count < 70 ? 1 : 13) {
      const Rounding rounding{.key = 0x9E3779B9u, .first = first_index(count)};
      Rng rng(count + 1);
      PackedTile tile(split ? kSplit : kWhole, count, dtype, count % 5);
      count % 2 == 0 ? fill_ordinary(tile.wide, rng) : fill_extreme(tile.wide, rng);
      tile.adopt();
      Tile expected(count, dtype);
      for (std::size_t i = 0; i < count; ++i) {
        expected.set_master(i, tile.wide.master_array[i]);
        expected.moment1[i] = tile.wide.moment1[i];
        expected.moment2[i] = tile.wide.moment2[i];
        expected.set_gradient(i, tile.wide.gradient_value(i));
      }
      (void)tile.update(c, rounding);
      (void)(split ? update_tile(c, expected.split()) : update_tile(c, expected.whole()));
      ASSERT_TRUE(tile.intact()) << name << " count " << count;
      for (std::size_t i = 0; i < count; ++i) {
        const std::string where = name + " count " + std::to_string(count) + " element " + std::to_string(i);
        const float master = split ? expected.split_value(i) : expected.master_array[i];
        if (!std::isnan(master)) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(tile.master(i)), std::bit_cast<std::uint32_t>(master)) << where;
        }
        if (keeps_moment1(optimizer.options) && std::isfinite(expected.moment1[i])) {
          ASSERT_EQ(tile.narrow1[i].bits, to_bf16(expected.moment1[i]).bits) << where;
        }
        if (keeps_moment2(optimizer.options) && std::isfinite(expected.moment2[i])) {
          const std::uint32_t random = rounding_bits(rounding.key, rounding.first + static_cast<std::uint32_t>(i));
          ASSERT_EQ(tile.narrow2[i].bits, stochastic(expected.moment2[i], random)) << where;
        }
      }
    }
  }
}

TEST_P(Bf16Moments, DoNotDependOnTiles) {
  const auto& [optimizer, dtype, split] = GetParam();
  const auto make = [&d = dtype, s = split] { return PackedTile(s ? kSplit : kWhole, 1000, d); };
  expect_that_tiles_change_nothing(optimizer.options, make, {1, 7, 32, 129, 999});
}

TEST(Bf16MomentsLimits, WhatWouldRoundToInfinityIsRefused) {
  for (const auto& [optimizer, standard] : every_optimizer()) {
    OptimizerOptions options = standard;
    options.weight_decay = 0;
    const UpdateCoefficients c(options, 1, 1.0);
    for (const bool first : {true, false}) {
      if (first ? !keeps_moment1(options) : !keeps_moment2(options)) continue;
      PackedTile tile(kSplit, 40, DType::fp32);
      EXPECT_TRUE(tile.update(c, {}));
      (first ? tile.narrow1 : tile.narrow2)[21].bits = 0x7F80;
      EXPECT_FALSE(tile.update(c, {})) << optimizer;
    }
  }
}

// The random bits of neighbours and of neighbouring keys.
TEST(RoundingBits, AreEvenOverIndicesAndKeys) {
  expect_even([](std::uint32_t i) { return rounding_bits(5, i) / 65536.0 - 0.5; });
  expect_even([](std::uint32_t i) { return rounding_bits(i, 5) / 65536.0 - 0.5; });
}

// An average over a thousand steps needs stochastic rounding. Rounded to nearest, it would stop far from its goal,
// since one step changes it by less than half a step of bf16.
TEST(Bf16MomentsAverage, SecondMomentFollowsASmallChange) {
  constexpr std::size_t kCount = 4096;
  OptimizerOptions options{.weight_decay = 0};
  PackedTile tile(kSplit, kCount, DType::fp32);
  const float gradient = 0.01f;
  const float goal = gradient * gradient;
  for (std::size_t i = 0; i < kCount; ++i) {
    tile.narrow2[i] = to_bf16(2 * goal);
    tile.wide.set_gradient(i, gradient);
  }
  constexpr std::uint64_t kSteps = 3000;
  for (std::uint64_t step = 1; step <= kSteps; ++step)
    ASSERT_TRUE(
        tile.update(UpdateCoefficients(options, step, 1.0), {.key = static_cast<std::uint32_t>(step) * 0x9E3779B9u}));
  double mean = 0;
  for (std::size_t i = 0; i < kCount; ++i) mean += static_cast<double>(to_float(tile.narrow2[i])) / kCount;
  const double expected = static_cast<double>(goal) * (1 + std::pow(0.999, static_cast<double>(kSteps)));
  EXPECT_NEAR(mean / expected, 1, 0.005);
  // To nearest: one step from twice the goal is 0.05 % down, half a step of bf16 0.2 % or more.
  const float once = 2 * goal * 0.999f + 0.001f * goal;
  EXPECT_EQ(to_bf16(once).bits, to_bf16(2 * goal).bits);
}

}  // namespace
}  // namespace hoist::optim::test::bf16_moments_test
