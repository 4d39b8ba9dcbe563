// SPDX-License-Identifier: Apache-2.0
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/extent_pool.hpp>

namespace hoist::tiers::extent_pool_test {
namespace {

constexpr std::uint64_t k4 = kBlockAlignment;

TEST(ExtentPool, CutsTheFileIntoOneExtentAfterAnother) {
  const std::vector<std::uint64_t> lengths{3 * k4, k4, 0, 3 * k4};
  const ExtentPool pool(lengths, 2);
  ASSERT_EQ(pool.extent_count(), 8u);
  std::uint64_t end = 0;
  for (std::uint32_t index = 0; index < 8; ++index) {
    EXPECT_EQ(pool.extent(index).offset_bytes, end);
    EXPECT_EQ(pool.extent(index).length_bytes, lengths[index % 4]);
    EXPECT_TRUE(pool.is_free(index));
    end += pool.extent(index).length_bytes;
  }
  EXPECT_EQ(pool.data_bytes(), end);
  for (std::uint64_t offset = 0; offset < end; offset += k4) {
    for (const std::uint64_t byte : {offset, offset + k4 - 1}) {
      const Extent& found = pool.extent(pool.extent_at(byte));
      EXPECT_LE(found.offset_bytes, byte);
      EXPECT_LT(byte, found.offset_bytes + found.length_bytes);
    }
  }
}

TEST(ExtentPool, TakesTheLowestFreeExtentOfThatLength) {
  ExtentPool pool(std::vector<std::uint64_t>{k4, 2 * k4, k4}, 2);
  EXPECT_EQ(pool.take(k4), 0u);
  EXPECT_EQ(pool.take(k4), 2u);
  EXPECT_EQ(pool.take(2 * k4), 1u);
  EXPECT_EQ(pool.take(k4), 3u);
  pool.give_back(2);
  pool.give_back(0);
  EXPECT_EQ(pool.take(k4), 0u);
  EXPECT_EQ(pool.take(k4), 2u);
}

// Steps that rewrite random subsets of the records never run out, and no extent ever has two owners.
TEST(ExtentPool, RandomStepsNeverShareAnExtent) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Rng rng(seed);
    std::vector<std::uint64_t> lengths(1 + rng.below(20));
    for (auto& length : lengths) length = (1 + rng.below(3)) * k4;
    ExtentPool pool(lengths, 2);
    std::vector<std::uint32_t> current;
    for (const auto length : lengths) current.push_back(pool.take(length));
    for (int step = 0; step < 20; ++step) {
      std::vector<std::pair<std::size_t, std::uint32_t>> next;
      for (std::size_t record = 0; record < lengths.size(); ++record)
        if (rng.below(2) == 0) next.emplace_back(record, pool.take(lengths[record]));
      for (const auto& [record, extent] : next) {
        pool.give_back(current[record]);
        current[record] = extent;
      }
      ASSERT_EQ(std::set(current.begin(), current.end()).size(), current.size()) << "seed " << seed;
      for (std::size_t record = 0; record < lengths.size(); ++record) {
        ASSERT_EQ(pool.extent(current[record]).length_bytes, lengths[record]) << "seed " << seed;
        ASSERT_FALSE(pool.is_free(current[record])) << "seed " << seed;
      }
    }
  }
}

TEST(ExtentPool, AdoptTakesExactlyWhatTheCommitUses) {
  const std::vector<std::uint64_t> lengths{k4, 2 * k4, k4, 0};
  ExtentPool pool(lengths, 2);
  EXPECT_EQ(pool.take(k4), 0u);
  EXPECT_EQ(pool.adopt(std::vector<std::uint32_t>{6, 1, 0, kNoExtent}, lengths), "");
  EXPECT_EQ(pool.take(k4), 2u);
  EXPECT_EQ(pool.take(k4), 4u);
  EXPECT_EQ(pool.take(2 * k4), 5u);
}

TEST(ExtentPool, AdoptRefusesNonsenseAndStaysAsItWas) {
  const std::vector<std::uint64_t> lengths{k4, 2 * k4, k4};
  ExtentPool pool(lengths, 2);
  EXPECT_EQ(pool.adopt(std::vector<std::uint32_t>{0, 1, 2}, lengths), "");
  EXPECT_NE(pool.adopt(std::vector<std::uint32_t>{0, 1, 0}, lengths).find("two records"), std::string::npos);
  EXPECT_NE(pool.adopt(std::vector<std::uint32_t>{0, 2, 1}, lengths).find("of 4096 bytes"), std::string::npos);
  EXPECT_NE(pool.adopt(std::vector<std::uint32_t>{0, 1, 6}, lengths).find("extent 6 of 6"), std::string::npos);
  EXPECT_NE(pool.adopt(std::vector<std::uint32_t>{0, 1, kNoExtent}, lengths), "");
  EXPECT_EQ(pool.take(k4), 3u);
}

TEST(ExtentPoolDeathTest, TakingMoreThanThereIsIsABug) {
  ExtentPool pool(std::vector<std::uint64_t>{k4}, 1);
  (void)pool.take(k4);
  EXPECT_DEATH((void)pool.take(k4), "in use");
  EXPECT_DEATH((void)pool.take(2 * k4), "no extent");
  pool.give_back(0);
  EXPECT_DEATH(pool.give_back(0), "not in use");
}

}  // namespace
}  // namespace hoist::tiers::extent_pool_test
