// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/tiers/budget.hpp>

namespace hoist::tiers::budget_test {
namespace {

using ::testing::HasSubstr;

TEST(Budget, HoldsUntilDestroyed) {
  Budget budget("pinned", "hoist.pinned_budget", 1000);
  {
    const Budget::Hold first = budget.take(600, "buffers");
    const Budget::Hold second = budget.take(400, "gradients");
    EXPECT_EQ(first.bytes(), 600u);
    EXPECT_EQ(budget.held_bytes(), 1000u);
    EXPECT_EQ(budget.take(0, "nothing").bytes(), 0u);
  }
  EXPECT_EQ(budget.held_bytes(), 0u);
  EXPECT_EQ(budget.peak_bytes(), 1000u);
}

TEST(Budget, TwoTiersMayHaveACommonBudget) {
  Budget common("host", "both keys", 1000);
  {
    Budget device("device", "hoist.device_memory", 1000, &common);
    Budget pinned("pinned", "hoist.pinned_memory", 700, &common);
    Budget::Hold weights = device.take(400, "weights");
    EXPECT_EQ(pinned.free_bytes(), 600u);
    const Budget::Hold states = pinned.take(600, "states");
    EXPECT_EQ(common.held_bytes(), 1000u);
    try {
      static_cast<void>(device.take(1, "one more"));
      FAIL() << "1001 of 1000 bytes were held";
    } catch (const BudgetError& error) {
      EXPECT_EQ(error.need.tier, "host");
      EXPECT_EQ(error.need.need_bytes, 1001u);
    }
    EXPECT_EQ(device.held_bytes(), 400u) << "a refusal holds nothing";
    weights = {};
    EXPECT_EQ(common.held_bytes(), 600u);
    EXPECT_EQ(pinned.free_bytes(), 100u) << "its own limit";
  }
  EXPECT_EQ(common.held_bytes(), 0u);
  EXPECT_EQ(common.peak_bytes(), 1000u);
}

TEST(Budget, RefusalSaysWhatWouldWork) {
  Budget budget("pinned", "hoist.pinned_budget", 1000);
  const Budget::Hold first = budget.take(600, "buffers");
  try {
    static_cast<void>(budget.take(401, "gradients"));
    FAIL() << "1001 of 1000 bytes were held";
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.need.tier, "pinned");
    EXPECT_EQ(error.need.have_bytes, 1000u);
    EXPECT_EQ(error.need.need_bytes, 1001u);
    EXPECT_EQ(error.need.key, "hoist.pinned_budget");
    EXPECT_THAT(error.what(), HasSubstr("gradients"));
  }
  EXPECT_EQ(budget.held_bytes(), 600u);
  EXPECT_THROW(static_cast<void>(budget.take(std::numeric_limits<std::uint64_t>::max(), "everything")), BudgetError);
}

TEST(Budget, HoldsMove) {
  Budget budget("device", "key", 100);
  Budget::Hold first = budget.take(30, "a");
  Budget::Hold second(std::move(first));
  EXPECT_EQ(first.bytes(), 0u);  // NOLINT(bugprone-use-after-move): a moved-from hold holds nothing
  EXPECT_EQ(budget.held_bytes(), 30u);
  second = budget.take(50, "b");
  EXPECT_EQ(budget.held_bytes(), 50u);
  Budget::Hold& itself = second;
  second = std::move(itself);
  EXPECT_EQ(second.bytes(), 50u);
  second = {};
  EXPECT_EQ(budget.held_bytes(), 0u);
  EXPECT_EQ(budget.peak_bytes(), 80u);  // both were held while the assignment took place
}

TEST(Budget, ManyThreadsNeverExceedIt) {
  Budget budget("nvme", "key", 1000);
  std::vector<std::jthread> threads;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&budget, seed] {
      Rng rng(seed);
      std::vector<Budget::Hold> holds;
      for (int i = 0; i < 2000; ++i) {
        try {
          holds.push_back(budget.take(rng.below(200), "a piece"));
        } catch (const BudgetError&) {
          holds.clear();
        }
        EXPECT_LE(budget.held_bytes(), 1000u) << "seed " << seed;
      }
    });
  }
  threads.clear();
  EXPECT_EQ(budget.held_bytes(), 0u);
  EXPECT_LE(budget.peak_bytes(), 1000u);
}

TEST(BudgetDeathTest, AHoldMustNotOutliveItsBudget) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        Budget::Hold hold;
        Budget budget("device", "key", 100);
        hold = budget.take(10, "a");
      },
      "outlive it");
}

}  // namespace
}  // namespace hoist::tiers::budget_test
