// SPDX-License-Identifier: Apache-2.0
// Plans: checked by replaying them, on the traces of training and on random ones.
#include <algorithm>
#include <ctime>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/scheduler/plan.hpp>

namespace hoist::scheduler::plan_test {
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

// Item i has `elements[i]` elements of a byte each.
std::vector<ItemShape> shapes_of(const std::vector<std::uint64_t>& elements) {
  std::vector<ItemShape> shapes;
  for (const std::uint64_t count : elements) shapes.push_back({.elements = count, .needs = {.bytes = count}});
  return shapes;
}

std::vector<ItemShape> equal_shapes(Item items, std::uint64_t elements) {
  return shapes_of(std::vector<std::uint64_t>(items, elements));
}

// A trace that can be carried out, as the recorded pass of a program.
AccessTrace random_trace(Rng& rng, const PlanInputs& inputs, std::size_t length) {
  std::vector<ItemNeeds> needs;
  for (const ItemShape& item : inputs.items) needs.push_back(item.needs);
  Places places(needs, inputs.gather_bytes);
  AccessTrace trace;
  std::vector<Item> pinned;
  while (trace.size() < length || !pinned.empty()) {
    const bool release = !pinned.empty() && (trace.size() >= length || rng.below(2) == 0);
    if (release) {
      const std::size_t at = rng.below(pinned.size());
      const Item item = pinned[at];
      trace.push_back({AccessKind::release, item});
      if (!inputs.items[item].has_own_memory()) places.unpin(item);
      pinned.erase(pinned.begin() + static_cast<std::ptrdiff_t>(at));
      continue;
    }
    const Item item = static_cast<Item>(rng.below(inputs.items.size()));
    if (std::ranges::find(pinned, item) != pinned.end()) continue;
    if (!inputs.items[item].has_own_memory() && !places.pin(item)) continue;
    trace.push_back({AccessKind::gather, item});
    pinned.push_back(item);
  }
  return trace;
}

// Checks the promises of a plan by carrying it out.
void replay(const Plan& plan, const PlanInputs& inputs, const std::string& where) {
  std::map<Item, Place> resident;
  std::set<Item> own, pinned;
  for (std::size_t point = 0; point <= plan.trace.size(); ++point) {
    if (point > 0 && plan.trace[point - 1].kind == AccessKind::release) pinned.erase(plan.trace[point - 1].item);
    for (const Fetch& fetch : plan.fetches_at(point)) {
      if (inputs.items[fetch.item].has_own_memory()) {
        ASSERT_EQ(fetch.place, Place{}) << where;
        ASSERT_TRUE(own.insert(fetch.item).second) << where << ": fetched twice into its own memory";
        continue;
      }
      ASSERT_EQ(fetch.place.bytes, inputs.items[fetch.item].needs.bytes) << where;
      ASSERT_LE(fetch.place.end(), inputs.gather_bytes) << where;
      ASSERT_FALSE(pinned.contains(fetch.item)) << where << ": a pinned item moves";
      for (const auto& [item, place] : std::map<Item, Place>(resident)) {
        if (!place.overlaps(fetch.place)) continue;
        ASSERT_FALSE(pinned.contains(item)) << where << ": a pinned item is overwritten at " << point;
        resident.erase(item);
      }
      resident[fetch.item] = fetch.place;
    }
    if (point == 0 || plan.trace[point - 1].kind != AccessKind::gather) continue;
    const Item item = plan.trace[point - 1].item;
    const bool there = inputs.items[item].has_own_memory() ? own.contains(item) : resident.contains(item);
    ASSERT_TRUE(there) << where << ": item " << item << " is not there at access " << point - 1;
    if (!inputs.items[item].has_own_memory()) pinned.insert(item);
  }
}

// The gathers that each fetch of a plan serves, and that fetches are issued in their order: one that is needed sooner
// never waits for one that is needed later.
void expect_in_order_of_use(const Plan& plan, const PlanInputs& inputs, const std::string& where) {
  std::vector<std::optional<std::size_t>> serves(inputs.items.size());  // the item's latest fetch
  std::vector<std::size_t> first_use(plan.fetches.size(), plan.trace.size());
  for (std::size_t point = 0; point <= plan.trace.size(); ++point) {
    for (std::size_t i = plan.first[point]; i < plan.first[point + 1]; ++i) serves[plan.fetches[i].item] = i;
    if (point == 0 || plan.trace[point - 1].kind != AccessKind::gather) continue;
    const auto fetch = serves[plan.trace[point - 1].item];
    ASSERT_TRUE(fetch) << where;
    first_use[*fetch] = std::min(first_use[*fetch], point - 1);
  }
  EXPECT_TRUE(std::ranges::is_sorted(first_use)) << where;
}

TEST(Plan, EveryGatherFindsItsItemOnRandomTraces) {
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    Rng rng(seed);
    const Item items = 1 + static_cast<Item>(rng.below(9));
    std::vector<ItemShape> shapes;
    for (Item i = 0; i < items; ++i) {
      ItemShape& shape = shapes.emplace_back();
      shape.elements = 1 + rng.below(100);
      if (rng.below(5) == 0) continue;
      shape.needs.bytes = shape.elements;
      shape.needs.stable_in_pass = rng.below(2) == 0;
      if (i > 0 && rng.below(4) == 0) shape.needs.gathered_with = {static_cast<Item>(rng.below(i))};
    }
    std::vector<ItemNeeds> needs;
    for (const ItemShape& shape : shapes) needs.push_back(shape.needs);
    const PlanInputs inputs{.items = shapes,
                            .gather_bytes = least_gather_bytes(needs) + rng.below(200),
                            .prefetch_elements = rng.below(3) == 0 ? 0 : rng.below(500),
                            .live_elements_max = rng.below(2) == 0 ? kNoLimit : rng.below(300),
                            .reuse_distance_elements = rng.below(2) == 0 ? kNoLimit : rng.below(300)};
    const AccessTrace trace = random_trace(rng, inputs, 60);
    const std::string where = "seed " + std::to_string(seed);
    const Plan made = plan(trace, inputs);
    replay(made, inputs, where);
    if (testing::Test::HasFatalFailure()) return;
    expect_in_order_of_use(made, inputs, where);
    PlanInputs on_demand = inputs;
    on_demand.prefetch_elements = 0;
    EXPECT_LE(made.fetches.size(), plan(trace, on_demand).fetches.size()) << where << ": fetched in vain";
    const Plan again = plan(trace, inputs);
    EXPECT_EQ(made.fetches, again.fetches) << where;
    EXPECT_EQ(made.first, again.first) << where;
  }
}

