// SPDX-License-Identifier: Apache-2.0
// Homes in the gather memory: within it, apart from companions, and overlapping as late as the memory allows.
#include <array>
#include <optional>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/scheduler/places.hpp>

namespace hoist::scheduler::places_test {
namespace {

std::vector<ItemNeeds> needs(const std::vector<std::uint64_t>& bytes) {
  std::vector<ItemNeeds> needs;
  for (const std::uint64_t each : bytes) needs.push_back({.bytes = each});
  return needs;
}

// Whether each item and the `distance` ones after it can be there at once.
bool are_apart(const std::vector<Place>& homes, std::size_t distance) {
  for (std::size_t a = 0; a < homes.size(); ++a)
    for (std::size_t b = a + 1; b < homes.size() && b <= a + distance; ++b)
      if (homes[a].overlaps(homes[b])) return false;
  return true;
}

TEST(Places, EqualItemsShareAsLateAsPossible) {
  for (const std::size_t at_once : {1u, 2u, 3u, 5u, 8u}) {
    const auto items = needs(std::vector<std::uint64_t>(12, 10));
    const auto homes = choose_homes(items, 10 * at_once + 9);
    EXPECT_TRUE(are_apart(homes, at_once - 1)) << at_once;
    EXPECT_FALSE(are_apart(homes, at_once)) << at_once;
  }
}

// A ring alone would put the third of these over the second.
TEST(Places, NeighboursAreApartWheneverTheirSumFits) {
  EXPECT_TRUE(are_apart(choose_homes(needs({3, 4, 5}), 10), 1));
  Rng rng(1);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::uint64_t> bytes(2 + rng.below(10));
    std::uint64_t two = 0;
    for (std::uint64_t& each : bytes) each = 1 + rng.below(50);
    for (std::size_t i = 1; i < bytes.size(); ++i) two = std::max(two, bytes[i - 1] + bytes[i]);
    EXPECT_TRUE(are_apart(choose_homes(needs(bytes), two), 1)) << "round " << round;
    // Items with memory of their own, which small layers between the others are, change nothing.
    std::vector<std::uint64_t> mixed;
    for (const std::uint64_t each : bytes) mixed.insert(mixed.end(), {each, 0});
    std::vector<Place> homes = choose_homes(needs(mixed), two);
    std::erase_if(homes, [](const Place& home) { return home.bytes == 0; });
    EXPECT_TRUE(are_apart(homes, 1)) << "round " << round;
  }
}

TEST(Places, AllFitOneBehindTheOther) {
  const Places places(needs({3, 4, 5}), 12);
  EXPECT_TRUE(places.all_fit());
  EXPECT_EQ(places.of(2), (Place{7, 5}));
  EXPECT_FALSE(Places(needs({3, 4, 5}), 11).all_fit());
}

TEST(Places, CompanionsNeverShareWithTheirItem) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    Rng rng(seed);
    std::vector<ItemNeeds> items;
    for (Item i = 0; i < 2 + rng.below(10); ++i) {
      ItemNeeds& item = items.emplace_back(ItemNeeds{.bytes = rng.below(6) == 0 ? 0 : 1 + rng.below(50)});
      while (i > 0 && rng.below(3) == 0) item.gathered_with.push_back(static_cast<Item>(rng.below(i)));
    }
    const std::uint64_t least = least_gather_bytes(items);
    EXPECT_LE(least, most_gather_bytes(items));
    for (const std::uint64_t total : {least, least + rng.below(100), most_gather_bytes(items)}) {
      Places places(items, total);
      for (Item i = 0; i < items.size(); ++i) {
        EXPECT_LE(places.of(i).end(), total) << "seed " << seed;
        for (const Item other : items[i].gathered_with)
          EXPECT_FALSE(places.of(i).overlaps(places.of(other))) << "seed " << seed << ", items " << i << ", " << other;
      }
    }
  }
}

TEST(Places, AnItemMovesOnlyWhenAPinnedOneIsInTheWay) {
  std::vector<ItemNeeds> items = needs({10, 10, 10, 10});
  items[3].stable_in_pass = true;
  Places places(items, 20);
  ASSERT_TRUE(places.of(0) == places.of(2) && places.of(1) == places.of(3));
  const Place home = places.of(2);
  ASSERT_TRUE(places.pin(2));
  EXPECT_EQ(places.of(2), home);
  places.unpin(2);
  ASSERT_TRUE(places.pin(0));
  ASSERT_TRUE(places.pin(2));
  EXPECT_EQ(places.of(2), places.of(1));
  EXPECT_FALSE(places.pin(1));
  places.unpin(0);
  ASSERT_TRUE(places.pin(3)) << "it was not used yet";
  EXPECT_EQ(places.of(3), places.of(0));
  places.unpin(3);
  ASSERT_TRUE(places.pin(0));
  places.unpin(2);
  EXPECT_FALSE(places.pin(3)) << "it has an address in this pass";
  places.reset();
  EXPECT_EQ(places.of(2), home);
  EXPECT_TRUE(places.pin(3));
}

TEST(Places, OfSeveralItemsAllArePinnedOrNoneHasMoved) {
  std::vector<ItemNeeds> items = needs({10, 10, 30});
  items[1].gathered_with = {2};
  items[1].stable_in_pass = true;
  Places places(items, 40);
  ASSERT_TRUE(places.of(0) == places.of(1));
  const Place home = places.of(1);
  const std::array together{Item{1}, Item{2}};
  ASSERT_TRUE(places.pin(0));
  EXPECT_EQ(places.pin(together), Item{2}) << "item 1 would lie where item 2 must";
  EXPECT_EQ(places.of(1), home);
  EXPECT_FALSE(places.pinned(1));
  places.unpin(0);
  EXPECT_EQ(places.pin(together), std::nullopt);
  EXPECT_EQ(places.of(1), home);
}

}  // namespace
}  // namespace hoist::scheduler::places_test
