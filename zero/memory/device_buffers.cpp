// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <hoist/core/units.hpp>
#include <hoist/tiers/device_arena.hpp>
#include <hoist/zero/memory/device_buffers.hpp>

namespace hoist::detail {

namespace {

std::uint64_t arena_bytes(std::uint64_t bytes) {
  TierLayout layout(MemoryTier::device);
  layout.add(bytes);
  return layout.bytes();
}

struct GatheredModel {
  std::uint64_t elements = 0, bytes = 0;
  double element_bytes() const { return static_cast<double>(bytes) / static_cast<double>(elements); }
};

GatheredModel whole_model(const std::vector<Unit>& units) {
  GatheredModel whole;
  for (const Unit& unit : units) {
    whole.elements += unit.elements;
    whole.bytes += unit.gathered_bytes;
  }
  return whole;
}

// The bytes that so many elements of the model take when they are gathered.
std::uint64_t bytes_of_elements(const std::vector<Unit>& units, std::uint64_t count) {
  const GatheredModel whole = whole_model(units);
  if (count >= whole.elements) return whole.bytes;
  return round_up(static_cast<std::uint64_t>(whole.element_bytes() * static_cast<double>(count)),
                  tiers::DeviceArena::kAlignment);
}

}  // namespace

std::uint64_t live_elements_for(const UnitTable& table, std::uint64_t bytes) {
  return static_cast<std::uint64_t>(std::ceil(static_cast<double>(bytes) / whole_model(table.units()).element_bytes()));
}

std::vector<scheduler::ItemNeeds> gather_needs(const UnitRegions& regions) {
  const std::vector<Unit>& units = regions.table().units();
  std::vector<scheduler::ItemNeeds> needs(units.size());
  const auto shares = [&](UnitId id) { return !regions.unit(id).stays_gathered; };
  for (std::uint32_t u = 0; u < units.size(); ++u) {
    if (!shares(UnitId{u})) continue;
    needs[u].bytes = arena_bytes(units[u].gathered_bytes);
    needs[u].stable_in_pass = units[u].options.stable_in_pass;
    for (const auto& companions : {units[u].tied, units[u].options.gathered_with})
      for (const UnitId other : companions)
        if (other.index != u && shares(other)) needs[u].gathered_with.push_back(other.index);
  }
  return needs;
}

DeviceBufferChooser::DeviceBufferChooser(const EngineOptions& options, const UnitRegions& regions) : regions_(regions) {
  for (const Unit& unit : regions.table().units())
    if (!unit.has_own_gradient_memory)
      gradient_bytes_ = std::max(gradient_bytes_, arena_bytes(unit.gradient_buffer_bytes()));
  const std::vector<scheduler::ItemNeeds> needs = gather_needs(regions);
  gather_least_bytes_ = scheduler::least_gather_bytes(needs);
  for (const scheduler::ItemNeeds& unit : needs) largest_unit_bytes_ = std::max(largest_unit_bytes_, unit.bytes);
  const std::uint64_t live_bytes = bytes_of_elements(regions.table().units(), options.live_elements_max);
  gather_most_bytes_ =
      std::min(scheduler::most_gather_bytes(needs), std::max(gather_least_bytes_ + largest_unit_bytes_, live_bytes));
}

DeviceBuffers DeviceBufferChooser::least() const {
  return {.gradient_count = gradient_bytes_ != 0 ? 1u : 0u, .gather_bytes = gather_least_bytes_};
}

std::uint64_t DeviceBufferChooser::bytes(const DeviceBuffers& buffers) const {
  TierLayout layout = regions_.layout(MemoryTier::device);
  for_each(buffers, [&](MemoryRole, std::uint64_t bytes) { layout.add(bytes); });
  return layout.bytes();
}

// A second gradient buffer lets one layer's gradient travel down while the next layer's is made; more gather memory
// lets weights come up earlier and stay longer.
DeviceBuffers DeviceBufferChooser::choose(std::uint64_t free_bytes) const {
  const std::uint64_t least_bytes = bytes(least());
  std::uint64_t left = std::max(free_bytes, least_bytes) - regions_.layout(MemoryTier::device).bytes();
  DeviceBuffers buffers;
  if (gradient_bytes_ != 0) {
    const std::uint64_t two_units = std::min(gather_least_bytes_ + largest_unit_bytes_, gather_most_bytes_);
    buffers.gradient_count = left >= two_units + 2 * gradient_bytes_ ? 2 : 1;
    left -= buffers.gradient_count * gradient_bytes_;
  }
  buffers.gather_bytes = std::min(round_down(left, tiers::DeviceArena::kAlignment), gather_most_bytes_);
  return buffers;
}

std::uint64_t least_device_bytes(const EngineOptions& options, const UnitTable& table, DeviceAccess access) {
  const UnitRegions regions(options, table, access);
  const DeviceBufferChooser chooser(options, regions);
  return chooser.bytes(chooser.least());
}

std::optional<double> fitting_offload_ratio(EngineOptions options, const UnitTable& table, DeviceAccess access,
                                            std::uint64_t available_bytes) {
  if (options.optimizer == Placement::device) return std::nullopt;
  for (auto hundredths = static_cast<unsigned>(100 * options.optimizer_offload_ratio) + 1; hundredths <= 100;
       ++hundredths) {
    options.optimizer_offload_ratio = hundredths / 100.0;
    if (least_device_bytes(options, table, access) <= available_bytes) return options.optimizer_offload_ratio;
  }
  return std::nullopt;
}

}  // namespace hoist::detail
