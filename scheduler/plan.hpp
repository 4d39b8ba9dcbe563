// SPDX-License-Identifier: Apache-2.0
// scheduler/plan.hpp - plans the fetches of a pass from a recorded one. Start here. Pure.
//
// Training repeats its accesses. The first pass of a kind is recorded as an AccessTrace; plan() then decides, for every
// point of the pass, which items (units) to fetch there and into which slot of device memory, so that an item is in
// transit before it is requested. Equal inputs give equal plans on every rank, and fetches are issued at points of the
// program, never by timing: the order of collectives is the same everywhere.
//
// Source: eviction by furthest next use is Belady, "A study of replacement algorithms", IBM Systems Journal 1966.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hoist::scheduler {

// Index of something that is fetched whole.
using Item = std::uint32_t;
// Index of a piece of device memory that can hold any slotted item; kOwnMemory for items that have their own.
using Slot = std::uint32_t;
inline constexpr Slot kOwnMemory = 0xFFFFFFFFu;

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
  bool slotted = true;  // false: has memory of its own, and stays valid there once fetched
  bool bound = false;   // its memory comes with every gather (not slotted): fetched then, never early, and never kept
};

struct PlanInputs {
  std::span<const ItemShape> items;
  std::uint32_t slot_count = 0;
  std::uint64_t prefetch_elements = 0;  // fetched ahead at most; 0: nothing is prefetched
  std::uint64_t live_elements_max = 0;  // resident at once at most, unless a single gather needs more
  std::uint64_t reuse_distance_elements =
      0;  // stays after its release only if it is used again within this many elements
};

struct Fetch {
  Item item;
  Slot slot;
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

// The content of the slots at a point of a pass, and the rules for changing it; used by plan() and by the FetchPlanner,
// so that both see the same residency.
class SlotTable {
 public:
  SlotTable(std::span<const ItemShape> items, std::uint32_t slot_count);

  static constexpr Item kEmpty = 0xFFFFFFFFu;
  Item occupant(Slot slot) const { return occupants_[slot]; }
  bool resident(Item item) const { return slot_of_[item] != kEmpty; }
  Slot slot_of(Item item) const { return slot_of_[item]; }
  bool pinned(Item item) const { return pinned_[item]; }
  std::uint32_t slot_count() const { return static_cast<std::uint32_t>(occupants_.size()); }
  std::uint64_t live_elements() const { return live_elements_; }

  void place(Item item, Slot slot);  // replaces the slot's occupant, which must not be pinned
  void evict(Item item);
  void pin(Item item) { pinned_[item] = true; }
  void unpin(Item item) { pinned_[item] = false; }
  void clear_slotted();  // nothing pinned; items with their own memory stay

 private:
  std::vector<ItemShape> items_;
  std::vector<Item> occupants_;
  std::vector<Slot> slot_of_;
  std::vector<bool> pinned_;
  std::uint64_t live_elements_ = 0;
};

// Pre: in the trace, gather and release of an item alternate, and at no point are more slotted items pinned than there
// are slots (the recorded pass ran, so this holds).
Plan plan(const AccessTrace& trace, const PlanInputs& inputs);

}  // namespace hoist::scheduler
