// SPDX-License-Identifier: Apache-2.0
// scheduler/plan.hpp - plans the fetches of a pass from a recorded one. Start here. Pure.
//
// Training repeats its accesses. The first pass of a kind is recorded as an AccessTrace; plan() then decides, for every
// point of the pass, which items (units) to fetch there, so that an item is in transit before it is requested. Where an
// item lies is decided by places.hpp. Equal inputs give equal plans on every rank, and fetches are issued at points of
// the program, never by timing: the order of collectives is the same everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <hoist/scheduler/places.hpp>

namespace hoist::scheduler {

enum class AccessKind : std::uint8_t {
  gather,   // the first pin on an item begins
  release,  // the last pin on it ended
  finish,   // its gradient is complete: a collective takes place here
};

struct Access {
  AccessKind kind;
  Item item;
  friend bool operator==(const Access&, const Access&) = default;
};

using AccessTrace = std::vector<Access>;

// A hash of the trace's prefix; equal traces have equal hashes on every machine.
std::uint64_t trace_hash(std::span<const Access> trace);

struct ItemShape {
  std::uint64_t elements = 0;
  ItemNeeds needs{};  // of 0 bytes: the item has memory of its own, and stays valid there once fetched

  bool has_own_memory() const { return needs.bytes == 0; }
};

std::vector<ItemNeeds> needs_of(std::span<const ItemShape> items);

struct PlanInputs {
  std::vector<ItemShape> items;
  std::uint64_t gather_bytes = 0;       // the gather memory
  std::uint64_t prefetch_elements = 0;  // fetched ahead at most; 0: nothing is prefetched
  std::uint64_t live_elements_max = 0;  // resident at once at most, unless a single gather needs more
  // What is released stays only if it is used again within this many elements.
  std::uint64_t reuse_distance_elements = 0;
};

struct Fetch {
  Item item;
  Place place;  // of 0 bytes: the item's own memory
  friend bool operator==(const Fetch&, const Fetch&) = default;
};

// fetches_at(i): what to issue when access i - 1 of the trace happens (i = 0: when the pass begins). A gather's own
// fetch, if none brought the item earlier, is first in its list.
struct Plan {
  AccessTrace trace;
  std::vector<Fetch> fetches;      // in the order they are issued
  std::vector<std::size_t> first;  // index of the first fetch of point i; size trace.size() + 2

  std::span<const Fetch> fetches_at(std::size_t point) const {
    return std::span(fetches).subspan(first[point], first[point + 1] - first[point]);
  }
};

// The contents of the gather memory at a point of a pass, for plan() and for the FetchPlanner.
class Residency {
 public:
  explicit Residency(std::span<const ItemShape> items) : items_(items), places_(items.size()) {}

  bool holds(Item item) const { return places_[item].has_value(); }
  bool holds(Item item, const Place& place) const { return places_[item] == place; }
  std::uint64_t live_elements() const { return live_elements_; }
  // Items that lie in a range, in the order of their addresses.
  std::vector<Item> within(const Place& range) const;
  // Takes the item in, and evicts what lies there.
  void place(Item item, const Place& place);
  void evict(Item item);
  void clear();

 private:
  ItemRanges::Iterator first_within(const Place& range) const;

  std::span<const ItemShape> items_;
  std::vector<std::optional<Place>> places_;
  ItemRanges ranges_;
  std::uint64_t live_elements_ = 0;
};

// Pre: in the trace, gather and release of an item alternate; every gather found room when the pass was recorded, and
// so it does in Places of the same items and bytes.
Plan plan(const AccessTrace& trace, const PlanInputs& inputs);

}  // namespace hoist::scheduler
