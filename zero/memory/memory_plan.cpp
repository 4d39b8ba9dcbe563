// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/core/units.hpp>
#include <hoist/zero/memory/memory_plan.hpp>

namespace hoist::detail {

MemoryPlan::MemoryPlan(const EngineOptions& options, const UnitTable& table, const MachineFacts& facts)
    : units_(options, table, facts.device_access) {
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    for (const MemoryRegion& region : units_.unit(UnitId{u}).regions)
      if (region.bytes > 0) regions_.push_back(region);
  }
  if (units_.device_results().bytes > 0) regions_.push_back(units_.device_results());

  const auto add_buffers = [&](MemoryTier tier, const auto& chooser, const auto& buffers) {
    TierLayout layout = units_.layout(tier);
    chooser.for_each(buffers, [&](MemoryRole role, std::uint64_t bytes) {
      regions_.push_back({.role = role, .tier = tier, .offset = layout.add(bytes), .bytes = bytes});
    });
    bytes_[static_cast<std::size_t>(tier)] = layout.bytes();
    if (tier == MemoryTier::pinned) pinned_ = layout.pinned();
  };
  const DeviceBufferChooser device(options, units_);
  const PinnedBufferChooser pinned(options, units_);
  const std::uint64_t pinned_least = pinned.bytes(pinned.choose(0));
  device_buffers_ = device.choose(std::min(facts.free_device_bytes, left_of(facts.free_host_bytes, pinned_least)));
  add_buffers(MemoryTier::device, device, device_buffers_);
  const std::uint64_t device_bytes = bytes(MemoryTier::device);
  pinned_buffers_ = pinned.choose(std::min(facts.free_pinned_bytes, left_of(facts.free_host_bytes, device_bytes)));
  add_buffers(MemoryTier::pinned, pinned, pinned_buffers_);
  bytes_[static_cast<std::size_t>(MemoryTier::nvme)] = units_.layout(MemoryTier::nvme).bytes();
}

std::uint64_t MemoryPlan::buffer_bytes(MemoryRole role) const {
  const auto first = std::ranges::find(regions_, role, &MemoryRegion::role);
  return first == regions_.end() ? 0 : first->bytes;
}

std::uint64_t free_for_pinned(const EngineOptions& options, const UnitTable& table, const MachineFacts& facts) {
  const MemoryPlan plan(options, table, facts);
  return std::min(facts.free_pinned_bytes, left_of(facts.free_host_bytes, plan.bytes(MemoryTier::device)));
}

scheduler::PlanInputs plan_inputs(const EngineOptions& options, const UnitRegions& units, std::uint64_t gather_bytes) {
  scheduler::PlanInputs result{.gather_bytes = gather_bytes,
                               .prefetch_elements = options.prefetch_elements,
                               .live_elements_max = options.live_elements_max,
                               .reuse_distance_elements = options.reuse_distance_elements};
  std::vector<scheduler::ItemNeeds> needs = gather_needs(units);
  for (std::size_t u = 0; u < needs.size(); ++u)
    result.items.push_back({.elements = units.table().units()[u].elements, .needs = std::move(needs[u])});
  return result;
}

}  // namespace hoist::detail
