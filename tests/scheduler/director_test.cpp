// SPDX-License-Identifier: Apache-2.0
// The director: records, follows, improvises; a simulated device checks that no fetch overwrites what is pinned and
// that every gather finds its item.
#include <map>
#include <set>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/scheduler/director.hpp>

namespace hoist::scheduler {
namespace {

DirectorOptions options(Item items, std::uint32_t slots) {
  return {.items = std::vector<ItemShape>(items, ItemShape{100}),
          .slot_count = slots,
          .prefetch_elements = 150,
          .live_elements_max = 1'000'000,
          .reuse_distance_elements = 1'000'000};
}

class Simulation {
 public:
  explicit Simulation(const DirectorOptions& o) : director(o) {}

  void begin(std::size_t kind) {
    slots_.clear();
    pinned_.clear();
    apply(director.begin(kind));
  }
  void gather(Item item) {
    const auto fetches = director.gather(item);
    ASSERT_FALSE(!fetches.empty() && fetches[0].slot == kNoSlot);
    apply(fetches);
    bool there = false;
    for (const auto& [slot, occupant] : slots_) there |= occupant == item;
    ASSERT_TRUE(there) << "item " << item;
    pinned_.insert(item);
  }
  void release(Item item) {
    pinned_.erase(item);
    apply(director.release(item));
  }
  void pass(const std::vector<Item>& order, std::size_t kind = 0) {
    begin(kind);
    for (const Item item : order) {
      gather(item);
      if (testing::Test::HasFatalFailure()) return;
      release(item);
    }
    director.end(true);
  }
  Director director;
  std::size_t fetch_count = 0;

 private:
  void apply(std::span<const Fetch> fetches) {
    for (const Fetch& fetch : fetches) {
      ++fetch_count;
      ASSERT_FALSE(slots_.contains(fetch.slot) && pinned_.contains(slots_[fetch.slot]))
          << "a pinned item is overwritten";
      ASSERT_FALSE(pinned_.contains(fetch.item)) << "a pinned item is fetched again";
      std::erase_if(slots_, [&](const auto& s) { return s.second == fetch.item; });
      slots_[fetch.slot] = fetch.item;
    }
  }
  std::map<Slot, Item> slots_;
  std::set<Item> pinned_;
};

TEST(Director, FollowsFromTheSecondPassOn) {
  Simulation s(options(5, 2));
  s.pass({0, 1, 2, 3, 4});
  EXPECT_FALSE(s.director.following());
  EXPECT_EQ(s.director.fetch_counts(0), (std::vector<std::uint32_t>{1, 1, 1, 1, 1}));
  s.begin(0);
  EXPECT_TRUE(s.director.following());
  EXPECT_EQ(s.director.upcoming_fetches().size(), 4u);  // one was issued at the beginning
}

TEST(Director, KindsOfPassesHavePlansOfTheirOwn) {
  Simulation s(options(4, 2));
  s.pass({0, 1, 2, 3}, 0);
  s.pass({3, 1}, 1);
  s.begin(1);
  EXPECT_TRUE(s.director.following());
  s.gather(3);
  EXPECT_TRUE(s.director.following());
  EXPECT_TRUE(s.director.fetch_counts(2).empty());
}

TEST(Director, DeviationsAreServedAndReplaceThePlan) {
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
    EXPECT_TRUE(s.director.following());
    for (const Item item : order) {
      s.gather(item);
      s.release(item);
      EXPECT_TRUE(s.director.following()) << "seed " << seed;
    }
  }
}

TEST(Director, AnAbandonedPassLeavesThePlanAlone) {
  Simulation s(options(4, 2));
  s.pass({0, 1, 2, 3});
  const auto counts = s.director.fetch_counts(0);
  s.begin(0);
  s.gather(2);
  s.director.end(false);
  EXPECT_EQ(s.director.fetch_counts(0), counts);
  s.pass({0, 1, 2, 3});
  EXPECT_FALSE(testing::Test::HasFatalFailure());
}

TEST(Director, SaysWhenEverySlotIsPinned) {
  Director director(options(3, 2));
  director.begin(0);
  director.gather(0);
  director.gather(1);
  const auto refused = director.gather(2);
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_EQ(refused[0].slot, kNoSlot);
  director.release(0);
  EXPECT_EQ(director.gather(2)[0].slot, 0u);
  EXPECT_EQ(director.trace().size(), 4u);  // the refused access did not happen
}

}  // namespace
}  // namespace hoist::scheduler
