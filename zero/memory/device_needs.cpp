// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/core/norm_order.hpp>
#include <hoist/tiers/device_arena.hpp>
#include <hoist/zero/memory/device_needs.hpp>

namespace hoist::detail {

using tiers::Region;

namespace {

std::uint64_t arena_bytes(std::uint64_t bytes) { return round_up(bytes, tiers::DeviceArena::kAlignment); }

bool has_own_memory(const EngineOptions& options, const UnitTable& table, const Unit& unit) {
  if (unit.options.binding) return false;
  // Below stage 3 weights are not partitioned: gathered once after each step, they stay.
  const bool whole = options.stage < 3 || table.world_size() == 1;
  const bool resident = options.parameters == Placement::device && whole;
  return resident || unit.options.stable_address || unit.elements <= options.persistence_elements;
}

}  // namespace

DeviceStates::DeviceStates(const EngineOptions& options, const UnitTable& table) : held_(table.units().size()) {
  std::vector<std::uint64_t> elements;  // by unit, of this rank; equal parts of all
  for (const Unit& unit : table.units()) {
    elements.push_back(0);
    for (const Segment& segment : unit.segments) elements.back() += segment.trainable ? segment.shard_elements : 0;
    all_elements_ += elements.back();
  }
  const double offloaded = options.optimizer == Placement::device ? 0 : options.optimizer_offload_ratio;
  if (offloaded == 1) return;
  const std::uint64_t most = all_elements_ - static_cast<std::uint64_t>(offloaded * static_cast<double>(all_elements_));
  for (std::size_t u = 0; u < held_.size(); ++u) {
    held_[u] = elements_ + elements[u] <= most;
    if (!held_[u]) continue;
    elements_ += elements[u];
    bytes_ += table.units()[u].trainable.region_bytes(Region::state);
  }
}

double DeviceStates::share() const {
  return all_elements_ == 0 ? 0 : static_cast<double>(elements_) / static_cast<double>(all_elements_);
}

bool homes_are_apart(const RuntimeOptions& runtime, const EngineOptions& options) {
  const bool readable = runtime.device == platform::DeviceKind::host && runtime.host_device.host_accessible;
  return (options.optimizer == Placement::device || options.optimizer_offload_ratio < 1) && !readable;
}

Findings::Findings(const UnitTable& table, const DeviceStates& states) {
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    for (const Segment& segment : table.units()[u].segments)
      if (segment.trainable && states.holds(UnitId{u})) sums += divide_up(segment.shard_elements, kNormChunkElements);
  }
}

// --- secondary shards ------------------------------------------------------------------------------------------------

int gathering_group(const EngineOptions& options, int world_size) {
  const int ranks = options.secondary_shard_ranks;
  return options.stage == 3 && ranks > 1 && ranks < world_size ? ranks : 1;
}

SecondaryShard secondary_shard(const EngineOptions& options, const UnitTable& table, const Unit& unit) {
  const int ranks = gathering_group(options, table.world_size());
  if (ranks == 1 || has_own_memory(options, table, unit)) return {};
  SecondaryShard shard{.shards = static_cast<std::uint64_t>(table.world_size() / ranks)};
  for (const Segment& segment : unit.segments) shard.bytes += shard.shards * segment.shard_bytes();
  return shard;
}

// --- device memory ---------------------------------------------------------------------------------------------------

DeviceNeeds::DeviceNeeds(const EngineOptions& options, const UnitTable& table, bool homes_apart)
    : options_(options), table_(table), homes_apart_(homes_apart), states_(options, table) {
  if (homes_apart) homes_bytes += arena_bytes(Findings(table, states_).bytes());
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const Unit& unit = table.units()[u];
    homes_bytes += homes_of(UnitId{u});
    if (!unit.owns_tied) gradient_bytes = std::max(gradient_bytes, arena_bytes(unit.gradient_buffer_bytes()));
    std::uint64_t slots = is_slotted(unit) ? 1 : 0;
    slot_count += slots;
    if (slots == 1) slot_bytes = std::max(slot_bytes, arena_bytes(unit.gathered_bytes));
    for (const UnitId owner : unit.tied) slots += is_slotted(table.unit(owner)) ? 1u : 0u;
    slots_min = std::max(slots_min, slots);
  }
}

bool DeviceNeeds::has_own_memory(const Unit& unit) const { return detail::has_own_memory(options_, table_, unit); }

bool DeviceNeeds::needs_device_shard(const Unit& unit) const {
  return options_.parameters == Placement::device && !(table_.world_size() == 1 && has_own_memory(unit));
}

std::uint64_t DeviceNeeds::homes_of(UnitId id) const {
  const Unit& unit = table_.unit(id);
  std::uint64_t bytes = 0;
  if (has_own_memory(unit)) bytes += arena_bytes(unit.gathered_bytes);
  if (unit.owns_tied) bytes += arena_bytes(unit.gradient_buffer_bytes());
  if (needs_device_shard(unit)) bytes += arena_bytes(unit.host_bytes());
  if (options_.parameters == Placement::device) bytes += arena_bytes(secondary_shard(options_, table_, unit).bytes);
  if (!states_.holds(id)) return bytes;
  return bytes + arena_bytes(unit.trainable.region_bytes(Region::state)) + arena_bytes(unit.home_gradient_bytes);
}

std::optional<double> DeviceNeeds::offload_ratio_within(std::uint64_t available_bytes) const {
  if (options_.optimizer == Placement::device) return std::nullopt;
  EngineOptions options = options_;
  for (auto hundredths = static_cast<unsigned>(100 * options_.optimizer_offload_ratio) + 1; hundredths <= 100;
       ++hundredths) {
    options.optimizer_offload_ratio = hundredths / 100.0;
    if (DeviceNeeds(options, table_, homes_apart_).least_bytes() <= available_bytes)
      return options.optimizer_offload_ratio;
  }
  return std::nullopt;
}

// A second gradient buffer lets one layer's gradient travel down while the next layer's is made; more gather slots let
// weights come up earlier and stay longer.
DeviceNeeds::Buffers DeviceNeeds::choose(std::uint64_t free_bytes) const {
  Buffers buffers;
  std::uint64_t left = free_bytes - homes_bytes;
  if (gradient_bytes != 0) {
    buffers.gradients = left >= (slots_min + 1) * slot_bytes + 2 * gradient_bytes ? 2 : 1;
    left -= buffers.gradients * gradient_bytes;
  }
  if (slot_bytes != 0) buffers.gather_slots = std::min(left / slot_bytes, slot_count);
  return buffers;
}

scheduler::FetchPlannerOptions fetch_planner_options(const EngineOptions& options, const UnitTable& table,
                                                     const DeviceNeeds& needs, std::uint64_t gather_slots) {
  scheduler::FetchPlannerOptions result{.slot_count = static_cast<std::uint32_t>(gather_slots),
                                        .prefetch_elements = options.prefetch_elements,
                                        .live_elements_max = options.live_elements_max,
                                        .reuse_distance_elements = options.reuse_distance_elements};
  for (const Unit& unit : table.units())
    result.items.push_back({.elements = unit.elements,
                            .slotted = needs.is_slotted(unit),
                            .bound = static_cast<bool>(unit.options.binding)});
  return result;
}

}  // namespace hoist::detail
