// SPDX-License-Identifier: Apache-2.0
// The planner: records, follows, improvises; a simulated device checks that no fetch overwrites what is pinned and
// that every gather finds its item.
#include <map>
#include <set>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/scheduler/fetch_planner.hpp>

namespace hoist::scheduler::fetch_planner_test {
namespace {

constexpr std::uint64_t kItemBytes = 10;

PlanInputs options(Item items, std::uint64_t at_once) {
  return {.items = std::vector<ItemShape>(items, {.elements = 100, .needs = {.bytes = kItemBytes}}),
          .gather_bytes = at_once * kItemBytes,
          .prefetch_elements = 150,
          .live_elements_max = 1'000'000,
          .reuse_distance_elements = 1'000'000};
}

class Simulation {
 public:
  explicit Simulation(const PlanInputs& o) : planner(o) {}

  void begin(std::size_t kind) {
    resident_.clear();
    pinned_.clear();
    apply(planner.begin(kind));
  }
  void gather(Item item) {
    const auto fetches = planner.gather(item);
    ASSERT_TRUE(fetches);
    apply(*fetches);
    ASSERT_TRUE(resident_.contains(item)) << "item " << item;
    pinned_.insert(item);
  }
  void release(Item item) {
    pinned_.erase(item);
    apply(planner.release(item));
  }
  void pass(const std::vector<Item>& order, std::size_t kind = 0) {
    begin(kind);
    for (const Item item : order) {
      gather(item);
      if (testing::Test::HasFatalFailure()) return;
      release(item);
    }
    planner.end(true);
  }
  FetchPlanner planner;
  std::size_t fetch_count = 0;

 private:
  void apply(std::span<const Fetch> fetches) {
    for (const Fetch& fetch : fetches) {
      ++fetch_count;
      ASSERT_FALSE(pinned_.contains(fetch.item)) << "a pinned item is fetched again";
      for (const auto& [item, place] : std::map<Item, Place>(resident_)) {
        if (!place.overlaps(fetch.place)) continue;
        ASSERT_FALSE(pinned_.contains(item)) << "a pinned item is overwritten";
        resident_.erase(item);
      }
      resident_[fetch.item] = fetch.place;
    }
  }
  std::map<Item, Place> resident_;
  std::set<Item> pinned_;
};

TEST(FetchPlanner, FollowsFromTheSecondPassOn) {
  Simulation s(options(5, 2));
  s.pass({0, 1, 2, 3, 4});
  EXPECT_FALSE(s.planner.following());
  EXPECT_EQ(s.planner.fetch_counts(0), (std::vector<std::uint32_t>{1, 1, 1, 1, 1}));
  s.begin(0);
  EXPECT_TRUE(s.planner.following());
  EXPECT_EQ(s.planner.upcoming_fetches().size(), 4u);  // one was issued at the beginning
}

TEST(FetchPlanner, KindsOfPassesHavePlansOfTheirOwn) {
  Simulation s(options(4, 2));
  s.pass({0, 1, 2, 3}, 0);
  s.pass({3, 1}, 1);
  s.begin(1);
  EXPECT_TRUE(s.planner.following());
  s.gather(3);
  EXPECT_TRUE(s.planner.following());
  EXPECT_TRUE(s.planner.fetch_counts(2).empty());
}

TEST(FetchPlanner, DeviationsAreServedAndReplaceThePlan) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Rng rng(seed);
    Simulation s(options(6, 1 + static_cast<std::uint32_t>(rng.below(4))));
    std::vector<Item> order{0, 1, 2, 3, 4, 5};
    for (int pass = 0; pass < 6; ++pass) {
      if (rng.below(2) == 0) {
        order.resize(1 + rng.below(8));
        for (Item& item : order) item = static_cast<Item>(rng.below(6));
      }
      s.pass(order);
      ASSERT_FALSE(testing::Test::HasFatalFailure()) << "seed " << seed << " pass " << pass;
    }
    s.begin(0);
    EXPECT_TRUE(s.planner.following());
    for (const Item item : order) {
      s.gather(item);
      s.release(item);
      EXPECT_TRUE(s.planner.following()) << "seed " << seed;
    }
  }
}

TEST(FetchPlanner, AnAbandonedPassLeavesThePlanAlone) {
  Simulation s(options(4, 2));
  s.pass({0, 1, 2, 3});
  const auto counts = s.planner.fetch_counts(0);
  s.begin(0);
  s.gather(2);
  s.planner.end(false);
  EXPECT_EQ(s.planner.fetch_counts(0), counts);
  s.pass({0, 1, 2, 3});
  EXPECT_FALSE(testing::Test::HasFatalFailure());
}

TEST(FetchPlanner, SaysWhenPinnedItemsLeaveNoRoom) {
  FetchPlanner planner(options(3, 2));
  EXPECT_FALSE(planner.all_fit());
  planner.begin(0);
  ASSERT_TRUE(planner.gather(0));
  ASSERT_TRUE(planner.gather(1));
  EXPECT_FALSE(planner.gather(2));
  planner.release(0);
  const auto fetches = planner.gather(2);
  ASSERT_TRUE(fetches);
  EXPECT_EQ(fetches->front(), (Fetch{2, {0, kItemBytes}}));
  EXPECT_EQ(planner.trace().size(), 4u);  // the refused access did not happen
}

// Two items that share a place are needed at once: one moves, in every pass alike, and the plan knows it.
TEST(FetchPlanner, PlansWithItemsThatMove) {
  Simulation s(options(4, 2));
  for (int pass = 0; pass < 3; ++pass) {
    s.begin(0);
    EXPECT_EQ(s.planner.following(), pass > 0);
    for (const Item item : {0u, 2u, 1u, 3u}) {  // the homes of 0 and 2 are the same, and those of 1 and 3
      s.gather(item);
      if (item >= 2) {
        s.release(item - 2);
        s.release(item);
      } else if (item == 1) {
        EXPECT_EQ(s.planner.following(), pass > 0);
      }
      ASSERT_FALSE(testing::Test::HasFatalFailure());
    }
    s.planner.end(true);
    EXPECT_EQ(s.planner.following(), pass > 0);
  }
}

}  // namespace
}  // namespace hoist::scheduler::fetch_planner_test
