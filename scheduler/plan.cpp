// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
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

SlotTable::SlotTable(std::span<const ItemShape> items, std::uint32_t slot_count)
    : items_(items.begin(), items.end()),
      occupants_(slot_count, kEmpty),
      slot_of_(items.size(), kEmpty),
      pinned_(items.size(), false) {}

void SlotTable::place(Item item, Slot slot) {
  HOIST_ASSERT(items_[item].slotted && !resident(item), "item {}", item);
  if (occupants_[slot] != kEmpty) evict(occupants_[slot]);
  occupants_[slot] = item;
  slot_of_[item] = slot;
  live_elements_ += items_[item].elements;
}

void SlotTable::evict(Item item) {
  HOIST_ASSERT(resident(item) && !pinned_[item], "item {}", item);
  occupants_[slot_of_[item]] = kEmpty;
  slot_of_[item] = kEmpty;
  live_elements_ -= items_[item].elements;
}

void SlotTable::clear_slotted() {
  for (const Item item : std::vector<Item>(occupants_)) {
    if (item != kEmpty) evict(item);
  }
}

namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

class Planner {
 public:
  Planner(const AccessTrace& trace, const PlanInputs& inputs)
      : inputs_(inputs), table_(inputs.items, inputs.slot_count), fetched_own_(inputs.items.size(), false) {
    plan_.trace = trace;
    gathers_of_.resize(inputs.items.size());
    for (std::size_t i = 0; i < trace.size(); ++i) {
      if (trace[i].kind == AccessKind::gather) gathers_of_[trace[i].item].push_back(i);
    }
  }

  Plan run() {
    begin_point();
    prefetch(0);
    for (std::size_t i = 0; i < plan_.trace.size(); ++i) {
      begin_point();
      const Access access = plan_.trace[i];
      if (access.kind == AccessKind::gather) gather(access.item, i);
      if (access.kind == AccessKind::release) release(access.item, i);
      prefetch(i + 1);
    }
    begin_point();  // one past the last point
    return std::move(plan_);
  }

 private:
  void begin_point() { plan_.first.push_back(plan_.fetches.size()); }

  // First gather of `item` at or after position `from`.
  std::size_t next_use(Item item, std::size_t from) const {
    const auto& uses = gathers_of_[item];
    const auto use = std::lower_bound(uses.begin(), uses.end(), from);
    return use == uses.end() ? kNever : *use;
  }

  bool slotted(Item item) const { return inputs_.items[item].slotted; }
  bool bound(Item item) const { return inputs_.items[item].bound; }
  bool present(Item item) const { return slotted(item) ? table_.resident(item) : fetched_own_[item]; }

  void fetch(Item item, Slot slot) {
    if (slotted(item)) {
      table_.place(item, slot);
    } else if (!bound(item)) {
      fetched_own_[item] = true;
    }
    plan_.fetches.push_back({item, slotted(item) ? slot : kOwnMemory});
  }

  // A slot for an item used at `use`: an empty one, else that of the unpinned occupant used last, when that is later.
  Slot slot_for(std::size_t use, std::size_t now) const {
    Slot best = kOwnMemory;
    std::size_t best_use = use;
    for (Slot slot = 0; slot < table_.slot_count(); ++slot) {
      const Item occupant = table_.occupant(slot);
      if (occupant == SlotTable::kEmpty) return slot;
      if (table_.pinned(occupant)) continue;
      const std::size_t occupant_use = next_use(occupant, now);
      if (occupant_use > best_use) {
        best = slot;
        best_use = occupant_use;
      }
    }
    return best;
  }

  void gather(Item item, std::size_t position) {
    if (!present(item)) {
      const Slot slot = slotted(item) ? slot_for(position, position) : kOwnMemory;
      HOIST_ASSERT(!slotted(item) || slot != kOwnMemory, "no slot for item {} at access {}", item, position);
      fetch(item, slot);
    }
    if (slotted(item)) table_.pin(item);
  }

  void release(Item item, std::size_t position) {
    if (!slotted(item) || !table_.resident(item)) return;
    table_.unpin(item);
    if (!reused_soon(item, position)) table_.evict(item);
  }

  bool reused_soon(Item item, std::size_t position) const {
    const std::size_t use = next_use(item, position);
    if (use == kNever) return false;
    std::uint64_t elements = 0;
    for (std::size_t i = position + 1; i < use; ++i) {
      if (plan_.trace[i].kind == AccessKind::gather) elements += inputs_.items[plan_.trace[i].item].elements;
    }
    return elements < inputs_.reuse_distance_elements;
  }

  // Fetches what comes next, in order of use, while the limits and the slots allow.
  void prefetch(std::size_t from) {
    std::uint64_t ahead = 0;
    for (std::size_t i = from; i < plan_.trace.size() && ahead < inputs_.prefetch_elements; ++i) {
      if (plan_.trace[i].kind != AccessKind::gather) continue;
      const Item item = plan_.trace[i].item;
      const std::uint64_t elements = inputs_.items[item].elements;
      ahead += elements;
      if (ahead > inputs_.prefetch_elements) return;
      if (present(item) || bound(item)) continue;
      if (slotted(item) && table_.live_elements() + elements > inputs_.live_elements_max) return;
      const Slot slot = slotted(item) ? slot_for(i, from) : kOwnMemory;
      if (slotted(item) && slot == kOwnMemory) return;
      fetch(item, slot);
    }
  }

  const PlanInputs& inputs_;
  SlotTable table_;
  std::vector<bool> fetched_own_;
  std::vector<std::vector<std::size_t>> gathers_of_;
  Plan plan_;
};

}  // namespace

Plan plan(const AccessTrace& trace, const PlanInputs& inputs) { return Planner(trace, inputs).run(); }

}  // namespace hoist::scheduler
