// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <limits>

#include <hoist/core/assert.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/scheduler/plan.hpp>

namespace hoist::scheduler {

std::uint64_t trace_hash(std::span<const Access> trace) {
  std::uint64_t hash = trace.size();
  for (const Access& access : trace) {
    hash = random_bits(hash, (static_cast<std::uint64_t>(access.kind) << 32) | access.item);
  }
  return hash;
}

std::vector<ItemNeeds> needs_of(std::span<const ItemShape> items) {
  std::vector<ItemNeeds> needs;
  for (const ItemShape& item : items) needs.push_back(item.needs);
  return needs;
}

// The first place that overlaps it, if any; otherwise the first after its beginning.
ItemRanges::Iterator Residency::first_within(const Place& range) const {
  const auto after = ranges_.from(range.begin + 1);
  const bool overlaps = after != ranges_.begin() && places_[std::prev(after)->item]->overlaps(range);
  return overlaps ? std::prev(after) : after;
}

std::vector<Item> Residency::within(const Place& range) const {
  std::vector<Item> items;
  for (auto at = first_within(range); at != ranges_.end() && at->begin < range.end(); ++at) items.push_back(at->item);
  return items;
}

void Residency::place(Item item, const Place& place) {
  if (holds(item)) evict(item);
  for (auto at = first_within(place); at != ranges_.end() && at->begin < place.end(); at = first_within(place))
    evict(at->item);
  places_[item] = place;
  ranges_.add({place.begin, item});
  live_elements_ += items_[item].elements;
}

void Residency::evict(Item item) {
  HOIST_ASSERT(holds(item), "item {}", item);
  ranges_.remove(places_[item]->begin);
  places_[item].reset();
  live_elements_ -= items_[item].elements;
}

void Residency::clear() {
  while (ranges_.begin() != ranges_.end()) evict(std::prev(ranges_.end())->item);
}

namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

class Planner {
 public:
  Planner(const AccessTrace& trace, const PlanInputs& inputs)
      : inputs_(inputs),
        residency_(inputs.items),
        pinned_(inputs.items.size(), false),
        fetched_own_(inputs.items.size(), false) {
    plan_.trace = trace;
    gathers_of_.resize(inputs.items.size());
    gathered_before_.push_back(0);
    for (std::size_t i = 0; i < trace.size(); ++i) {
      const bool gathers = trace[i].kind == AccessKind::gather;
      if (gathers) gathers_of_[trace[i].item].push_back(i);
      gathered_before_.push_back(gathered_before_.back() + (gathers ? inputs.items[trace[i].item].elements : 0));
    }
    find_places();
    find_evictions();
  }

  Plan run() {
    begin_point();
    prefetch(0);
    for (std::size_t i = 0; i < plan_.trace.size(); ++i) {
      begin_point();
      const Access access = plan_.trace[i];
      if (access.kind == AccessKind::gather) gather(i);
      if (access.kind == AccessKind::release) release(access.item, i);
      prefetch(i + 1);
    }
    begin_point();  // one past the last point
    return std::move(plan_);
  }

 private:
  void begin_point() { plan_.first.push_back(plan_.fetches.size()); }

  // Where each gather of the trace will find its item: that depends on what is pinned, not on what is fetched when.
  void find_places() {
    Places places(needs_of(inputs_.items), inputs_.gather_bytes);
    place_at_.resize(plan_.trace.size());
    for (std::size_t i = 0; i < plan_.trace.size(); ++i) {
      const Access access = plan_.trace[i];
      if (has_own_memory(access.item)) continue;
      if (access.kind == AccessKind::gather) {
        const bool has_room = places.pin(access.item);
        HOIST_ASSERT(has_room, "no room for item {} at access {}", access.item, i);
        place_at_[i] = places.of(access.item);
      } else if (access.kind == AccessKind::release && places.pinned(access.item)) {
        places.unpin(access.item);
      }
    }
  }

  // Which releases evict their item, because its next gather is too far away.
  void find_evictions() {
    std::vector<std::size_t> released(inputs_.items.size(), kNever);
    evicted_at_.assign(plan_.trace.size(), kNever);
    for (std::size_t i = 0; i < plan_.trace.size(); ++i) {
      const auto [kind, item] = plan_.trace[i];
      if (kind == AccessKind::release) released[item] = i;
      if (kind == AccessKind::gather && released[item] != kNever && !reused_soon(item, released[item]))
        evicted_at_[i] = released[item];
    }
  }

