// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/assert.hpp>
#include <hoist/scheduler/fetch_planner.hpp>

namespace hoist::scheduler {

FetchPlanner::FetchPlanner(PlanInputs inputs)
    : inputs_(std::move(inputs)), places_(needs_of(inputs_.items), inputs_.gather_bytes), residency_(inputs_.items) {}

std::span<const Fetch> FetchPlanner::begin(std::size_t kind) {
  HOIST_ASSERT(kind < kPassKinds);
  places_.reset();
  residency_.clear();
  trace_.clear();
  kind_ = kind;
  following_ = plans_[kind].has_value();
  if (!following_) return {};
  const auto fetches = plans_[kind]->fetches_at(0);
  apply(fetches);
  return fetches;
}

void FetchPlanner::apply(std::span<const Fetch> fetches) {
  for (const Fetch& fetch : fetches)
    if (!has_own_memory(fetch.item)) residency_.place(fetch.item, fetch.place);
}

std::optional<Item> FetchPlanner::make_room(std::span<const Item> items) {
  without_room_.clear();
  for (const Item item : items)
    if (!has_own_memory(item) && !places_.pinned(item)) without_room_.push_back(item);
  return places_.pin(without_room_);
}

std::optional<std::span<const Fetch>> FetchPlanner::gather(Item item) {
  if (!has_own_memory(item) && !places_.pinned(item) && !places_.pin(item)) return std::nullopt;
  return access({AccessKind::gather, item});
}

std::span<const Fetch> FetchPlanner::release(Item item) {
  if (!has_own_memory(item)) places_.unpin(item);
  return access({AccessKind::release, item});
}

std::span<const Fetch> FetchPlanner::finish(Item item) { return access({AccessKind::finish, item}); }

std::span<const Fetch> FetchPlanner::access(Access access) {
  const std::size_t position = trace_.size();
  if (following_) {
    const Plan& plan = *plans_[kind_];
    following_ = position < plan.trace.size() && plan.trace[position] == access;
  }
  trace_.push_back(access);
  if (!following_) return serve_on_demand(access);
  const auto fetches = plans_[kind_]->fetches_at(position + 1);
  apply(fetches);
  return fetches;
}

// Without a plan the future is unknown: an item is fetched when it is needed, and lies there until another one is
// fetched into its place.
std::span<const Fetch> FetchPlanner::serve_on_demand(Access access) {
  issued_.clear();
  if (access.kind != AccessKind::gather) return issued_;
  const Item item = access.item;
  if (has_own_memory(item)) {
    issued_.push_back({item, {}});
  } else if (!residency_.holds(item, places_.of(item))) {
    issued_.push_back({item, places_.of(item)});
    residency_.place(item, places_.of(item));
  }
  return issued_;
}

void FetchPlanner::end(bool complete) {
  places_.reset();
  if (!complete || trace_.empty()) return;
  const bool as_planned = plans_[kind_] && plans_[kind_]->trace == trace_;
  if (!as_planned) plans_[kind_] = plan(trace_, inputs_);
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
  std::vector<std::uint32_t> counts(inputs_.items.size(), 0);
  for (const Fetch& fetch : plans_[kind]->fetches) ++counts[fetch.item];
  return counts;
}

}  // namespace hoist::scheduler
