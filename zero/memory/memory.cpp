// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <limits>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/memory/drives.hpp>
#include <hoist/zero/memory/memory.hpp>

namespace hoist::detail {

namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// The store's part of a need.
std::string store_text(std::uint64_t bytes) {
  if (bytes == 0) return "";
  return fmt::format(", and {} of the store's checksum tables and the program's state (hoist.caller_state_max)",
                     format_bytes(bytes));
}

constexpr const char* kDeviceLimit = "zero_optimization.stage3_max_live_parameters";
constexpr const char* kPinnedLimits = "hoist.parameters_pinned_fraction and hoist.optimizer_pinned_fraction";

// An earlier engine may take more of a larger budget, too: the need is the least only if the keys in `limits` or a
// runtime of its own keep it from that.
std::string held_text(const tiers::Budget& budget, const std::string& limits) {
  if (budget.held_bytes() == 0) return "";
  return fmt::format(
      ", beside {} that engines and buffers made earlier hold (engines take what they find: limit those by {}, or give "
      "each engine its own Runtime)",
      format_bytes(budget.held_bytes()), limits);
}

}  // namespace

BudgetError over_budget(const tiers::Budget& budget, std::uint64_t need_bytes, const std::string& purpose) {
  return BudgetError({.tier = budget.tier(),
                      .have_bytes = budget.limit_bytes(),
                      .need_bytes = need_bytes,
                      .key = budget.key(),
                      .detail = purpose});
}

MachineFacts machine_facts(Runtime& runtime, std::uint64_t store_memory_bytes) {
  return {.device_access = device_access(runtime.options()),
          .free_device_bytes = runtime.device_arena().largest_hole_bytes(),
          .free_pinned_bytes = left_of(runtime.pinned_budget().free_bytes(), store_memory_bytes),
          .free_host_bytes = runtime.pinned_budget().common() == nullptr
                                 ? kUnlimited
                                 : left_of(runtime.pinned_budget().common()->free_bytes(), store_memory_bytes)};
}

void require_device_memory(Runtime& runtime, const EngineOptions& options, const UnitTable& table,
                           std::uint64_t program_bytes) {
  const tiers::Budget& budget = runtime.device_budget();
  const DeviceAccess access = device_access(runtime.options());
  const std::uint64_t program = round_up(program_bytes, tiers::DeviceArena::kAlignment);
  const std::uint64_t least = program + least_device_bytes(options, table, access);
  const tiers::DeviceArena& arena = runtime.device_arena();
  const std::uint64_t hole = arena.largest_hole_bytes(), available = std::min(hole, budget.free_bytes());
  if (least <= available) return;
  const auto ratio = fitting_offload_ratio(options, table, access, left_of(available, program));
  const std::string purpose = fmt::format(
      "the program's own blocks (activations), resident states{}, what one gather() needs and one unit's gradient",
      ratio ? fmt::format(" (that fit with zero_optimization.offload_optimizer.ratio {:.2f})", *ratio) : "");
  if (least <= hole) {  // others have taken the budget, or the one that it shares with pinned memory
    const tiers::Budget& shared = budget.common() == nullptr ? budget : *budget.common();
    throw over_budget(shared, shared.limit_bytes() - shared.free_bytes() + least,
                      purpose + held_text(shared, fmt::format("{}, {}", kDeviceLimit, kPinnedLimits)));
  }
  const std::uint64_t need = arena.least_bytes_for(least);
  const bool is_part = arena.bytes() < round_down(budget.limit_bytes(), kBlockAlignment);  // of the budget
  std::string key = budget.key();
  if (is_part && need > budget.limit_bytes())
    key += ", and RuntimeOptions::device_arena_bytes if the program sets it,";
  else if (is_part)
    key = "RuntimeOptions::device_arena_bytes, if the program sets it, or else " + key;
  throw BudgetError({.tier = budget.tier(),
                     .have_bytes = is_part ? arena.bytes() : budget.limit_bytes(),
                     .need_bytes = need,
                     .key = key,
                     .detail = purpose + held_text(budget, kDeviceLimit)});
}

Memory::Memory(Runtime& runtime, const EngineOptions& options, const UnitTable& table, std::uint64_t store_memory_bytes)
    : runtime_(runtime),
      table_(table),
      plan_(options, table, machine_facts(runtime, store_memory_bytes)),
      units_(table.units().size()) {
  require_host_memory(store_memory_bytes);
  require_device_memory(runtime, options, table, 0);
  require_pinned_memory(options, store_memory_bytes);
  device_block_ = runtime.device_arena().allocate(plan_.bytes(MemoryTier::device), "the engine's units and buffers");
  store_hold_ = runtime.pinned_budget().take(store_memory_bytes, "the store's checksum tables and manifest");
  pool_ = std::make_unique<tiers::PinnedPool>(
      runtime.pinned_budget(),
      platform::HostMemoryOptions{.bytes = plan_.bytes(MemoryTier::pinned),
                                  .huge_pages = runtime.options().huge_pages,
                                  .numa_nodes = runtime.options().memory_nodes,
                                  .touch_cpus = runtime.options().update_cpus,
                                  .parts = staging_part(staging_nodes(runtime.options(), options))});
  point_to_regions();
  sub_groups_ = plan_.units().sub_groups(plan_.pinned_buffers().sub_group_tiles);
  if (pinned().empty()) return;
  // One call of the driver, which cannot tell how far it is.
  if (runtime.device().kind() == platform::DeviceKind::cuda && pinned().size() >= 8 * kGiB)
    log_info("registering {} of pinned memory with the GPU", format_bytes(pinned().size()));
  runtime.device().register_host(pinned());  // in one: a copy may not cross two registrations
  registered_ = pinned();
}

