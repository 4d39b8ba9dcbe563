// SPDX-License-Identifier: Apache-2.0
// The arithmetic of stripes, against a model that lays one unit after the other.
#include <map>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/aio/stripe_layout.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::aio::stripe_layout_test {
namespace {

using testing::ElementsAre;

constexpr std::uint64_t kUnit = 4 * kKiB;

// The drive of each of the first `count` units.
std::vector<unsigned> drives_of_units(const StripeLayout& layout, std::uint64_t count) {
  std::vector<unsigned> drives;
  for (std::uint64_t unit = 0; unit < count; ++unit) drives.push_back(layout.place(unit * layout.unit_bytes()).drive);
  return drives;
}

// Every choice of up to three weights of up to seven, and some larger ones.
std::vector<std::vector<std::uint32_t>> many_weights() {
  std::vector<std::vector<std::uint32_t>> all;
  for (std::uint32_t a = 1; a <= 7; ++a) {
    all.push_back({a});
    for (std::uint32_t b = 1; b <= 7; ++b) {
      all.push_back({a, b});
      for (std::uint32_t c = 1; c <= 7; ++c) all.push_back({a, b, c});
    }
  }
  all.push_back({16, 1});
  all.push_back({16, 15, 3, 1, 7});
  all.push_back(std::vector<std::uint32_t>(StripeLayout::kDriveCountMax, 1));
  return all;
}

// The pattern is what lies on disk: these lines never change.
TEST(StripeLayout, PatternIsFixed) {
  EXPECT_THAT(drives_of_units({kUnit, {1}}, 4), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(drives_of_units({kUnit, {1, 1}}, 6), ElementsAre(0, 1, 0, 1, 0, 1));
  EXPECT_THAT(drives_of_units({kUnit, {3, 1}}, 8), ElementsAre(0, 0, 1, 0, 0, 0, 1, 0));
  EXPECT_THAT(drives_of_units({kUnit, {2, 3}}, 5), ElementsAre(1, 0, 1, 0, 1));
  EXPECT_THAT(drives_of_units({kUnit, {4, 2, 1}}, 7), ElementsAre(0, 1, 0, 2, 0, 1, 0));
}

TEST(StripeLayout, EveryByteHasOnePlaceAndComesBackFromIt) {
  for (const auto& weights : many_weights()) {
    SCOPED_TRACE(testing::PrintToString(weights));
    const StripeLayout layout(kUnit, weights);
    std::uint64_t units_in_round = 0;
    for (const std::uint32_t weight : layout.weights()) units_in_round += weight;
    std::vector<std::uint64_t> next(weights.size(), 0);  // where each drive goes on
    for (std::uint64_t unit = 0; unit < 3 * units_in_round; ++unit) {
      for (const std::uint64_t within : {std::uint64_t{0}, std::uint64_t{1}, kUnit - 1}) {
        const std::uint64_t logical = unit * kUnit + within;
        const auto place = layout.place(logical);
        ASSERT_LT(place.drive, weights.size());
        ASSERT_EQ(place.offset_bytes, next[place.drive] + within) << "units of a drive leave no gap";
        ASSERT_EQ(layout.logical_offset(place.drive, place.offset_bytes), logical);
      }
      next[layout.place(unit * kUnit).drive] += kUnit;
    }
    for (unsigned d = 0; d < layout.drive_count(); ++d)
      EXPECT_EQ(next[d], 3 * kUnit * layout.weights()[d]) << "each round gives a drive its weight";
  }
}

TEST(StripeLayout, ARunIsAsLongAsItSays) {
  for (const auto& weights : many_weights()) {
    if (weights.size() == 1) continue;
    SCOPED_TRACE(testing::PrintToString(weights));
    const StripeLayout layout(kUnit, weights);
    for (std::uint64_t unit = 0; unit < 60; ++unit) {
      const auto place = layout.place(unit * kUnit + 1);
      ASSERT_EQ((place.run_bytes + 1) % kUnit, 0u);
      for (std::uint64_t at = kUnit; at < place.run_bytes; at += kUnit) {
        const auto later = layout.place(unit * kUnit + 1 + at);
        ASSERT_EQ(later.drive, place.drive);
        ASSERT_EQ(later.offset_bytes, place.offset_bytes + at);
      }
      ASSERT_NE(layout.place(unit * kUnit + 1 + place.run_bytes).drive, place.drive);
    }
  }
  EXPECT_GT(StripeLayout::one_drive().place(123).run_bytes, std::uint64_t{1} << 62);
}

TEST(StripeLayout, ARangeIsOneRangeOnEachDrive) {
  for (const auto& weights : many_weights()) {
    SCOPED_TRACE(testing::PrintToString(weights));
    const StripeLayout layout(kUnit, weights);
    std::vector<std::uint64_t> counted(weights.size(), 0);
    for (std::uint64_t logical = 0; logical < 200 * kUnit; logical += kUnit / 4) {  // counts quarters of units
      std::uint64_t sum = 0;
      for (unsigned d = 0; d < weights.size(); ++d) {
        const std::uint64_t asked = layout.drive_bytes(d, logical);
        ASSERT_EQ(asked, counted[d]) << "drive " << d << " of the first " << logical << " bytes";
        sum += asked;
      }
      ASSERT_EQ(sum, logical);
      counted[layout.place(logical).drive] += kUnit / 4;
    }
  }
}

TEST(StripeLayout, UnitsOfADriveAreSpreadEvenly) {
  for (const auto& weights : many_weights()) {
    SCOPED_TRACE(testing::PrintToString(weights));
    const StripeLayout layout(kUnit, weights);
    double sum = 0;
    for (const std::uint32_t weight : layout.weights()) sum += weight;
    // Never more than one unit per drive away from its share; a file of any length is as balanced as units allow.
    for (std::uint64_t units = 1; units <= 100; ++units) {
      for (unsigned d = 0; d < weights.size(); ++d) {
        const double has = static_cast<double>(layout.drive_bytes(d, units * kUnit)) / kUnit;
        const double share = static_cast<double>(units) * layout.weights()[d] / sum;
        ASSERT_LT(std::abs(has - share), static_cast<double>(weights.size())) << units;
      }
    }
  }
}

TEST(StripeLayout, OffsetsBeyondFourTebibytesAreExact) {
  const StripeLayout layout(kMiB, {5, 3, 4});
  Rng rng(77);
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t logical = (std::uint64_t{1} << 42) + (rng.bits() >> 20);
    const auto place = layout.place(logical);
    ASSERT_EQ(layout.logical_offset(place.drive, place.offset_bytes), logical) << "seed 77, " << i;
    ASSERT_EQ(layout.drive_bytes(place.drive, logical), place.offset_bytes);
  }
}

TEST(StripeLayout, TextComesBackAndNothingElseIsAccepted) {
  for (const auto& weights : many_weights()) {
    const StripeLayout layout(64 * kKiB, weights);
    const auto decoded = StripeLayout::decode(layout.encode());
    ASSERT_TRUE(decoded) << layout.encode();
    EXPECT_EQ(*decoded, layout);
  }
  EXPECT_EQ(StripeLayout(kMiB, {6, 2}).encode(), "stripe1 unit=1048576 weights=3,1");
  EXPECT_EQ(StripeLayout(kMiB, {6, 2}), StripeLayout(kMiB, {3, 1}));
  EXPECT_NE(StripeLayout(kMiB, {3, 1}), StripeLayout(kMiB, {1, 3}));
  EXPECT_NE(StripeLayout(kMiB, {3, 1}), StripeLayout(2 * kMiB, {3, 1}));
  for (const char* text :
       {"", "stripe1", "stripe2 unit=4096 weights=1", "stripe1 unit=4096 weights=", "stripe1 unit=4096 weights=1,",
        "stripe1 unit=4096 weights=1,,1", "stripe1 unit=4096 weights=0,1", "stripe1 unit=4096 weights=17,1",
        "stripe1 unit=4096 weights=2,2", "stripe1 unit=0 weights=1", "stripe1 unit=5000 weights=1",
        "stripe1 unit=04096 weights=1", "stripe1 unit=-4096 weights=1", "stripe1 unit=4096 weights=1 ",
        "stripe1 unit=99999999999999999999999 weights=1", " stripe1 unit=4096 weights=1",
        "stripe1 unit=4096 weights=+1"})
    EXPECT_FALSE(StripeLayout::decode(text)) << text;
  std::string many = "stripe1 unit=4096 weights=1";
  for (unsigned i = 0; i < 100; ++i) many += ",1";
  EXPECT_FALSE(StripeLayout::decode(many));
}

TEST(StripeLayout, WhatCannotBeIsRefused) {
  EXPECT_THROW(StripeLayout(0, {1}), UsageError);
  EXPECT_THROW(StripeLayout(1000, {1}), UsageError);
  EXPECT_THROW(StripeLayout(kUnit, {}), UsageError);
  EXPECT_THROW(StripeLayout(kUnit, {1, 0}), UsageError);
  EXPECT_THROW(StripeLayout(kUnit, {17}), UsageError);
  EXPECT_THROW(StripeLayout(kUnit, std::vector<std::uint32_t>(65, 1)), UsageError);
}

}  // namespace
}  // namespace hoist::aio::stripe_layout_test
