// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <limits>

#include <gtest/gtest.h>

#include <hoist/core/dtype.hpp>
#include <hoist/core/rng.hpp>

#include "split_rule.hpp"

namespace hoist::test::dtype_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

TEST(DType, BytesAndNames) {
  EXPECT_EQ(dtype_bytes(DType::bf16), 2u);
  EXPECT_EQ(dtype_bytes(DType::fp16), 2u);
  EXPECT_EQ(dtype_bytes(DType::fp32), 4u);
  EXPECT_EQ(dtype_name(DType::bf16), "bf16");
  EXPECT_EQ(dtype_name(DType::fp16), "fp16");
  EXPECT_EQ(dtype_name(DType::fp32), "fp32");
}

// binary16 by its definition, in doubles.
double fp16_by_definition(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const double mantissa = bits & 0x3FF;
  const double magnitude = exponent == 0      ? std::ldexp(mantissa, -24)
                           : exponent == 0x1F ? std::numeric_limits<double>::infinity()
                                              : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(Fp16, EveryPatternHasItsValueAndComesBack) {
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    const float value = fp16_to_float(bits);
    if ((bits & 0x7FFF) > 0x7C00) {
      EXPECT_TRUE(std::isnan(value)) << pattern;
      EXPECT_EQ(std::signbit(value), (bits & 0x8000) != 0) << pattern;
      const std::uint16_t back = float_to_fp16(value);
      EXPECT_GT(back & 0x7FFF, 0x7C00) << pattern;  // a NaN still, of the same sign
      EXPECT_EQ(back & 0x8000, bits & 0x8000) << pattern;
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), fp16_by_definition(bits)) << pattern;
    ASSERT_EQ(float_to_fp16(value), bits) << pattern;
  }
}

