// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/zero/memory/device_buffers.hpp>

namespace hoist::detail {

DeviceBufferChooser::DeviceBufferChooser(const UnitRegions& regions) : regions_(regions) {
  const auto arena_bytes = [](std::uint64_t bytes) {
    TierLayout layout(MemoryTier::device);
    layout.add(bytes);
    return layout.bytes();
  };
  const UnitTable& table = regions.table();
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const Unit& unit = table.units()[u];
    if (!unit.owns_tied) gradient_bytes_ = std::max(gradient_bytes_, arena_bytes(unit.gradient_buffer_bytes()));
    std::uint64_t pinned_slots = 0;
    if (regions.unit(UnitId{u}).uses_slot) {
      ++slots_max_;
      ++pinned_slots;
      slot_bytes_ = std::max(slot_bytes_, arena_bytes(unit.gathered_bytes));
    }
    for (const UnitId owner : unit.tied) pinned_slots += regions.unit(owner).uses_slot ? 1u : 0u;
    slots_min_ = std::max(slots_min_, pinned_slots);
  }
}

DeviceBuffers DeviceBufferChooser::least() const {
  return {.gradient_count = gradient_bytes_ != 0 ? 1u : 0u, .slot_count = slots_min_};
}

std::uint64_t DeviceBufferChooser::bytes(const DeviceBuffers& buffers) const {
  TierLayout layout = regions_.layout(MemoryTier::device);
  for_each(buffers, [&](MemoryRole, std::uint64_t bytes) { layout.add(bytes); });
  return layout.bytes();
}

// A second gradient buffer lets one layer's gradient travel down while the next layer's is made; more gather slots let
// weights come up earlier and stay longer.
DeviceBuffers DeviceBufferChooser::choose(std::uint64_t free_bytes) const {
  const std::uint64_t least_bytes = bytes(least());
  std::uint64_t left = std::max(free_bytes, least_bytes) - regions_.layout(MemoryTier::device).bytes();
  DeviceBuffers buffers;
  if (gradient_bytes_ != 0) {
    buffers.gradient_count = left >= (slots_min_ + 1) * slot_bytes_ + 2 * gradient_bytes_ ? 2 : 1;
    left -= buffers.gradient_count * gradient_bytes_;
  }
  if (slot_bytes_ != 0) buffers.slot_count = std::min(left / slot_bytes_, slots_max_);
  return buffers;
}

std::uint64_t least_device_bytes(const EngineOptions& options, const UnitTable& table, DeviceAccess access) {
  const UnitRegions regions(options, table, access);
  const DeviceBufferChooser chooser(regions);
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
