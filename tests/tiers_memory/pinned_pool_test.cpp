// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/free_memory.hpp>
#include <hoist/tiers/pinned_pool.hpp>

namespace hoist::tiers::pinned_pool_test {
namespace {

TEST(PinnedPool, CarvesExactlyWhatWasPlanned) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Rng rng(seed);
    std::vector<std::uint64_t> requests(1 + rng.below(60));
    PinnedPlan plan;
    for (std::uint64_t& bytes : requests) {
      bytes = rng.below(rng.below(5) == 0 ? 300'000 : 9'000);
      plan.add(bytes);
    }
    Budget budget("pinned", "key", plan.bytes());
    PinnedPool pool(budget, {.bytes = plan.bytes(), .huge_pages = false});
    EXPECT_EQ(budget.held_bytes(), plan.bytes());
    const std::byte* end = pool.memory().bytes().data();
    for (const std::uint64_t bytes : requests) {
      const auto piece = pool.carve(bytes, "piece");
      ASSERT_EQ(piece.size(), bytes) << "seed " << seed;
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(piece.data()) % kBlockAlignment, 0u) << "seed " << seed;
      ASSERT_GE(piece.data(), end) << "seed " << seed;
      if (bytes > 0) std::memset(piece.data(), 1, bytes);
      end = piece.data() + piece.size();
    }
    EXPECT_EQ(round_up(static_cast<std::uint64_t>(end - pool.memory().bytes().data()), kBlockAlignment), plan.bytes())
        << "seed " << seed;
  }
}

// The lengths of a plan's slices, of memory that is not there and is not read.
std::vector<std::uint64_t> slice_lengths(const PinnedPlan& plan) {
  std::vector<std::uint64_t> lengths;
  static std::byte anything;
  for (const auto& slice : plan.slices({&anything, plan.bytes()})) lengths.push_back(slice.size());
  return lengths;
}

// Sixty pieces of 600 MiB need 60 times 600 MiB, not 60 GiB.
TEST(PinnedPlan, ASliceEndsWhereTheNextPieceWouldNotFit) {
  PinnedPlan plan;
  for (std::uint64_t i = 0; i < 60; ++i) EXPECT_EQ(plan.add(600 * kMiB), i * 600 * kMiB);
  EXPECT_EQ(plan.bytes(), 60 * 600 * kMiB);
  EXPECT_EQ(slice_lengths(plan), std::vector<std::uint64_t>(60, 600 * kMiB));
}

TEST(PinnedPlan, ASliceIsFilledToTheLastByte) {
  PinnedPlan plan;
  plan.add(kGiB - 8192);
  plan.add(8191);
  plan.add(0);
  plan.add(1);
  EXPECT_EQ(plan.bytes(), kGiB + 4096);
  EXPECT_EQ(slice_lengths(plan), (std::vector<std::uint64_t>{kGiB, 4096}));
}

TEST(PinnedPlan, APieceLongerThanASliceHasSliceAfterSlice) {
  PinnedPlan plan;
  plan.add(4096);
  plan.add(2 * kGiB + 1);
  plan.add(kGiB - 4096);
  plan.add(4096);
  EXPECT_EQ(plan.bytes(), 3 * kGiB + 8192);
  EXPECT_EQ(slice_lengths(plan), (std::vector<std::uint64_t>{4096, kGiB, kGiB, kGiB, 4096}));
}

TEST(PinnedPool, PiecesLieWithinOneSlice) {
  PinnedPlan plan;
  const std::vector<std::uint64_t> requests{700 * kMiB, 330 * kMiB, 10 * kMiB};
  for (const std::uint64_t bytes : requests) plan.add(bytes);
  if (platform::host_memory().free_bytes < 2 * plan.bytes()) GTEST_SKIP() << "too little memory is free";
  Budget budget("pinned", "key", 2 * kGiB);
  PinnedPool pool(budget, {.bytes = plan.bytes()});
  const auto slices = plan.slices(pool.memory().bytes());
  ASSERT_EQ(slices.size(), 2u);
  for (const std::uint64_t bytes : requests) {
    const auto piece = pool.carve(bytes, "piece");
    bool inside = false;
    for (const auto& slice : slices) {
      inside |= piece.data() >= slice.data() && piece.data() + piece.size() <= slice.data() + slice.size();
    }
    EXPECT_TRUE(inside) << bytes << " bytes";
  }
}

TEST(PinnedPool, MayBeEmpty) {
  Budget budget("pinned", "key", 0);
  PinnedPool pool(budget, {.bytes = PinnedPlan().bytes()});
  EXPECT_TRUE(pool.memory().bytes().empty());
  EXPECT_TRUE(pool.memory().slices().empty());
  EXPECT_TRUE(pool.carve(0, "nothing").empty());
}

TEST(PinnedPool, RefusesBeforeItAllocates) {
  Budget budget("pinned", "hoist.pinned_budget", kMiB);
  try {
    // More than any machine has: had the allocation been tried first, the error would speak of the machine.
    const PinnedPool pool(budget, {.bytes = std::uint64_t{1} << 46});
    FAIL() << "64 TiB in a budget of 1 MiB";
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.need.key, "hoist.pinned_budget");
    EXPECT_EQ(error.need.have_bytes, kMiB);
  }
  EXPECT_EQ(budget.held_bytes(), 0u);
}

TEST(PinnedPoolDeathTest, GoingBeyondThePlanIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Budget budget("pinned", "key", kMiB);
        PinnedPool pool(budget, {.bytes = 4096});
        static_cast<void>(pool.carve(4097, "too much"));
      },
      "too much of 4097 bytes .* was not in the plan");
}

}  // namespace
}  // namespace hoist::tiers::pinned_pool_test