// Between neighbours: nearer one wins, halfway goes to the even one.
TEST(Fp16, RoundsToNearestEven) {
  for (std::uint32_t pattern = 0; pattern < 0x7C00; ++pattern) {
    const auto low = static_cast<std::uint16_t>(pattern);
    const auto high = static_cast<std::uint16_t>(pattern + 1);
    const double low_value = fp16_by_definition(low);
    const double high_value = high == 0x7C00 ? 65536.0 : fp16_by_definition(high);
    const auto half = static_cast<float>((low_value + high_value) / 2);
    const std::uint16_t even = (low & 1) == 0 ? low : high;
    for (const std::uint16_t sign : {std::uint16_t{0}, std::uint16_t{0x8000}}) {
      const float s = sign == 0 ? 1.0f : -1.0f;
      ASSERT_EQ(float_to_fp16(s * half), sign | even) << pattern;
      ASSERT_EQ(float_to_fp16(s * std::nextafter(half, 0.0f)), sign | low) << pattern;
      ASSERT_EQ(float_to_fp16(s * std::nextafter(half, kInfinity)), sign | high) << pattern;
    }
  }
  EXPECT_EQ(float_to_fp16(kInfinity), 0x7C00);
  EXPECT_EQ(float_to_fp16(-kInfinity), 0xFC00);
  EXPECT_EQ(float_to_fp16(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(float_to_fp16(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(float_to_fp16(-0.0f), 0x8000);
}

TEST(Fp16, DoesNotDependOnTheRoundingModeOfTheHost) {
  const float halfway = 1.0f + 0x1.0p-11f;     // between 1 and 1 + 2^-10
  const float halfway_subnormal = 0x1.8p-24f;  // between 2^-24 and 2^-23
  for (const int mode : {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    std::fesetround(mode);
    const std::uint16_t normal = float_to_fp16(halfway);
    const std::uint16_t subnormal = float_to_fp16(halfway_subnormal);
    std::fesetround(FE_TONEAREST);
    EXPECT_EQ(normal, 0x3C00) << "mode " << mode;
    EXPECT_EQ(subnormal, 2) << "mode " << mode;
  }
}

TEST(Bf16, EveryPatternIsTheUpperHalfOfItsFloatAndComesBack) {
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const bf16 value{static_cast<std::uint16_t>(pattern)};
    ASSERT_EQ(bits_of(to_float(value)), pattern << 16);
    const bf16 back = to_bf16(to_float(value));
    if (std::isnan(to_float(value))) {
      EXPECT_TRUE(std::isnan(to_float(back))) << pattern;
      EXPECT_EQ(back.bits & 0x8000, value.bits & 0x8000) << pattern;
    } else {
      EXPECT_EQ(back, value) << pattern;
    }
  }
}

TEST(Bf16, RoundsAsTheSplitDoesAndKeepsNaN) {
  EXPECT_EQ(to_bf16(1.0f + 0x1.0p-8f).bits, 0x3F81);  // a half goes away from zero
  EXPECT_EQ(to_bf16(-1.0f - 0x1.0p-8f).bits, 0xBF81);
  EXPECT_EQ(to_bf16(std::nextafter(1.0f + 0x1.0p-8f, 0.0f)).bits, 0x3F80);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7F80);
  EXPECT_EQ(to_bf16(kInfinity).bits, 0x7F80);
  // NaNs whose payload lies in the half that is dropped, or would carry past it.
  for (const std::uint32_t nan : {0x7F800001u, 0x7F80FFFFu, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7FC00000u}) {
    const bf16 value = to_bf16(std::bit_cast<float>(nan));
    EXPECT_TRUE(std::isnan(to_float(value))) << std::hex << nan;
    EXPECT_EQ(value.bits >> 15, nan >> 31) << std::hex << nan;
  }
}

TEST(SplitMaster, HoldsAroundEveryWeight) {
  for (std::uint32_t high = 0; high < 65536; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7FFEu, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFEu, 0xFFFFu}) {
      const char* broken = broken_split_rule((high << 16) | low);
      ASSERT_EQ(broken, nullptr) << std::hex << "pattern 0x" << ((high << 16) | low) << ": " << broken;
    }
  }
}

TEST(SplitMaster, HoldsForRandomPatterns) {
  constexpr std::uint64_t kSeed = 77;
  for (std::uint64_t i = 0; i < 2000000; ++i) {
    const auto pattern = static_cast<std::uint32_t>(random_bits(kSeed, i));
    const char* broken = broken_split_rule(pattern);
    ASSERT_EQ(broken, nullptr) << std::hex << "pattern 0x" << pattern << " (seed " << kSeed << "): " << broken;
  }
}

TEST(SplitMaster, TheCommittableLimitIsWhereTheWeightBecomesInfinite) {
  const float below = std::bit_cast<float>(kMasterLimitBits - 1);
  const float at = std::bit_cast<float>(kMasterLimitBits);
  EXPECT_TRUE(std::isfinite(to_float(split_master(below).weight)));
  EXPECT_TRUE(std::isinf(to_float(split_master(at).weight)));
  EXPECT_TRUE(master_is_committable(below));
  EXPECT_TRUE(master_is_committable(-below));
  EXPECT_FALSE(master_is_committable(at));
  EXPECT_FALSE(master_is_committable(-at));
  EXPECT_FALSE(master_is_committable(kInfinity));
  EXPECT_FALSE(master_is_committable(std::numeric_limits<float>::quiet_NaN()));
}

// A weight from a bf16 checkpoint has remainder zero.
TEST(SplitMaster, OfABf16ValueLeavesNoRemainder) {
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const bf16 weight{static_cast<std::uint16_t>(pattern)};
    ASSERT_EQ(split_master(to_float(weight)).weight, weight);
    ASSERT_EQ(split_master(to_float(weight)).remainder, 0);
  }
}

// Usable at compile time, as constants of formats are.
static_assert(split_master(1.0f).weight.bits == 0x3F80 && split_master(1.0f).remainder == 0);
static_assert(join_master(bf16{0x3F80}, -1) == std::bit_cast<float>(0x3F7FFFFFu));

}  // namespace
}  // namespace hoist::test::dtype_test
