// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <string>
#include <unordered_map>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/core/strong_id.hpp>
#include <hoist/core/units.hpp>

namespace hoist::test::units_test {
namespace {

TEST(ParseBytes, WhatPeopleWrite) {
  const std::pair<const char*, std::uint64_t> kCases[] = {
      {"0", 0},
      {"17", 17},
      {"17B", 17},
      {"17 b", 17},
      {"1k", kKiB},
      {"64k", 64 * kKiB},
      {"64K", 64 * kKiB},
      {"1KB", 1000},
      {"1KiB", kKiB},
      {"512 MiB", 512 * kMiB},
      {"512MB", 512000000},
      {"8GiB", 8 * kGiB},
      {"8g", 8 * kGiB},
      {"8GB", 8000000000},
      {"1.5GB", 1500000000},
      {"1.5GiB", 3 * kGiB / 2},
      {"2T", 2048 * kGiB},
      {"2TB", 2000000000000},
      {"5e8", 500000000},
      {"1e3 KiB", 1000 * kKiB},
      {"  1 MiB\t", kMiB},
      {"0.5k", 512},
      {"0.1GB", 100000000},
      {"0.3k", 307},
      {"22.3GiB", 23944442675},
      {"1.1GB", 1100000000},
      {"4.7GB", 4700000000},
      {"2.01GB", 2010000000},
      {"5E+8", 500000000},
      {"5000e-3k", 5 * kKiB},
      {".5k", 512},
      {"0e100", 0},
      {"9223372036854775807", 9223372036854775807u},
  };
  for (const auto& [text, bytes] : kCases) EXPECT_EQ(parse_bytes(text), bytes) << '"' << text << '"';
}

TEST(ParseBytes, WhatIsNoByteCount) {
  for (const char* text : {"",
                           " ",
                           "x",
                           "-1",
                           "-0.5k",
                           "1.5",
                           "1.5B",
                           "1 2",
                           "1 2k",
                           "1kk",
                           "1Ki",
                           "1KBB",
                           "1bk",
                           "12 parsecs",
                           "nan",
                           "inf",
                           "1e30",
                           "9.3e18",
                           "20000000T",
                           "GiB",
                           "0x10",
                           "1,5GB",
                           "--",
                           "1 K i B",
                           ".",
                           "5e+-1k",
                           "1e",
                           "1e+",
                           "1e-400",
                           "1e400",
                           "9223372036854775808",
                           "99999999999999999999",
                           "1.2.3"}) {
    EXPECT_EQ(parse_bytes(text), std::nullopt) << '"' << text << '"';
  }
}

// Counts beyond 2^53 are no doubles any more; what is written in digits is what is meant.
TEST(ParseBytes, LargeIntegersAreExact) {
  EXPECT_EQ(parse_bytes("9007199254740993"), 9007199254740993u);
  EXPECT_EQ(parse_bytes("9007199254740993B"), 9007199254740993u);
  EXPECT_EQ(parse_bytes("4611686018427387905"), 4611686018427387905u);
}

TEST(FormatBytes, ReadsWell) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.0 KiB");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(100 * kKiB), "100 KiB");
  EXPECT_EQ(format_bytes(100 * kKiB - 1), "100 KiB");
  EXPECT_EQ(format_bytes(kMiB - 1), "1.0 MiB");
  EXPECT_EQ(format_bytes(kMiB), "1.0 MiB");
  EXPECT_EQ(format_bytes(5 * kGiB / 2), "2.5 GiB");
  EXPECT_EQ(format_bytes(1023 * kGiB), "1023 GiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::uint64_t>::max()), "16384 PiB");
}

// A printed value can be read back, and is near the original.
TEST(FormatBytes, ParsesBackNearby) {
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const std::uint64_t bytes = random_bits(5, i) >> (random_bits(6, i) % 50 + 14);
    std::string text = format_bytes(bytes);
    if (text.find("PiB") != std::string::npos) continue;
    const std::size_t space = text.find(' ');
    const double number = std::stod(text.substr(0, space));
    const auto unit = parse_bytes("1" + text.substr(space + 1));
    ASSERT_TRUE(unit.has_value()) << text;
    EXPECT_NEAR(number * static_cast<double>(*unit), static_cast<double>(bytes),
                0.06 * static_cast<double>(*unit) + 0.006 * static_cast<double>(bytes))
        << text;
  }
}

TEST(Rounding, UpDownAndDivision) {
  for (std::uint64_t multiple : {1u, 2u, 3u, 512u, 4096u}) {
    for (std::uint64_t value = 0; value < 3 * multiple + 2; ++value) {
      EXPECT_GE(round_up(value, multiple), value);
      EXPECT_LT(round_up(value, multiple), value + multiple);
      EXPECT_EQ(round_up(value, multiple) % multiple, 0u);
      EXPECT_LE(round_down(value, multiple), value);
      EXPECT_GT(round_down(value, multiple) + multiple, value);
      EXPECT_EQ(round_down(value, multiple) % multiple, 0u);
      EXPECT_EQ(divide_up(value, multiple) * multiple, round_up(value, multiple));
    }
  }
}

TEST(Counted, OneIsSingular) {
  EXPECT_EQ(counted(1, "rank"), "1 rank");
  EXPECT_EQ(counted(0u, "rank"), "0 ranks");
  EXPECT_EQ(counted(~std::uint64_t{0}, "NVIDIA GPU"), "18446744073709551615 NVIDIA GPUs");
}

struct UnitTag;
struct GroupTag;
using UnitId = StrongId<UnitTag>;
using GroupId = StrongId<GroupTag>;

TEST(StrongId, ComparesAndHashesByIndex) {
  EXPECT_EQ(UnitId{3}, UnitId{3});
  EXPECT_LT(UnitId{2}, UnitId{3});
  EXPECT_EQ(UnitId{}.index, 0u);
  std::unordered_map<UnitId, int> map;
  map[UnitId{7}] = 1;
  map[UnitId{8}] = 2;
  EXPECT_EQ(map.at(UnitId{7}), 1);
  EXPECT_EQ(map.at(UnitId{8}), 2);
}

template <typename A, typename B>
concept Comparable = requires(A a, B b) {
  a == b;
};
static_assert(Comparable<UnitId, UnitId>);
static_assert(!Comparable<UnitId, GroupId>, "ids of different things must not compare");
static_assert(!std::is_convertible_v<UnitId, GroupId>);
static_assert(!std::is_convertible_v<UnitId, std::uint32_t>);

}  // namespace
}  // namespace hoist::test::units_test
