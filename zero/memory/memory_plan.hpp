// SPDX-License-Identifier: Apache-2.0
// zero/memory/memory_plan.hpp - every byte that an engine holds: what it is for, in which memory, at which offset. Pure
// data: Memory adds pointers to it, and predictions print it, so the two cannot differ.
//
// Threading  Constant after construction. Borrows the table.
// Cost       By units and buffers, as unit_regions.hpp.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include <hoist/scheduler/plan.hpp>
#include <hoist/zero/memory/device_buffers.hpp>
#include <hoist/zero/memory/pinned_buffers.hpp>
#include <hoist/zero/memory/unit_regions.hpp>

namespace hoist::detail {

// The facts that a plan depends on besides the options and the model.
struct MachineFacts {
  DeviceAccess device_access;
  std::uint64_t free_device_bytes;  // in one piece; 0: plan the least
  std::uint64_t free_pinned_bytes;  // beside the store's tables; 0: plan the least
  // Free bytes for device and pinned memory together, on a device that is made of host memory.
  std::uint64_t free_host_bytes = std::numeric_limits<std::uint64_t>::max();
};

class MemoryPlan {
 public:
  // Takes the least that makes progress if that does not fit either: compare bytes() with what is free.
  MemoryPlan(const EngineOptions& options, const UnitTable& table, const MachineFacts& facts);
  MemoryPlan(const MemoryPlan&) = delete;
  MemoryPlan& operator=(const MemoryPlan&) = delete;

  const UnitRegions& units() const { return units_; }
  const DeviceBuffers& device_buffers() const { return device_buffers_; }
  const PinnedBuffers& pinned_buffers() const { return pinned_buffers_; }
  // All regions, those on NVMe included. The tiers' bytes are theirs, with what alignment leaves between them.
  std::span<const MemoryRegion> regions() const { return regions_; }
  std::uint64_t bytes(MemoryTier tier) const { return bytes_[static_cast<std::size_t>(tier)]; }
  const tiers::PinnedPlan& pinned() const { return pinned_; }
  std::uint64_t buffer_bytes(MemoryRole role) const;  // of the first buffer of that role; 0: there is none

 private:
  UnitRegions units_;
  DeviceBuffers device_buffers_;
  PinnedBuffers pinned_buffers_;
  std::vector<MemoryRegion> regions_;
  std::array<std::uint64_t, kMemoryTierCount> bytes_{};
  tiers::PinnedPlan pinned_;
};

// The bytes that pinned memory can have, without the device's part if they are the same memory. Shares that are left
// open count as 0.
std::uint64_t free_for_pinned(const EngineOptions& options, const UnitTable& table, const MachineFacts& facts);

// What fetches are planned from, with so much gather memory.
scheduler::PlanInputs plan_inputs(const EngineOptions& options, const UnitRegions& units, std::uint64_t gather_bytes);

}  // namespace hoist::detail
