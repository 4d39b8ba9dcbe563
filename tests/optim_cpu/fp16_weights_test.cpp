// SPDX-License-Identifier: Apache-2.0
// Weights of fp16 beside whole masters: the state goes through the arithmetic of every other tile, and the weights are
// the masters rounded to nearest even.
#include <cfenv>
#include <cmath>
#include <limits>

#include "packed_tile.hpp"

namespace hoist::optim::test::fp16_weights_test {
namespace {

// A tile with fp16 weights that no update reads: they begin as a NaN, which must not show.
PackedTile tile_of(std::size_t count, DType gradient, MomentType moments = MomentType::fp32, std::size_t offset = 0) {
  PackedTile tile({"fp16", DType::fp16, moments}, count, gradient, offset);
  for (std::size_t i = 0; i < count; ++i) tile.fp16_weight[i] = 0x7E01;
  return tile;
}

class Fp16Weights : public ::testing::TestWithParam<std::tuple<NamedOptions, DType, MomentType>> {};
INSTANTIATE_TEST_SUITE_P(All, Fp16Weights,
                         ::testing::Combine(::testing::ValuesIn(every_optimizer()), ::testing::ValuesIn(kDTypes),
                                            ::testing::Values(MomentType::fp32, MomentType::bf16)));

// Every instruction set, at every count up to past two of the widest vectors, unaligned, over several steps. fp32
// weights are compared with the scalar text of the formulas elsewhere (DocumentedOrder, Bits).
TEST_P(Fp16Weights, AreTheMastersOfAnyOtherTileRounded) {
  const auto& [optimizer, gradient, moments] = GetParam();
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (std::size_t count = 0; count < 150; count += count < 70 ? 1 : 13) {
      const auto make = [&, &g = gradient, &m = moments] {
        Rng rng(count + 1);
        PackedTile made = tile_of(count, g, m, count % 5);
        count % 2 == 0 ? fill_ordinary(made.wide, rng) : fill_extreme(made.wide, rng);
        made.adopt();
        return made;
      };
      PackedTile tile = make(), expected = make();
      expected.form.weights = DType::fp32;
      for (std::uint64_t step = 1; step <= 3; ++step) {
        const UpdateCoefficients c(optimizer.options, step, 0.5);
        const Rounding rounding{.key = static_cast<std::uint32_t>(step), .first = static_cast<std::uint32_t>(count)};
        (void)tile.update(c, rounding);
        (void)expected.update(c, rounding);
      }
      ASSERT_TRUE(tile.intact()) << name << " count " << count;
      for (std::size_t i = 0; i < count; ++i) {
        const float master = expected.wide.master_array[i];
        if (std::isnan(master)) continue;  // the bits of a NaN are open
        ASSERT_EQ(std::bit_cast<std::uint32_t>(tile.wide.master_array[i]), std::bit_cast<std::uint32_t>(master))
            << name << " count " << count << " element " << i;
        ASSERT_EQ(tile.fp16_weight[i], float_to_fp16(master)) << name << " count " << count << " element " << i;
      }
      if (count % 2 == 0) {
        ASSERT_TRUE(tile.wide.same_state(expected.wide) && tile.narrow1.same_bytes(expected.narrow1) &&
                    tile.narrow2.same_bytes(expected.narrow2))
            << name << " count " << count;
      }
    }
  }
}

TEST_P(Fp16Weights, DoNotDependOnTiles) {
  const auto& [optimizer, gradient, moments] = GetParam();
  const auto make = [&g = gradient, &m = moments] { return tile_of(1000, g, m); };
  expect_that_tiles_change_nothing(optimizer.options, make, {1, 7, 32, 129, 999});
}

// Weights of these masters, which an update with a learning rate of zero leaves as they are.
std::vector<std::uint16_t> rounded(const std::vector<float>& masters) {
  const OptimizerOptions still{.kind = OptimizerKind::lion, .learning_rate = 0};
  PackedTile tile = tile_of(masters.size(), DType::fp16);
  for (std::size_t i = 0; i < masters.size(); ++i) tile.wide.master_array[i] = masters[i];
  (void)tile.update(UpdateCoefficients(still, 1, 1.0), {});
  return {tile.fp16_weight.data(), tile.fp16_weight.data() + masters.size()};
}

// Around every number of fp16 and every point between two: the values at which rounding can go wrong.
std::vector<float> edges() {
  std::vector<float> values{0.0f,
                            std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::max(),
                            std::numeric_limits<float>::min(),
                            std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::quiet_NaN(),
                            65504.0f,
                            65535.0f,
                            65536.0f};
  for (std::uint32_t pattern = 0; pattern < 0x7C00; ++pattern) {
    const float low = fp16_to_float(static_cast<std::uint16_t>(pattern));
    const float high = pattern == 0x7BFF ? 65536.0f : fp16_to_float(static_cast<std::uint16_t>(pattern + 1));
    const float middle = low + (high - low) / 2;
    for (const float at : {low, middle}) {
      values.push_back(std::nextafter(at, -1.0f));
      values.push_back(at);
      values.push_back(std::nextafter(at, 1e6f));
    }
  }
  Rng rng(3);
  for (int i = 0; i < 100'000; ++i) values.push_back(any_scale(rng));
  const std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) values.push_back(-values[i]);
  return values;
}

TEST(Fp16Rounding, IsTheScalarOneOnEveryInstructionSet) {
  const std::vector<float> masters = edges();
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    const std::vector<std::uint16_t> weights = rounded(masters);
    for (std::size_t i = 0; i < masters.size(); ++i) {
      ASSERT_EQ(weights[i], float_to_fp16(masters[i]))
          << name << ": " << masters[i] << ", bits " << std::bit_cast<std::uint32_t>(masters[i]);
    }
  }
}

