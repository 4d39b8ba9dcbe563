// SPDX-License-Identifier: Apache-2.0
// Plans: checked by replaying them, on the traces of training and on random ones.
#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/scheduler/plan.hpp>

namespace hoist::scheduler {
namespace {

constexpr std::uint64_t kNoLimit = 1'000'000'000;

AccessTrace layers_forward_and_back(Item layers) {
  AccessTrace trace;
  const auto use = [&](Item item) {
    trace.push_back({AccessKind::gather, item});
    trace.push_back({AccessKind::release, item});
  };
  for (Item i = 0; i < layers; ++i) use(i);
  for (Item i = layers; i-- > 0;) {
    use(i);
    trace.push_back({AccessKind::finish, i});
  }
  return trace;
}

// A trace in which at most `pins` slotted items are pinned at once.
AccessTrace random_trace(Rng& rng, Item items, std::size_t pins, std::size_t length) {
  AccessTrace trace;
  std::vector<Item> pinned;
  while (trace.size() < length || !pinned.empty()) {
    const bool release = !pinned.empty() && (pinned.size() >= pins || trace.size() >= length || rng.below(2) == 0);
    if (release) {
      const std::size_t at = rng.below(pinned.size());
      trace.push_back({AccessKind::release, pinned[at]});
      pinned.erase(pinned.begin() + static_cast<std::ptrdiff_t>(at));
      continue;
    }
    const Item item = static_cast<Item>(rng.below(items));
    if (std::find(pinned.begin(), pinned.end(), item) != pinned.end()) continue;
    trace.push_back({AccessKind::gather, item});
    pinned.push_back(item);
  }
  return trace;
}

// What a plan promises, found out by doing what it says.
void replay(const Plan& plan, const PlanInputs& inputs, const std::string& where) {
  std::map<Slot, Item> slots;
  std::set<Item> own, pinned;
  std::size_t bound_fetched = 0;  // the point of the last fetch into bound memory
  const auto resident = [&](Item item) {
    return inputs.items[item].slotted
               ? std::any_of(slots.begin(), slots.end(), [&](const auto& s) { return s.second == item; })
               : own.contains(item);
  };
  for (std::size_t point = 0; point <= plan.trace.size(); ++point) {
    if (point > 0 && plan.trace[point - 1].kind == AccessKind::release) pinned.erase(plan.trace[point - 1].item);
    for (const Fetch& fetch : plan.fetches_at(point)) {
      if (inputs.items[fetch.item].bound) {
        ASSERT_EQ(fetch.slot, kOwnMemory) << where;
        ASSERT_TRUE(point > 0 && plan.trace[point - 1] == (Access{AccessKind::gather, fetch.item}))
            << where << ": fetched at another point than its gather";
        bound_fetched = point;
        continue;
      }
      if (!inputs.items[fetch.item].slotted) {
        ASSERT_EQ(fetch.slot, kOwnMemory) << where;
        ASSERT_TRUE(own.insert(fetch.item).second) << where << ": fetched twice into its own memory";
        continue;
      }
      ASSERT_LT(fetch.slot, inputs.slot_count) << where;
      ASSERT_FALSE(slots.contains(fetch.slot) && pinned.contains(slots[fetch.slot]))
          << where << ": a pinned item is overwritten at " << point;
      ASSERT_FALSE(pinned.contains(fetch.item)) << where << ": a pinned item moves";
      std::erase_if(slots, [&](const auto& s) { return s.second == fetch.item; });  // the plan had given it up
      slots[fetch.slot] = fetch.item;
    }
    if (point == 0 || plan.trace[point - 1].kind != AccessKind::gather) continue;
    const Item item = plan.trace[point - 1].item;
    if (inputs.items[item].bound) {
      ASSERT_EQ(bound_fetched, point) << where << ": bound memory was left empty";
      continue;
    }
    ASSERT_TRUE(resident(item)) << where << ": item " << item << " is not there at access " << point - 1;
    if (inputs.items[item].slotted) pinned.insert(item);
  }
}

TEST(Plan, EveryGatherFindsItsItemOnRandomTraces) {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Rng rng(seed);
    const Item items = 1 + static_cast<Item>(rng.below(9));
    const std::uint32_t slots = 1 + static_cast<std::uint32_t>(rng.below(4));
    std::vector<ItemShape> shapes;
    for (Item i = 0; i < items; ++i) {
      const bool slotted = rng.below(5) != 0;
      shapes.push_back({1 + rng.below(100), slotted, !slotted && rng.below(2) == 0});
    }
    const PlanInputs inputs{.items = shapes,
                            .slot_count = slots,
                            .prefetch_elements = rng.below(3) == 0 ? 0 : rng.below(500),
                            .live_elements_max = rng.below(2) == 0 ? kNoLimit : rng.below(300),
                            .reuse_distance_elements = rng.below(2) == 0 ? kNoLimit : rng.below(300)};
    const AccessTrace trace = random_trace(rng, items, std::min<std::size_t>(slots, items), 60);
    const std::string where = "seed " + std::to_string(seed);
    const Plan made = plan(trace, inputs);
    replay(made, inputs, where);
    if (testing::Test::HasFatalFailure()) return;
    const Plan again = plan(trace, inputs);
    EXPECT_EQ(made.fetches, again.fetches) << where;
    EXPECT_EQ(made.first, again.first) << where;
  }
}

TEST(Plan, WithTwoSlotsTheNextLayerIsOnItsWayWhileOneIsUsed) {
  const std::vector<ItemShape> shapes(6, ItemShape{100});
  const Plan made = plan(layers_forward_and_back(6), {.items = shapes,
                                                      .slot_count = 2,
                                                      .prefetch_elements = 100,
                                                      .live_elements_max = kNoLimit,
                                                      .reuse_distance_elements = kNoLimit});
  for (std::size_t i = 0; i < made.trace.size(); ++i) {
    if (i == 0 || made.trace[i].kind != AccessKind::gather) continue;
    const auto own_point = made.fetches_at(i + 1);
    EXPECT_TRUE(
        std::none_of(own_point.begin(), own_point.end(), [&](const Fetch& f) { return f.item == made.trace[i].item; }))
        << "access " << i << " had to wait for its own fetch";
  }
}

TEST(Plan, TheLastLayerIsKeptForTheWayBackUnlessReuseIsForbidden) {
  const std::vector<ItemShape> shapes(5, ItemShape{10});
  PlanInputs inputs{.items = shapes,
                    .slot_count = 2,
                    .prefetch_elements = 10,
                    .live_elements_max = kNoLimit,
                    .reuse_distance_elements = kNoLimit};
  const AccessTrace trace = layers_forward_and_back(5);
  const std::size_t kept = plan(trace, inputs).fetches.size();
  EXPECT_LT(kept, 10u);
  inputs.reuse_distance_elements = 0;
  EXPECT_EQ(plan(trace, inputs).fetches.size(), 10u);  // every use fetches
  inputs.reuse_distance_elements = kNoLimit;
  inputs.slot_count = 5;
  EXPECT_EQ(plan(trace, inputs).fetches.size(), 5u);  // everything stays
}

// Belady: with k slots and no prefetch, a forward and backward scan over n layers fetches n on the way up and n - k on
// the way back.
TEST(Plan, EvictsWhatIsUsedFurthestInTheFuture) {
  for (Item layers = 2; layers <= 8; ++layers) {
    const std::vector<ItemShape> shapes(layers, ItemShape{10});
    for (std::uint32_t slots = 1; slots <= layers; ++slots) {
      const Plan made = plan(layers_forward_and_back(layers), {.items = shapes,
                                                               .slot_count = slots,
                                                               .prefetch_elements = 0,
                                                               .live_elements_max = kNoLimit,
                                                               .reuse_distance_elements = kNoLimit});
      EXPECT_EQ(made.fetches.size(), layers + (layers - slots)) << layers << " layers, " << slots << " slots";
    }
  }
}

TEST(Plan, PrefetchStaysWithinItsLimits) {
  const std::vector<ItemShape> shapes(8, ItemShape{100});
  const AccessTrace trace = layers_forward_and_back(8);
  const Plan none = plan(trace, {.items = shapes,
                                 .slot_count = 4,
                                 .prefetch_elements = 0,
                                 .live_elements_max = kNoLimit,
                                 .reuse_distance_elements = 0});
  EXPECT_TRUE(none.fetches_at(0).empty());
  const Plan two = plan(trace, {.items = shapes,
                                .slot_count = 4,
                                .prefetch_elements = 200,
                                .live_elements_max = kNoLimit,
                                .reuse_distance_elements = 0});
  EXPECT_EQ(two.fetches_at(0).size(), 2u);
  const Plan live = plan(trace, {.items = shapes,
                                 .slot_count = 4,
                                 .prefetch_elements = 400,
                                 .live_elements_max = 300,
                                 .reuse_distance_elements = 0});
  EXPECT_EQ(live.fetches_at(0).size(), 3u);
}

TEST(Plan, HashesTellTracesApart) {
  AccessTrace a = layers_forward_and_back(4), b = a;
  EXPECT_EQ(trace_hash(a), trace_hash(b));
  std::swap(b[0], b[2]);
  EXPECT_NE(trace_hash(a), trace_hash(b));
  b = a;
  b.pop_back();
  EXPECT_NE(trace_hash(a), trace_hash(b));
}

}  // namespace
}  // namespace hoist::scheduler