Memory::~Memory() { runtime_.device().unregister_host(registered_); }

// Staging buffers follow each other.
std::vector<platform::HostMemoryPart> Memory::staging_part(const std::vector<int>& nodes) const {
  const auto is_staging = [](const MemoryRegion& region) { return region.role == MemoryRole::staging_buffer; };
  const auto first = std::ranges::find_if(plan_.regions(), is_staging);
  if (first == plan_.regions().end() || nodes.empty()) return {};
  const auto end = std::find_if_not(first, plan_.regions().end(), is_staging);
  HOIST_ASSERT(std::none_of(end, plan_.regions().end(), is_staging), "another region is among {} staging buffers",
               end - first);
  const MemoryRegion& last = *std::prev(end);
  return {{.offset = first->offset, .bytes = last.offset + last.bytes - first->offset, .numa_nodes = nodes}};
}

void Memory::require_host_memory(std::uint64_t store_memory_bytes) const {
  const tiers::Budget* const common = runtime_.pinned_budget().common();
  if (common == nullptr) return;
  const std::uint64_t device_bytes = plan_.bytes(MemoryTier::device);
  const std::uint64_t pinned_bytes = plan_.bytes(MemoryTier::pinned);
  if (device_bytes + pinned_bytes <= left_of(common->free_bytes(), store_memory_bytes)) return;
  throw over_budget(
      *common, round_up(common->held_bytes() + store_memory_bytes + pinned_bytes + device_bytes, kBlockAlignment),
      fmt::format(
          "{} of device memory, and {} of gradients, states kept in memory and the smallest transfer buffers{}{}",
          format_bytes(device_bytes), format_bytes(pinned_bytes), store_text(store_memory_bytes),
          held_text(*common, fmt::format("{}, {}", kDeviceLimit, kPinnedLimits))));
}

void Memory::require_pinned_memory(const EngineOptions& options, std::uint64_t store_memory_bytes) const {
  const tiers::Budget& budget = runtime_.pinned_budget();
  const std::uint64_t need = plan_.bytes(MemoryTier::pinned);
  if (need <= left_of(budget.free_bytes(), store_memory_bytes)) return;
  std::string purpose = "gradients";
  if (may_spill_gradients(options)) purpose += " (hoist.gradient_spill takes them to NVMe)";
  purpose += ", states kept in memory";
  if (gathering_group(options, table_.world_size()) > 1)
    purpose += ", secondary shards (a larger or no zero_hpz_partition_size needs less)";
  throw over_budget(budget, round_up(budget.held_bytes() + store_memory_bytes + need, kBlockAlignment),
                    purpose + " and the smallest transfer buffers" + store_text(store_memory_bytes) +
                        held_text(budget, kPinnedLimits));
}

void Memory::point_to_regions() {
  std::vector<std::array<std::byte*, kUnitRoleCount>> regions(units_.size());  // of each unit, by role
  for (const MemoryRegion& region : plan_.regions()) {
    if (region.tier == MemoryTier::nvme) continue;
    const std::span<std::byte> tier = region.tier == MemoryTier::device ? device_block_.bytes() : pinned();
    const std::span<std::byte> bytes = tier.subspan(region.offset, region.bytes);
    const auto role = static_cast<std::size_t>(region.role);
    if (region.unit) {
      regions[region.unit->index][role] = bytes.data();
    } else {
      buffers_[role].push_back(bytes);
    }
  }
  for (std::uint32_t u = 0; u < units_.size(); ++u) {
    const auto at = [&](MemoryRole role) { return regions[u][static_cast<std::size_t>(role)]; };
    const std::optional<MemoryRole> weights = placement(UnitId{u}).weights;
    units_[u] = {.weights = weights ? at(*weights) : nullptr,
                 .state = at(MemoryRole::state),
                 .gradient = at(MemoryRole::gradient),
                 .gradient_checksums = reinterpret_cast<std::uint64_t*>(at(MemoryRole::gradient_checksums)),
                 .secondary_shard = at(MemoryRole::secondary_shard),
                 .device_shard = at(MemoryRole::device_shard),
                 .gathered = at(MemoryRole::gathered),
                 .own_gradient = at(MemoryRole::own_gradient)};
  }
}

Memory::SubGroupMemory Memory::place(const SubGroup& sub_group, std::byte* buffer) const {
  const UnitMemory& here = unit(sub_group.unit);
  const tiers::Tile& first = table_.unit(sub_group.unit).trainable.tiles()[sub_group.first_tile];
  const auto buffered = plan_.units().buffered_bytes(sub_group);
  const bool in_buffer = device_only(sub_group.unit);
  const bool weights_in_place = plan_.units().are_weights_resident(sub_group) && !in_buffer;
  const bool state_in_place = plan_.units().is_state_resident(sub_group) && !in_buffer;
  return {.weights = weights_in_place ? here.weights + first.w_offset : buffer,
          .state = state_in_place ? here.state + first.s_offset : buffer + buffered.weights,
          .gradient = buffered.gradient > 0 ? buffer + buffered.record() : nullptr};
}

std::string Memory::describe() const {
  return fmt::format(
      "device: {} for gathered units, {} gradient buffers of {}; pinned: {} update buffers of {} ({} parameters each), "
      "{} staging buffers of {}",
      format_bytes(gather_memory().size()), gradient_buffers().size(),
      format_bytes(plan_.buffer_bytes(MemoryRole::gradient_buffer)), update_buffers().size(),
      format_bytes(plan_.buffer_bytes(MemoryRole::update_buffer)),
      plan_.pinned_buffers().sub_group_tiles * tiers::kTileElements, staging_buffers().size(),
      format_bytes(plan_.buffer_bytes(MemoryRole::staging_buffer)));
}

}  // namespace hoist::detail
