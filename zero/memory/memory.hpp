// SPDX-License-Identifier: Apache-2.0
// zero/memory/memory.hpp - every byte an engine will use, taken once: a MemoryPlan with pointers to its regions.
//
// Threading  Constant after construction.
// Errors     BudgetError naming the key and the smallest value that works, before anything is taken.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <hoist/core/error.hpp>
#include <hoist/tiers/device_arena.hpp>
#include <hoist/tiers/pinned_pool.hpp>
#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/memory/memory_plan.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist::detail {

// A unit's regions, as MemoryRole describes them. Null: there is none in memory.
struct UnitMemory {
  std::byte* weights = nullptr;  // those in memory, wherever (UnitPlacement::weights)
  std::byte* state = nullptr;
  std::byte* gradient = nullptr;
  std::uint64_t* gradient_checksums = nullptr;
  std::byte* secondary_shard = nullptr;
  std::byte* device_shard = nullptr;
  std::byte* gathered = nullptr;
  std::byte* own_gradient = nullptr;
};

// A budget that does not suffice: with `need_bytes` it would. `purpose`: what they are for.
BudgetError over_budget(const tiers::Budget& budget, std::uint64_t need_bytes, const std::string& purpose);

// The bytes that are free now, without those of the store's tables.
MachineFacts machine_facts(Runtime& runtime, std::uint64_t store_memory_bytes);

// Throws BudgetError unless the device has room for what the engine needs at least and `program_bytes` more.
void require_device_memory(Runtime& runtime, const EngineOptions& options, const UnitTable& table,
                           std::uint64_t program_bytes);

class Memory {
 public:
  using Buffers = std::vector<std::span<std::byte>>;

  Memory(Runtime& runtime, const EngineOptions& options, const UnitTable& table, std::uint64_t store_memory_bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const MemoryPlan& plan() const { return plan_; }
  const UnitPlacement& placement(UnitId unit) const { return plan_.units().unit(unit); }
  const UnitMemory& unit(UnitId unit) const { return units_[unit.index]; }
  bool state_on_device(UnitId unit) const { return placement(unit).state_on_device; }  // and the gradient
  bool device_only(UnitId unit) const { return placement(unit).device_only; }
  bool has_device_only() const { return plan_.units().has_device_only(); }  // some units, or all

  std::span<std::byte> gather_memory() const { return buffer(MemoryRole::gather_memory); }
  const Buffers& gradient_buffers() const { return buffers(MemoryRole::gradient_buffer); }
  const Buffers& update_buffers() const { return buffers(MemoryRole::update_buffer); }
  const Buffers& staging_buffers() const { return buffers(MemoryRole::staging_buffer); }
  const Buffers& sum_buffers() const { return buffers(MemoryRole::sum_buffer); }
  std::span<std::byte> first_staging_buffer() const { return buffer(MemoryRole::staging_buffer); }  // if there is one
  std::span<std::byte> gradient_ring() const { return buffer(MemoryRole::gradient_ring); }
  std::span<std::byte> device_results() const { return buffer(MemoryRole::device_results); }
  std::span<std::byte> results_copy() const { return buffer(MemoryRole::results_copy); }
  std::span<std::byte> copy_buffer() const { return buffer(MemoryRole::copy_buffer); }  // RecordIo's alone
  bool spills_gradients() const { return plan_.units().scratch_bytes() > 0; }           // of some units, or all

  // The records of all units, cut as the update buffers allow; a unit's sub-groups follow each other.
  const std::vector<SubGroup>& sub_groups() const { return sub_groups_; }
  // Where a sub-group's weights and state are worked on: in place, or in `buffer`, which begins with the weights. A
  // spilled gradient is at its end.
  struct SubGroupMemory {
    std::byte* weights = nullptr;
    std::byte* state = nullptr;
    std::byte* gradient = nullptr;  // null: it is not spilled
  };
  SubGroupMemory place(const SubGroup& sub_group, std::byte* buffer) const;

  std::span<std::byte> pinned() const { return pool_->memory().bytes(); }
  std::vector<std::span<std::byte>> io_slices() const { return plan_.pinned().slices(pinned()); }  // to be registered
  std::string describe() const;
  // Pinned memory is never given back to the system: a drive may still write to it.
  void quarantine() { pool_->quarantine(); }

 private:
  const Buffers& buffers(MemoryRole role) const { return buffers_[static_cast<std::size_t>(role)]; }
  std::span<std::byte> buffer(MemoryRole role) const {  // the first one, or none
    return buffers(role).empty() ? std::span<std::byte>() : buffers(role).front();
  }
  std::vector<platform::HostMemoryPart> staging_part(const std::vector<int>& nodes) const;
  void require_host_memory(std::uint64_t store_memory_bytes) const;  // where one budget is for both tiers
  void require_pinned_memory(const EngineOptions& options, std::uint64_t store_memory_bytes) const;
  void point_to_regions();

  Runtime& runtime_;
  const UnitTable& table_;
  const MemoryPlan plan_;
  tiers::Budget::Hold store_hold_;
  tiers::DeviceBlock device_block_;
  std::unique_ptr<tiers::PinnedPool> pool_;
  std::span<std::byte> registered_;  // with the device
  std::vector<UnitMemory> units_;
  std::array<Buffers, kMemoryRoleCount> buffers_;
  std::vector<SubGroup> sub_groups_;
};

}  // namespace hoist::detail
