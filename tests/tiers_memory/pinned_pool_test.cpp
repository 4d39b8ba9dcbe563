// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/pinned_pool.hpp>

namespace hoist::tiers::pinned_pool_test {
namespace {

TEST(PinnedPool, HoldsExactlyWhatWasPlanned) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Rng rng(seed);
    PinnedPlan plan;
    std::uint64_t end = 0;
    for (std::uint64_t pieces = 1 + rng.below(60); pieces > 0; --pieces) {
      const std::uint64_t bytes = rng.below(rng.below(5) == 0 ? 300'000 : 9'000);
      const std::uint64_t offset = plan.add(bytes);
      ASSERT_EQ(offset % kBlockAlignment, 0u) << "seed " << seed;
      ASSERT_GE(offset, end) << "seed " << seed;
      end = offset + bytes;
    }
    ASSERT_EQ(plan.bytes(), round_up(end, kBlockAlignment)) << "seed " << seed;
    Budget budget("pinned", "key", plan.bytes());
    const PinnedPool pool(budget, {.bytes = plan.bytes(), .huge_pages = false});
    EXPECT_EQ(budget.held_bytes(), plan.bytes());
    const std::span<std::byte> memory = pool.memory().bytes();
    EXPECT_EQ(memory.size(), plan.bytes()) << "seed " << seed;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % kBlockAlignment, 0u) << "seed " << seed;
    if (!memory.empty()) std::memset(memory.data(), 1, memory.size());
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

TEST(PinnedPlan, PiecesLieWithinOneSlice) {
  PinnedPlan plan;
  for (const std::uint64_t bytes : {700 * kMiB, 330 * kMiB, 10 * kMiB}) plan.add(bytes);
  EXPECT_EQ(slice_lengths(plan), (std::vector<std::uint64_t>{700 * kMiB, 340 * kMiB}));
}

TEST(PinnedPool, MayBeEmpty) {
  Budget budget("pinned", "key", 0);
  PinnedPool pool(budget, {.bytes = PinnedPlan().bytes()});
  EXPECT_TRUE(pool.memory().bytes().empty());
  EXPECT_TRUE(pool.memory().slices().empty());
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

}  // namespace
}  // namespace hoist::tiers::pinned_pool_test
