// SPDX-License-Identifier: Apache-2.0
// The instruction set, the storage of the master and the place in memory never change a bit of the result.
#include <array>
#include <cmath>
#include <span>

#include <hoist/core/digest.hpp>

#include "tiles.hpp"

namespace hoist::optim::test::update_bits_test {
namespace {

// The state after `steps` steps from `seed`, split or whole.
Tile train(std::uint64_t seed, std::size_t count, DType dtype, const OptimizerOptions& options, int steps, bool split,
           bool extreme, std::size_t offset = 0) {
  Rng rng(seed);
  Tile tile(count, dtype, offset);
  extreme ? fill_extreme(tile, rng) : fill_ordinary(tile, rng);
  for (int step = 1; step <= steps; ++step) {
    const UpdateCoefficients coefficients(options, static_cast<std::uint64_t>(step), 0.37);
    (void)(split ? update_tile(coefficients, tile.split()) : update_tile(coefficients, tile.whole()));
    new_gradients(tile, rng);
  }
  return tile;
}

TEST(InstructionSets, NamesAreKnownAndTheBestIsActive) {
  const auto names = supported_instruction_sets();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(active_instruction_set(), names.front());
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
  EXPECT_GE(names.size(), 2u) << "every x86-64 has AVX2 beside the baseline by now";
#endif
  for (const auto& name : names) {
    const Forced forced(name);
    EXPECT_EQ(supported_instruction_sets(), names) << "forcing a set must not hide the others";
  }
  EXPECT_EQ(active_instruction_set(), names.front());
  RecordProperty("instruction_sets", ::testing::PrintToString(names));
}

TEST(InstructionSets, UnknownNameIsRefused) {
  EXPECT_THROW(force_instruction_set("AVX9"), UsageError);
  EXPECT_EQ(active_instruction_set(), supported_instruction_sets().front());
}

class Bits : public ::testing::TestWithParam<std::tuple<NamedOptions, DType, bool, bool>> {};

TEST_P(Bits, EveryInstructionSetAgrees) {
  const auto& [optimizer, dtype, split, extreme] = GetParam();
  const OptimizerOptions& options = optimizer.options;
  constexpr std::uint64_t kSeed = 20240601;
  const auto names = supported_instruction_sets();
  force_instruction_set(names.back());
  const Tile expected = train(kSeed, 4099, dtype, options, 8, split, extreme);
  for (const auto& name : names) {
    const Forced forced(name);
    const Tile tile = train(kSeed, 4099, dtype, options, 8, split, extreme);
    EXPECT_TRUE(tile.same_state(expected)) << name << " differs from " << names.back() << ", seed " << kSeed;
    EXPECT_TRUE(tile.intact()) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Bits,
                         ::testing::Combine(::testing::ValuesIn(every_optimizer()), ::testing::ValuesIn(kDTypes),
                                            ::testing::Bool(), ::testing::Bool()));

// The bits that stores hold, the same on x86 and ARM: twenty steps of every optimizer from ordinary numbers, one from
// numbers of every scale.
TEST(GoldenBits, AreTheOnesThatStoresHold) {
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    Digest digest;
    for (const auto& optimizer : every_optimizer()) {
      for (const bool split : {false, true}) {
        for (const bool extreme : {false, true}) {
          const Tile tile = train(31, 1037, DType::bf16, optimizer.options, extreme ? 1 : 20, split, extreme);
          for (std::size_t i = 0; i < tile.count(); ++i) {
            const std::array numbers{split ? tile.split_value(i) : tile.master_array[i], tile.moment1[i],
                                     tile.moment2[i]};
            for (const float number : numbers)  // the bits of a NaN differ among processors
              if (!std::isnan(number)) digest.update(std::as_bytes(std::span(&number, 1)));
          }
        }
      }
    }
    EXPECT_EQ(digest.value(), 13278784667168565613u) << name;
  }
}

TEST(SplitMasterUpdate, GivesTheBitsOfTheWholeMasterOverThousandSteps) {
  for (const auto& [name, options] : every_optimizer()) {
    SCOPED_TRACE(name);
    const Tile split = train(7, 515, DType::bf16, options, 1000, true, false);
    const Tile whole = train(7, 515, DType::bf16, options, 1000, false, false);
    for (std::size_t i = 0; i < split.count(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(split.split_value(i)), std::bit_cast<std::uint32_t>(whole.master_array[i]))
          << "element " << i;
      ASSERT_EQ(split.weight[i], split_master(whole.master_array[i]).weight) << "element " << i;
    }
    EXPECT_TRUE(split.moment1.same_bytes(whole.moment1));
    EXPECT_TRUE(split.moment2.same_bytes(whole.moment2));
  }
}

// Counts around every multiple of a vector, at every misalignment: same bits as in one long aligned tile, and nothing
// outside the arrays is written.
class Tails : public ::testing::TestWithParam<std::tuple<NamedOptions, DType, bool>> {};

TEST_P(Tails, PositionAndCountChangeNothing) {
  const auto& [optimizer, dtype, split] = GetParam();
  const UpdateCoefficients coefficients(optimizer.options, 5, 0.5);
  constexpr std::size_t kLongest = 150;  // past four prefetch blocks of 32 and two of the widest vectors
  Rng rng(99);
  Tile source(kLongest, dtype);
  fill_ordinary(source, rng);
  Tile expected(kLongest, dtype);
  const auto copy = [](Tile& to, const Tile& from, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      to.set_master(i, from.master_array[i]);
      to.moment1[i] = from.moment1[i];
      to.moment2[i] = from.moment2[i];
      to.set_gradient(i, from.gradient_value(i));
    }
  };
  const auto update = [&coefficients, splits = split](Tile& tile) {
    return splits ? update_tile(coefficients, tile.split()) : update_tile(coefficients, tile.whole());
  };
  copy(expected, source, kLongest);
  force_instruction_set(supported_instruction_sets().back());
  ASSERT_TRUE(update(expected));
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (std::size_t count = 0; count <= kLongest; ++count) {
      for (std::size_t offset = 0; offset < (count < 70 ? 17u : 3u); ++offset) {
        Tile tile(count, dtype, offset);
        copy(tile, source, count);
        ASSERT_TRUE(update(tile)) << name << " count " << count;
        ASSERT_TRUE(tile.intact()) << name << " wrote outside: count " << count << ", offset " << offset;
        for (std::size_t i = 0; i < count; ++i) {
          const float master = split ? tile.split_value(i) : tile.master_array[i];
          const float right = split ? expected.split_value(i) : expected.master_array[i];
          ASSERT_EQ(std::bit_cast<std::uint32_t>(master), std::bit_cast<std::uint32_t>(right))
              << name << " count " << count << " offset " << offset << " element " << i;
          ASSERT_EQ(tile.moment1[i], expected.moment1[i]);
          ASSERT_EQ(tile.moment2[i], expected.moment2[i]);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Tails,
                         ::testing::Combine(::testing::ValuesIn(every_optimizer()), ::testing::ValuesIn(kDTypes),
                                            ::testing::Bool()));

}  // namespace
}  // namespace hoist::optim::test::update_bits_test
