// SPDX-License-Identifier: Apache-2.0
// The format of 8-bit moments by itself: its range, its precision, and that encoding a decoded block changes nothing.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include <hoist/optim_cpu/block_fp8.hpp>

#include "tiles.hpp"

namespace hoist::optim::test::block_fp8_test {
namespace {

using Values = std::array<float, kMomentBlock>;
struct Block {
  std::array<std::uint8_t, kMomentBlock> codes{};
  std::uint8_t scale = 0;
  friend bool operator==(const Block&, const Block&) = default;
};

Block encoded(const Values& values, Moment moment, const std::array<std::uint32_t, kMomentBlock>& added = kAllNearest) {
  Block block;
  EXPECT_TRUE(encode_block(values, added, moment, block.codes.data(), block.scale));
  return block;
}
Values decoded(const Block& block, Moment moment) {
  Values values;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = decode_moment(block.codes[i], block.scale, moment);
  return values;
}
std::array<std::uint32_t, kMomentBlock> random_added(Rng& rng) {
  std::array<std::uint32_t, kMomentBlock> added{};
  for (std::uint32_t& one : added) one = static_cast<std::uint32_t>(rng.below(1u << fp8::kDroppedBits));
  return added;
}
// Elements whose exponents lie within `spread` below a common one.
Values random_values(Rng& rng, Moment moment, int exponent, int spread) {
  Values values{};
  for (float& value : values) {
    value = rng.below(9) == 0 ? 0.0f : any_scale(rng, exponent - spread, exponent);
    if (moment == Moment::second) value = std::abs(value);
  }
  return values;
}

constexpr Moment kMoments[] = {Moment::first, Moment::second};
constexpr int range_of(Moment moment) { return static_cast<int>(fp8::top(moment)) - 1; }  // exponents below the block's

TEST(BlockFp8, HoldsItsNumbersAsSmallFloatsDo) {
  // The block's exponent is that of 1.0 to 1.9375.
  constexpr std::uint8_t kOne = 127 - fp8::kLeastExponent;
  EXPECT_EQ(decode_moment(0x00, kOne, Moment::first), 0.0f);
  EXPECT_EQ(decode_moment(0x7F, kOne, Moment::first), 1.9375f);
  EXPECT_EQ(decode_moment(0xF0, kOne, Moment::first), -1.0f);
  EXPECT_EQ(decode_moment(0x10, kOne, Moment::first), 0x1.0p-6f);
  EXPECT_EQ(decode_moment(0x8F, kOne, Moment::first), -0x0.Fp-6f);
  EXPECT_EQ(decode_moment(0x01, kOne, Moment::first), 0x1.0p-10f);
  EXPECT_EQ(decode_moment(0xFF, kOne, Moment::second), 1.9375f);
  EXPECT_EQ(decode_moment(0x10, kOne, Moment::second), 0x1.0p-14f);
  EXPECT_EQ(decode_moment(0x01, kOne, Moment::second), 0x1.0p-18f);
  for (const Moment moment : kMoments) {  // codes are in the order of what they mean, without gaps
    const unsigned most = moment == Moment::first ? 0x7F : 0xFF;
    for (unsigned code = 1; code <= most; ++code) {
      const float low = decode_moment(static_cast<std::uint8_t>(code - 1), 200, moment);
      const float high = decode_moment(static_cast<std::uint8_t>(code), 200, moment);
      const float step = decode_moment(1, 200, moment) * static_cast<float>(1u << (code < 17 ? 0 : (code - 17) / 16));
      ASSERT_EQ(high - low, step) << code;
    }
  }
}

TEST(BlockFp8, AMemoryOfZerosIsABlockOfZeros) {
  for (const Moment moment : kMoments) {
    EXPECT_EQ(decoded(Block{}, moment), Values{});
    EXPECT_EQ(encoded(Values{}, moment), Block{});
    Rng rng(3);
    EXPECT_EQ(encoded(Values{}, moment, random_added(rng)), Block{});
  }
}

// To nearest: half a step of the number's power of two, or of the least one the block has.
TEST(BlockFp8, NearestIsNear) {
  Rng rng(1);
  for (int round = 0; round < 20000; ++round) {
    for (const Moment moment : kMoments) {
      const int exponent = -60 + static_cast<int>(rng.below(180));
      const Values values = random_values(rng, moment, exponent, 24);
      const Values held = decoded(encoded(values, moment), moment);
      const float largest =
          *std::max_element(held.begin(), held.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
      if (largest == 0) continue;
      const int least = std::ilogb(largest) - range_of(moment);
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (values[i] == 0) {
          ASSERT_EQ(held[i], 0.0f);
          continue;
        }
        const double step = std::ldexp(1.0, std::max(std::ilogb(values[i]), least) - 4);
        const double error = std::abs(static_cast<double>(held[i]) - static_cast<double>(values[i]));
        const bool lifted = moment == Moment::second && static_cast<double>(held[i]) == step && error < step;
        ASSERT_TRUE(error <= step / 2 || lifted) << values[i] << " as " << held[i] << " beside " << largest;
      }
    }
  }
}

// However a block was rounded, decoding it and rounding it again, in any way, changes no byte.
TEST(BlockFp8, EncodingWhatWasDecodedChangesNothing) {
  Rng rng(2);
  for (int round = 0; round < 50000; ++round) {
    for (const Moment moment : kMoments) {
      const int exponent = -126 + static_cast<int>(rng.below(250));
      const Values values = random_values(rng, moment, exponent, static_cast<int>(rng.below(30)));
      const Block block = encoded(values, moment, random_added(rng));
      const Values held = decoded(block, moment);
      ASSERT_EQ(encoded(held, moment), block);
      ASSERT_EQ(encoded(held, moment, random_added(rng)), block);
    }
  }
}

// A neighbour that comes or goes takes others along only where the block's range ends.
TEST(BlockFp8, ANewScaleLeavesNumbersInRangeWhereTheyAre) {
  Rng rng(4);
  for (const Moment moment : kMoments) {
    Values values = random_values(rng, moment, -20, 2);
    const Values held = decoded(encoded(values, moment), moment);
    for (int up = 0; up <= range_of(moment) - 3; ++up) {
      Values with_larger = held;
      with_larger[5] = std::ldexp(1.0f, -20 + up);
      const Values again = decoded(encoded(with_larger, moment, random_added(rng)), moment);
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(again[i], with_larger[i]) << up;
      }
    }
  }
}

TEST(BlockFp8, ASecondMomentAboveZeroStaysSo) {
  Values values{1.0f, 1e-20f, 0.0f, 1e-37f, 0x1.0p-19f, 0x1.0p-18f, 0.5f, 1e-30f};
  const auto none = std::array<std::uint32_t, kMomentBlock>{};
  const Values held = decoded(encoded(values, Moment::second, none), Moment::second);
  EXPECT_EQ(held, (Values{1.0f, 0x1.0p-18f, 0.0f, 0x1.0p-18f, 0x1.0p-18f, 0x1.0p-18f, 0.5f, 0x1.0p-18f}));
  values[0] = -1.0f;
  const Values first = decoded(encoded(values, Moment::first, none), Moment::first);
  EXPECT_EQ(first, (Values{-1.0f, 0, 0, 0, 0, 0, 0.5f, 0}));
}

// Stochastic rounding over all random bits that there are, in every part of the range: the mean is the value.
TEST(BlockFp8, RandomBitsRoundToTheValueOnAverage) {
  for (const Moment moment : kMoments) {
    const int range = range_of(moment);
    for (const double value : {1.03, 1.99, 0.3, std::ldexp(1.3, -range), std::ldexp(1.97, -range - 1),
                               std::ldexp(1.01, -range - 1), std::ldexp(0.7, -range - 2)}) {
      double sum = 0;
      constexpr int kBits = 12;
      for (std::uint32_t random = 0; random < 1u << kBits; ++random) {
        std::array<std::uint32_t, kMomentBlock> added = kAllNearest;
        added[1] = random << (fp8::kDroppedBits - kBits) | 1u << (fp8::kDroppedBits - kBits - 1);
        const Values values{1.5f, static_cast<float>(value)};
        sum += static_cast<double>(decoded(encoded(values, moment, added), moment)[1]);
      }
      const double step = std::ldexp(1.0, std::max(std::ilogb(value), -range) - 4);
      EXPECT_NEAR(sum / (1 << kBits), value, step / (1 << kBits)) << (moment == Moment::first ? "first " : "second ");
    }
  }
}

TEST(BlockFp8, WhatRoundsToInfinityIsRefused) {
  Values values{};
  Block block;
  const auto none = std::array<std::uint32_t, kMomentBlock>{};
  for (const Moment moment : kMoments) {
    values[3] = std::numeric_limits<float>::max();
    EXPECT_FALSE(encode_block(values, kAllNearest, moment, block.codes.data(), block.scale));
    EXPECT_TRUE(encode_block(values, none, moment, block.codes.data(), block.scale));
    EXPECT_EQ(decoded(block, moment)[3], 0x1.Fp127f);
    values[3] = std::numeric_limits<float>::infinity();
    EXPECT_FALSE(encode_block(values, none, moment, block.codes.data(), block.scale));
  }
}

// The format holds no denormals, and no numbers so small that their step would be a denormal.
TEST(BlockFp8, TheSmallestNumbers) {
  for (const Moment moment : kMoments) {
    Values values{0x1.0p-127f, 0x1.0p-149f};
    EXPECT_EQ(encoded(values, moment), Block{});
    values = {0x1.0p-126f};
    const float held = decoded(encoded(values, moment), moment)[0];
    EXPECT_EQ(held, moment == Moment::first ? 0.0f : 0x1.0p-113f);
    values = {0x1.8p-95f, 0x1.0p-105f};
    EXPECT_EQ(decoded(encoded(values, moment), moment), values);
  }
}

TEST(Master24, IsTheNearest) {
  Rng rng(5);
  for (int round = 0; round < 100000; ++round) {
    const float master = any_scale(rng);
    const float kept = to_master24(master);
    const SplitMaster split = split_master(kept);
    ASSERT_EQ(split.remainder % 256, 0);
    ASSERT_EQ(join_master24(split.weight, static_cast<std::int8_t>(split.remainder / 256)), kept);
    ASSERT_EQ(to_master24(kept), kept);
    const auto distance = static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(kept) & 0x7FFFFFFFu) -
                          static_cast<std::int64_t>(std::bit_cast<std::uint32_t>(master) & 0x7FFFFFFFu);
    ASSERT_LE(std::abs(distance), 0x80);
  }
  const auto last = std::bit_cast<float>(kMasterLimitBits - 1);
  EXPECT_TRUE(master_is_committable(to_master24(last)));
  EXPECT_EQ(to_master24(-last), -to_master24(last));
}

}  // namespace
}  // namespace hoist::optim::test::block_fp8_test