TEST(Fp16Rounding, DoesNotDependOnTheRoundingModeOfTheHost) {
  const std::vector<float> masters = edges();
  const std::vector<std::uint16_t> expected = rounded(masters);
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    std::fesetround(mode);
    const std::vector<std::uint16_t> weights = rounded(masters);
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(weights, expected) << mode;
  }
}

TEST(Fp16Committable, AWeightThatWouldBeInfiniteIsRefusedExactly) {
  OptimizerOptions options;
  options.weight_decay = 0;
  const UpdateCoefficients coefficients(options, 1, 1.0);
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (std::size_t bad = 0; bad < 83; ++bad) {
      for (const std::uint32_t sign : {0u, 0x80000000u}) {
        PackedTile tile = tile_of(83, DType::fp16);  // zero gradients and moments leave masters as they are
        tile.wide.master_array[bad] = std::bit_cast<float>(sign | (kFp16MasterLimitBits - 1));
        ASSERT_TRUE(tile.update(coefficients, {})) << name << " element " << bad;
        EXPECT_EQ(tile.fp16_weight[bad], 0x7BFF | (sign >> 16));
        tile.wide.master_array[bad] = std::bit_cast<float>(sign | kFp16MasterLimitBits);
        ASSERT_FALSE(tile.update(coefficients, {})) << name << " element " << bad;
        EXPECT_EQ(tile.fp16_weight[bad], 0x7C00 | (sign >> 16));
      }
    }
  }
  EXPECT_TRUE(master_is_committable(65519.0f, DType::fp16));
  EXPECT_FALSE(master_is_committable(65520.0f, DType::fp16));
  EXPECT_TRUE(master_is_committable(65520.0f, DType::bf16));
}

TEST(Fp16Committable, WhatIsNotFiniteIsRefused) {
  for (const auto& [optimizer, standard] : every_optimizer()) {
    OptimizerOptions options = standard;
    options.weight_decay = 0;
    const UpdateCoefficients c(options, 1, 1.0);
    for (const auto& name : supported_instruction_sets()) {
      const Forced forced(name);
      for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        PackedTile tile = tile_of(45, DType::fp16);
        ASSERT_TRUE(tile.update(c, {})) << optimizer;
        tile.wide.set_gradient(37, bad);
        EXPECT_FALSE(tile.update(c, {})) << optimizer << ", " << name << ": " << bad;
      }
    }
  }
}

}  // namespace
}  // namespace hoist::optim::test::fp16_weights_test