TEST(Plan, WithRoomForTwoTheNextLayerIsOnItsWayWhileOneIsUsed) {
  const std::vector<ItemShape> shapes = equal_shapes(6, 100);
  const Plan made = plan(layers_forward_and_back(6), {.items = shapes,
                                                      .gather_bytes = 200,
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
  const std::vector<ItemShape> shapes = equal_shapes(5, 10);
  PlanInputs inputs{.items = shapes,
                    .gather_bytes = 20,
                    .prefetch_elements = 10,
                    .live_elements_max = kNoLimit,
                    .reuse_distance_elements = kNoLimit};
  const AccessTrace trace = layers_forward_and_back(5);
  const std::size_t kept = plan(trace, inputs).fetches.size();
  EXPECT_LT(kept, 10u);
  inputs.reuse_distance_elements = 0;
  EXPECT_EQ(plan(trace, inputs).fetches.size(), 10u);  // every use fetches
  inputs.reuse_distance_elements = kNoLimit;
  inputs.gather_bytes = 50;
  EXPECT_EQ(plan(trace, inputs).fetches.size(), 5u);  // everything stays
}

// With room for k layers and no prefetch, a forward and backward scan over n layers fetches n on the way up and n - k
// on the way back: as few as with any choice of what to evict.
TEST(Plan, KeepsTheLastLayersForTheWayBack) {
  for (Item layers = 2; layers <= 8; ++layers) {
    const std::vector<ItemShape> shapes = equal_shapes(layers, 10);
    for (std::uint64_t at_once = 1; at_once <= layers; ++at_once) {
      const Plan made = plan(layers_forward_and_back(layers), {.items = shapes,
                                                               .gather_bytes = 10 * at_once,
                                                               .prefetch_elements = 0,
                                                               .live_elements_max = kNoLimit,
                                                               .reuse_distance_elements = kNoLimit});
      EXPECT_EQ(made.fetches.size(), layers + (layers - at_once)) << layers << " layers, " << at_once << " at once";
    }
  }
}

TEST(Plan, PrefetchStaysWithinItsLimits) {
  const std::vector<ItemShape> shapes = equal_shapes(8, 100);
  const AccessTrace trace = layers_forward_and_back(8);
  const Plan none = plan(trace, {.items = shapes,
                                 .gather_bytes = 400,
                                 .prefetch_elements = 0,
                                 .live_elements_max = kNoLimit,
                                 .reuse_distance_elements = 0});
  EXPECT_TRUE(none.fetches_at(0).empty());
  const Plan two = plan(trace, {.items = shapes,
                                .gather_bytes = 400,
                                .prefetch_elements = 200,
                                .live_elements_max = kNoLimit,
                                .reuse_distance_elements = 0});
  EXPECT_EQ(two.fetches_at(0).size(), 2u);
  const Plan live = plan(trace, {.items = shapes,
                                 .gather_bytes = 400,
                                 .prefetch_elements = 400,
                                 .live_elements_max = 300,
                                 .reuse_distance_elements = 0});
  EXPECT_EQ(live.fetches_at(0).size(), 3u);
}

// Planning is linear in the trace. Processor time, and ten times what an ordinary machine needs at most: with a look
// through the trace for every release, this takes minutes. The second time everything has room, and all of it may be
// fetched ahead.
TEST(Plan, OfAHundredThousandAccessesTakesSecondsAtMost) {
  constexpr Item kItems = 20'000;
  const std::vector<ItemShape> shapes = equal_shapes(kItems, 10);
  const AccessTrace trace = layers_forward_and_back(kItems);
  ASSERT_EQ(trace.size(), 100'000u);
  const std::clock_t begin = std::clock();
  const auto planned = [&](std::uint64_t gather_bytes, std::uint64_t prefetch_elements) {
    return plan(trace, {.items = shapes,
                        .gather_bytes = gather_bytes,
                        .prefetch_elements = prefetch_elements,
                        .live_elements_max = kNoLimit,
                        .reuse_distance_elements = kNoLimit});
  };
  EXPECT_GE(planned(640, 80).fetches.size(), 2u * kItems - 64);
  EXPECT_EQ(planned(10 * kItems, kNoLimit).fetches_at(0).size(), kItems);
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 10.0);
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
}  // namespace hoist::scheduler::plan_test