  // First gather of `item` at or after position `from`.
  std::size_t next_use(Item item, std::size_t from) const {
    const auto& uses = gathers_of_[item];
    const auto use = std::lower_bound(uses.begin(), uses.end(), from);
    return use == uses.end() ? kNever : *use;
  }

  bool has_own_memory(Item item) const { return inputs_.items[item].has_own_memory(); }
  // Whether the gather at a position finds its item without a further fetch.
  bool is_present(std::size_t use) const {
    const Item item = plan_.trace[use].item;
    return has_own_memory(item) ? fetched_own_[item] : residency_.holds(item, place_at_[use]);
  }

  void fetch(std::size_t use) {
    const Item item = plan_.trace[use].item;
    if (has_own_memory(item)) {
      fetched_own_[item] = true;
    } else {
      residency_.place(item, place_at_[use]);
    }
    plan_.fetches.push_back({item, place_at_[use]});
  }

  void gather(std::size_t position) {
    const Item item = plan_.trace[position].item;
    if (!is_present(position)) fetch(position);
    pinned_[item] = true;
  }

  void release(Item item, std::size_t position) {
    pinned_[item] = false;
    if (residency_.holds(item) && !reused_soon(item, position)) residency_.evict(item);
  }

  bool reused_soon(Item item, std::size_t position) const {
    const std::size_t use = next_use(item, position);
    if (use == kNever) return false;
    return gathered_before_[use] - gathered_before_[position + 1] < inputs_.reuse_distance_elements;
  }

  // Whether nothing that lies in the place of the gather at `use` is needed before it.
  bool is_free_until(std::size_t use, std::size_t now) const {
    const Item item = plan_.trace[use].item;
    if (pinned_[item] || (residency_.holds(item) && next_use(item, now) != use)) return false;  // it moves, but not yet
    return std::ranges::all_of(residency_.within(place_at_[use]), [&](Item other) {
      return other == item || (!pinned_[other] && next_use(other, now) > use);
    });
  }

  // Whether the item of the gather at `use` will be evicted once more before it.
  bool leaves_before(std::size_t use, std::size_t now) const {
    return !has_own_memory(plan_.trace[use].item) && evicted_at_[use] != kNever && evicted_at_[use] >= now;
  }

  // Fetches what comes next in the order of use, so that no fetch delays one that is needed sooner. The search stops at
  // the first gather that cannot be fetched yet: a limit is reached, its place is in use, or its item will be evicted
  // before it. The next search continues at that gather: every one before it will find its item, which nothing evicts
  // or moves until then.
  void prefetch(std::size_t from) {
    for (searched_ = std::max(searched_, from); searched_ < plan_.trace.size(); ++searched_) {
      const std::uint64_t ahead = gathered_before_[searched_] - gathered_before_[from];
      if (ahead >= inputs_.prefetch_elements) return;
      if (plan_.trace[searched_].kind != AccessKind::gather) continue;
      const std::uint64_t elements = inputs_.items[plan_.trace[searched_].item].elements;
      if (ahead + elements > inputs_.prefetch_elements) return;
      if (leaves_before(searched_, from)) return;
      if (is_present(searched_)) continue;
      if (!has_own_memory(plan_.trace[searched_].item)) {
        if (residency_.live_elements() + elements > inputs_.live_elements_max) return;
        if (!is_free_until(searched_, from)) return;
      }
      fetch(searched_);
    }
  }

  const PlanInputs& inputs_;
  Residency residency_;
  std::vector<bool> pinned_;
  std::vector<bool> fetched_own_;
  std::vector<std::vector<std::size_t>> gathers_of_;
  std::vector<std::uint64_t> gathered_before_;  // elements, before each position
  std::vector<Place> place_at_;                 // of the gather at each position
  std::vector<std::size_t> evicted_at_;         // the release that evicts the item of the gather at each position
  std::size_t searched_ = 0;                    // the end of the last search of prefetch()
  Plan plan_;
};

}  // namespace

Plan plan(const AccessTrace& trace, const PlanInputs& inputs) { return Planner(trace, inputs).run(); }

}  // namespace hoist::scheduler
