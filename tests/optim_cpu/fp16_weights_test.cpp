// SPDX-License-Identifier: Apache-2.0
// Weights of fp16 beside whole masters: the state goes through the arithmetic of every other tile, and the weights are
// the masters rounded to nearest even.
#include <cfenv>
#include <cmath>
#include <limits>

#include "tiles.hpp"

namespace hoist::optim::test::fp16_weights_test {
namespace {

// A tile's state with fp16 weights, whose moments are fp32 or bf16.
struct WithFp16 {
  WithFp16(std::size_t count, DType gradient_dtype, MomentType moments_in, std::size_t offset = 0)
      : state(count, gradient_dtype, offset),
        weight(count, offset),
        narrow1(count, offset),
        narrow2(count, offset),
        moments(moments_in) {
    for (std::size_t i = 0; i < count; ++i) weight[i] = 0x7E01;  // never read: a NaN that must not show
  }

  // Rounds the state's moments to bf16, and copies them into the bf16 moments.
  void adopt() {
    if (moments != MomentType::bf16) return;
    for (std::size_t i = 0; i < state.count(); ++i) {
      narrow1[i] = to_bf16(state.moment1[i]);
      narrow2[i] = to_bf16(state.moment2[i]);
      state.moment1[i] = to_float(narrow1[i]);
      state.moment2[i] = to_float(narrow2[i]);
    }
  }
  void* moment1() { return moments == MomentType::bf16 ? static_cast<void*>(narrow1.data()) : state.moment1.data(); }
  void* moment2() { return moments == MomentType::bf16 ? static_cast<void*>(narrow2.data()) : state.moment2.data(); }
  Fp16Tile tile(Rounding rounding = {}) {
    return {.weight = weight.data(),
            .master = state.master_array.data(),
            .moment1 = moment1(),
            .moment2 = moment2(),
            .gradient = state.gradient.data(),
            .gradient_dtype = state.gradient_dtype,
            .count = state.count(),
            .moment_type = moments,
            .rounding = rounding};
  }
  // The same masters as weights of fp32.
  WholeTile whole(Rounding rounding = {}) {
    WholeTile tile = state.whole();
    tile.moment1 = moment1();
    tile.moment2 = moment2();
    tile.moment_type = moments;
    tile.rounding = rounding;
    return tile;
  }
  bool intact() const { return state.intact() && weight.intact() && narrow1.intact() && narrow2.intact(); }
  bool same_state(const WithFp16& other) const {
    return state.master_array.same_bytes(other.state.master_array) && state.moment1.same_bytes(other.state.moment1) &&
           state.moment2.same_bytes(other.state.moment2) && narrow1.same_bytes(other.narrow1) &&
           narrow2.same_bytes(other.narrow2);
  }

  Tile state;
  Guarded<std::uint16_t> weight;
  Guarded<bf16> narrow1, narrow2;
  MomentType moments;
};

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
        WithFp16 made(count, g, m, count % 5);
        count % 2 == 0 ? fill_ordinary(made.state, rng) : fill_extreme(made.state, rng);
        made.adopt();
        return made;
      };
      WithFp16 tile = make(), expected = make();
      for (std::uint64_t step = 1; step <= 3; ++step) {
        const UpdateCoefficients c(optimizer.options, step, 0.5);
        const Rounding rounding{.key = static_cast<std::uint32_t>(step), .first = static_cast<std::uint32_t>(count)};
        (void)update_tile(c, tile.tile(rounding));
        (void)update_tile(c, expected.whole(rounding));
      }
      ASSERT_TRUE(tile.intact()) << name << " count " << count;
      for (std::size_t i = 0; i < count; ++i) {
        const float master = expected.state.master_array[i];
        if (std::isnan(master)) continue;  // the bits of a NaN are open
        ASSERT_EQ(std::bit_cast<std::uint32_t>(tile.state.master_array[i]), std::bit_cast<std::uint32_t>(master))
            << name << " count " << count << " element " << i;
        ASSERT_EQ(tile.weight[i], float_to_fp16(master)) << name << " count " << count << " element " << i;
      }
      if (count % 2 == 0) {
        ASSERT_TRUE(tile.same_state(expected)) << name << " count " << count;
      }
    }
  }
}

TEST_P(Fp16Weights, DoNotDependOnTiles) {
  const auto& [optimizer, gradient, moments] = GetParam();
  const UpdateCoefficients c(optimizer.options, 3, 0.5);
  constexpr std::size_t kCount = 1000;
  const auto updated = [&, &g = gradient, &m = moments](std::size_t tile_count) {
    Rng rng(8);
    WithFp16 all(kCount, g, m);
    fill_ordinary(all.state, rng);
    all.adopt();
    const std::size_t moment_bytes = m == MomentType::bf16 ? 2 : 4;
    for (std::size_t first = 0; first < kCount; first += tile_count) {
      Fp16Tile part = all.tile({.key = 77, .first = static_cast<std::uint32_t>(first)});
      part.weight += first;
      part.master += first;
      part.moment1 = static_cast<std::byte*>(part.moment1) + first * moment_bytes;
      part.moment2 = static_cast<std::byte*>(part.moment2) + first * moment_bytes;
      part.gradient = static_cast<const std::byte*>(part.gradient) + first * dtype_bytes(g);
      part.count = std::min(tile_count, kCount - first);
      EXPECT_TRUE(update_tile(c, part));
    }
    return all;
  };
  const WithFp16 expected = updated(kCount);
  for (const std::size_t tile_count : {1u, 7u, 32u, 129u, 999u}) {
    const WithFp16 tile = updated(tile_count);
    EXPECT_TRUE(tile.same_state(expected) && tile.weight.same_bytes(expected.weight)) << tile_count;
  }
}

// Weights of these masters, which an update with a learning rate of zero leaves as they are.
std::vector<std::uint16_t> rounded(const std::vector<float>& masters) {
  const OptimizerOptions still{.kind = OptimizerKind::lion, .learning_rate = 0};
  WithFp16 tile(masters.size(), DType::fp16, MomentType::fp32);
  for (std::size_t i = 0; i < masters.size(); ++i) tile.state.master_array[i] = masters[i];
  (void)update_tile(UpdateCoefficients(still, 1, 1.0), tile.tile());
  return {tile.weight.data(), tile.weight.data() + masters.size()};
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
        WithFp16 tile(83, DType::fp16, MomentType::fp32);  // zero gradients and moments leave masters as they are
        tile.state.master_array[bad] = std::bit_cast<float>(sign | (kFp16MasterLimitBits - 1));
        ASSERT_TRUE(update_tile(coefficients, tile.tile())) << name << " element " << bad;
        EXPECT_EQ(tile.weight[bad], 0x7BFF | (sign >> 16));
        tile.state.master_array[bad] = std::bit_cast<float>(sign | kFp16MasterLimitBits);
        ASSERT_FALSE(update_tile(coefficients, tile.tile())) << name << " element " << bad;
        EXPECT_EQ(tile.weight[bad], 0x7C00 | (sign >> 16));
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
        WithFp16 tile(45, DType::fp16, MomentType::fp32);
        ASSERT_TRUE(update_tile(c, tile.tile())) << optimizer;
        tile.state.set_gradient(37, bad);
        EXPECT_FALSE(update_tile(c, tile.tile())) << optimizer << ", " << name << ": " << bad;
      }
    }
  }
}

}  // namespace
}  // namespace hoist::optim::test::fp16_weights_test
