// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include <hoist/core/assert.hpp>
#include <hoist/scheduler/places.hpp>

namespace hoist::scheduler {
namespace {

// Moves `place` up to the first range that is clear of the obstacles' places.
template <class PlaceOf>
Place first_clear(Place place, std::span<const Item> obstacles, const PlaceOf& place_of) {
  for (bool moved = true; moved;) {
    moved = false;
    for (const Item obstacle : obstacles) {
      const Place other = place_of(obstacle);
      if (!place.overlaps(other)) continue;
      place.begin = other.end();
      moved = true;
    }
  }
  return place;
}

// Companions are items that others are gathered with. They are stacked down from the end of the memory, only as deep as
// those that may be pinned together require: so the memory before them stays in one piece.
class CompanionStack {
 public:
  explicit CompanionStack(std::span<const ItemNeeds> items) : items_(items), depth_(items.size()) {
    std::vector<std::vector<Item>> together(items.size());
    for (Item item = 0; item < items.size(); ++item) {
      std::vector<Item> group = items[item].gathered_with;
      group.push_back(item);
      for (const Item a : group)
        for (const Item b : group)
          if (a != b) together[a].push_back(b);
    }
    for (Item item = 0; item < items.size(); ++item)
      for (const Item companion : items[item].gathered_with)
        if (!depth_[companion]) stack(companion, together[companion]);
  }

  bool contains(Item item) const { return depth_[item].has_value(); }
  // From the end of the memory to the beginning of the companion.
  std::uint64_t depth(Item companion) const { return *depth_[companion]; }

 private:
  // At the least depth where nothing lies that may be pinned together with it.
  void stack(Item item, const std::vector<Item>& together) {
    const auto from_end = [&](Item other) {
      return depth_[other] ? Place{*depth_[other] - items_[other].bytes, items_[other].bytes} : Place{};
    };
    depth_[item] = first_clear({0, items_[item].bytes}, together, from_end).end();
  }

  std::span<const ItemNeeds> items_;
  std::vector<std::optional<std::uint64_t>> depth_;
};

// The homes that one rule for the next item gives.
class Homes {
 public:
  Homes(std::span<const ItemNeeds> items, const CompanionStack& companions, std::uint64_t total_bytes)
      : items_(items), total_bytes_(total_bytes), places_(items.size()) {
    for (Item item = 0; item < items.size(); ++item) {
      places_[item].bytes = items[item].bytes;
      if (companions.contains(item)) places_[item].begin = total_bytes - companions.depth(item);
    }
  }

  // Each item after the one before it, and from the beginning again.
  Homes&& in_a_ring(const CompanionStack& companions) && {
    std::uint64_t next = 0;
    for (Item item = 0; item < items_.size(); ++item) {
      if (companions.contains(item)) continue;
      if (!fits(item, next)) fits(item, 0);
      next = places_[item].end();
    }
    return std::move(*this);
  }

  // At the beginning and at the end in turns: two neighbours then fit whenever their sum does.
  Homes&& at_both_ends(const CompanionStack& companions) && {
    bool at_end = false;
    for (Item item = 0; item < items_.size(); ++item) {
      if (companions.contains(item) || items_[item].bytes == 0) continue;
      fits(item, 0);
      if (at_end) push_to_end(item);
      at_end = !at_end;
    }
    return std::move(*this);
  }

  // Fewer neighbours that overlap are better; then, how many bytes of other items come between two that do.
  std::pair<std::uint64_t, std::uint64_t> cost() const {
    std::uint64_t neighbours = 0, bytes_between = 0;
    for (Item item = 0; item < items_.size(); ++item) {
      if (items_[item].bytes == 0) continue;
      std::uint64_t between = 0;
      Item other = item;
      while (other-- > 0 && !places_[other].overlaps(places_[item])) between += places_[other].bytes;
      neighbours += between == 0 && other < item ? 1 : 0;
      bytes_between += between;
    }
    return {neighbours, ~bytes_between};
  }

  std::vector<Place> take() && { return std::move(places_); }

 private:
  // Moves the item to the first range from `begin` on that is clear of its companions.
  bool fits(Item item, std::uint64_t begin) {
    const auto place_of = [&](Item companion) { return places_[companion]; };
    places_[item] = first_clear({begin, items_[item].bytes}, items_[item].gathered_with, place_of);
    return places_[item].end() <= total_bytes_;
  }

  void push_to_end(Item item) {
    const auto from_end = [&](Item companion) {
      return Place{total_bytes_ - places_[companion].end(), places_[companion].bytes};
    };
    const Place place = first_clear({0, items_[item].bytes}, items_[item].gathered_with, from_end);
    if (place.end() <= total_bytes_) places_[item].begin = total_bytes_ - place.end();
  }

