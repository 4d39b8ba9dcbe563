// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/assert.hpp>
#include <hoist/scheduler/fetch_planner.hpp>

namespace hoist::scheduler {

FetchPlanner::FetchPlanner(FetchPlannerOptions options)
    : options_(std::move(options)), table_(options_.items, options_.slot_count), last_use_(options_.items.size(), 0) {}

PlanInputs FetchPlanner::inputs() const {
  return {.items = options_.items,
          .slot_count = options_.slot_count,
          .prefetch_elements = options_.prefetch_elements,
          .live_elements_max = options_.live_elements_max,
          .reuse_distance_elements = options_.reuse_distance_elements};
}

std::span<const Fetch> FetchPlanner::begin(std::size_t kind) {
  HOIST_ASSERT(kind < kPassKinds);
  table_.clear_slotted();
  trace_.clear();
  kind_ = kind;
  following_ = plans_[kind].has_value();
  if (!following_) return {};
  const auto fetches = plans_[kind]->fetches_at(0);
  apply(fetches);
  return fetches;
}

void FetchPlanner::apply(std::span<const Fetch> fetches) {
  for (const Fetch& fetch : fetches) {
    if (fetch.slot == kOwnMemory) continue;
    if (table_.resident(fetch.item))
      table_.evict(fetch.item);  // the plan had released it; only the memory still held it
    table_.place(fetch.item, fetch.slot);
  }
}

std::span<const Fetch> FetchPlanner::gather(Item item) { return access({AccessKind::gather, item}); }
std::span<const Fetch> FetchPlanner::release(Item item) { return access({AccessKind::release, item}); }
std::span<const Fetch> FetchPlanner::finish(Item item) { return access({AccessKind::finish, item}); }

std::span<const Fetch> FetchPlanner::access(Access access) {
  const std::size_t position = trace_.size();
  if (following_) {
    const Plan& plan = *plans_[kind_];
    following_ = position < plan.trace.size() && plan.trace[position] == access;
  }
  if (!following_) return serve_on_demand(access);

  trace_.push_back(access);
  last_use_[access.item] = position;
  const bool slotted = options_.items[access.item].slotted;
  if (access.kind == AccessKind::release && slotted && table_.resident(access.item)) table_.unpin(access.item);
  const auto fetches = plans_[kind_]->fetches_at(position + 1);
  apply(fetches);
  if (access.kind == AccessKind::gather && slotted) table_.pin(access.item);
  return fetches;
}

// Without a plan the future is unknown: fetch the requested item into an empty slot, or into the one whose occupant has
// been idle longest.
std::span<const Fetch> FetchPlanner::serve_on_demand(Access access) {
  issued_.clear();
  const bool slotted = options_.items[access.item].slotted;
  if (access.kind == AccessKind::gather) {
    if (!slotted) {
      issued_.push_back({access.item, kOwnMemory});
    } else if (!table_.resident(access.item)) {
      Slot best = kNoSlot;
      for (Slot slot = 0; slot < table_.slot_count(); ++slot) {
        const Item occupant = table_.occupant(slot);
        if (occupant == SlotTable::kEmpty) {
          best = slot;
          break;
        }
        if (table_.pinned(occupant)) continue;
        if (best == kNoSlot || last_use_[occupant] < last_use_[table_.occupant(best)]) best = slot;
      }
      issued_.push_back({access.item, best});
      if (best == kNoSlot) return issued_;
      table_.place(access.item, best);
    }
    if (slotted) table_.pin(access.item);
  } else if (access.kind == AccessKind::release && slotted && table_.resident(access.item)) {
    table_.unpin(access.item);
  }
  last_use_[access.item] = trace_.size();
  trace_.push_back(access);
  return issued_;
}

void FetchPlanner::end(bool complete) {
  for (Item item = 0; item < options_.items.size(); ++item) {
    if (table_.pinned(item)) table_.unpin(item);
  }
  if (!complete || trace_.empty()) return;
  const bool as_planned = plans_[kind_] && plans_[kind_]->trace == trace_;
  if (!as_planned) plans_[kind_] = plan(trace_, inputs());
}

std::vector<Item> FetchPlanner::upcoming_fetches() const {
  std::vector<Item> items;
  if (!following_) return items;
  const Plan& plan = *plans_[kind_];
  for (std::size_t i = plan.first[trace_.size() + 1]; i < plan.fetches.size(); ++i)
    items.push_back(plan.fetches[i].item);
  return items;
}

std::vector<Item> FetchPlanner::planned_fetches(std::size_t kind) const {
  std::vector<Item> items;
  if (!plans_[kind]) return items;
  for (const Fetch& fetch : plans_[kind]->fetches) items.push_back(fetch.item);
  return items;
}

std::vector<std::uint32_t> FetchPlanner::fetch_counts(std::size_t kind) const {
  if (!plans_[kind]) return {};
  std::vector<std::uint32_t> counts(options_.items.size(), 0);
  for (const Fetch& fetch : plans_[kind]->fetches) ++counts[fetch.item];
  return counts;
}

}  // namespace hoist::scheduler