  std::span<const ItemNeeds> items_;
  std::uint64_t total_bytes_;
  std::vector<Place> places_;
};

std::uint64_t sum_of(std::span<const ItemNeeds> items) {
  std::uint64_t bytes = 0;
  for (const ItemNeeds& item : items) bytes += item.bytes;
  return bytes;
}

}  // namespace

std::uint64_t least_gather_bytes(std::span<const ItemNeeds> items) {
  const CompanionStack companions(items);
  std::uint64_t least = 0;
  for (Item item = 0; item < items.size(); ++item) {
    if (companions.contains(item)) {
      least = std::max(least, companions.depth(item));
      continue;
    }
    std::uint64_t deepest = 0;
    for (const Item companion : items[item].gathered_with) deepest = std::max(deepest, companions.depth(companion));
    least = std::max(least, items[item].bytes + deepest);
  }
  return least;
}

std::uint64_t most_gather_bytes(std::span<const ItemNeeds> items) {
  return std::max(sum_of(items), least_gather_bytes(items));
}

std::vector<Place> choose_homes(std::span<const ItemNeeds> items, std::uint64_t total_bytes) {
  HOIST_ASSERT(total_bytes >= least_gather_bytes(items), "{} bytes", total_bytes);
  std::vector<Place> homes(items.size());
  if (sum_of(items) <= total_bytes) {
    std::uint64_t next = 0;
    for (Item item = 0; item < items.size(); ++item) {
      homes[item] = {next, items[item].bytes};
      next += items[item].bytes;
    }
    return homes;
  }
  const CompanionStack companions(items);
  Homes ring = Homes(items, companions, total_bytes).in_a_ring(companions);
  Homes ends = Homes(items, companions, total_bytes).at_both_ends(companions);
  return (ring.cost() <= ends.cost() ? std::move(ring) : std::move(ends)).take();
}

ItemRanges::Iterator ItemRanges::from(std::uint64_t offset) const {
  return std::ranges::lower_bound(ranges_, offset, {}, &Range::begin);
}

void ItemRanges::add(const Range& range) { ranges_.insert(from(range.begin), range); }

void ItemRanges::remove(std::uint64_t begin) { ranges_.erase(from(begin)); }

Places::Places(std::vector<ItemNeeds> items, std::uint64_t total_bytes)
    : items_(std::move(items)),
      total_bytes_(total_bytes),
      homes_(choose_homes(items_, total_bytes)),
      pinned_(items_.size()),
      used_(items_.size()) {
  all_fit_ = sum_of(items_) <= total_bytes;
  reset();
}

void Places::reset() {
  places_ = homes_;
  pinned_.assign(items_.size(), false);
  used_.assign(items_.size(), false);
  pinned_ranges_.clear();
}

bool Places::is_free(const Place& place) const {
  const auto after = pinned_ranges_.from(place.end());
  return after == pinned_ranges_.begin() || places_[std::prev(after)->item].end() <= place.begin;
}

// To the first gap between pinned items that is large enough.
bool Places::move(Item item) {
  if (items_[item].stable_in_pass && used_[item]) return false;
  Place place = places_[item];
  place.begin = 0;
  for (const auto& [begin, pinned] : pinned_ranges_) {
    if (place.end() <= begin) break;
    place.begin = places_[pinned].end();
  }
  if (place.end() > total_bytes_) return false;
  places_[item] = place;
  return true;
}

bool Places::pin(Item item) {
  HOIST_ASSERT(items_[item].bytes > 0 && !pinned_[item], "item {}", item);
  if (!is_free(places_[item]) && !move(item)) return false;
  pinned_[item] = used_[item] = true;
  pinned_ranges_.add({places_[item].begin, item});
  return true;
}

std::optional<Item> Places::pin(std::span<const Item> items) {
  former_.clear();
  for (const Item item : items) {
    former_.push_back({places_[item], used_[item]});
    if (pin(item)) continue;
    for (std::size_t i = former_.size() - 1; i-- > 0;) {
      unpin(items[i]);
      places_[items[i]] = former_[i].place;
      used_[items[i]] = former_[i].used;
    }
    return item;
  }
  return std::nullopt;
}

void Places::unpin(Item item) {
  HOIST_ASSERT(pinned_[item], "item {}", item);
  pinned_[item] = false;
  pinned_ranges_.remove(places_[item].begin);
}

}  // namespace hoist::scheduler
