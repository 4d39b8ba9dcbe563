// SPDX-License-Identifier: Apache-2.0
// zero/memory/device_needs.hpp - how many bytes of device memory an engine needs, and how a budget is divided.
// Arithmetic only: Memory takes what is decided here, and a prediction prints it.
//
// Which units have which home follows from the placements; see zero/memory/memory.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <hoist/scheduler/fetch_planner.hpp>
#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

// The units whose optimizer state lives in device memory: all, or, of an optimizer that is offloaded in part
// (EngineOptions::optimizer_offload_ratio), the first ones that fit into the share of parameters that is not.
// Whole units, since homes are a unit's; the first, since forward begins with them while the host updates the others,
// and backward ends with them. Weights of theirs that are on the device need no copy that the host can read.
class DeviceStates {
 public:
  DeviceStates(const EngineOptions& options, const UnitTable& table);
  bool holds(UnitId unit) const { return held_[unit.index]; }
  std::uint64_t bytes() const { return bytes_; }  // of state
  double share() const;                           // of the trainable parameters

 private:
  std::vector<bool> held_;  // by unit
  std::uint64_t bytes_ = 0;
  std::uint64_t elements_ = 0, all_elements_ = 0;
};

// Whether weights and optimizer state live in device memory that the CPU cannot read. Their steps are then carried out
// by the device; whatever else is done with that state passes through update buffers in pinned memory.
bool homes_are_apart(const RuntimeOptions& runtime, const EngineOptions& options);

// What a step on the device leaves for the host to look at: a sum of squares a chunk (core/norm_order.hpp), and behind
// them a word for the unit whose update may not be committed.
struct Findings {
  Findings(const UnitTable& table, const DeviceStates& states);
  std::uint64_t sums = 0;
  std::uint64_t bytes() const { return (sums + 1) * sizeof(double); }
};

// Ranks of a group that gathers units among itself (EngineOptions::secondary_shard_ranks); 1: there are none.
int gathering_group(const EngineOptions& options, int world_size);

// What a rank keeps of a gathered unit for its group: of each segment, one after the other, the shards of as many
// consecutive ranks as there are groups. Together the group has the unit in its gathered layout.
struct SecondaryShard {
  std::uint64_t bytes = 0;   // 0: the unit has none
  std::uint64_t shards = 0;  // of each segment
};
SecondaryShard secondary_shard(const EngineOptions& options, const UnitTable& table, const Unit& unit);

// Device memory.
class DeviceNeeds {
 public:
  DeviceNeeds(const EngineOptions& options, const UnitTable& table, bool homes_apart = false);

  bool has_own_memory(const Unit& unit) const;
  bool needs_device_shard(const Unit& unit) const;
  bool is_slotted(const Unit& unit) const { return !has_own_memory(unit) && !unit.options.binding; }

  std::uint64_t homes_bytes = 0;     // states, resident weights, tied gradients and findings
  std::uint64_t slot_bytes = 0;      // one gathered unit; 0 when no unit needs a slot
  std::uint64_t gradient_bytes = 0;  // one unit's gradient, and its sums in fp32 where those are on the device
  std::uint64_t slot_count = 0;      // units that compete for slots
  std::uint64_t slots_min = 0;       // that a single gather() pins at most: the unit's own and its tied owners'
  // The least that trains: program and engine together need this beside the program's own blocks.
  std::uint64_t least_bytes() const { return homes_bytes + slots_min * slot_bytes + gradient_bytes; }

  // The smallest optimizer_offload_ratio, in hundredths, with which least_bytes() are at most these; none where there
  // is no larger one than now that helps.
  std::optional<double> offload_ratio_within(std::uint64_t available_bytes) const;

  // How what is left beside the homes is divided.
  struct Buffers {
    std::uint64_t gradients = 0;
    std::uint64_t gather_slots = 0;
  };
  // Pre: what the homes leave of `free_bytes` is enough for slots_min slots and one gradient.
  Buffers choose(std::uint64_t free_bytes) const;
  std::uint64_t bytes(const Buffers& buffers) const {
    return homes_bytes + buffers.gradients * gradient_bytes + buffers.gather_slots * slot_bytes;
  }

 private:
  std::uint64_t homes_of(UnitId unit) const;
  const EngineOptions& options_;
  const UnitTable& table_;
  const bool homes_apart_;
  const DeviceStates states_;
};

// What the planner plans with.
scheduler::FetchPlannerOptions fetch_planner_options(const EngineOptions& options, const UnitTable& table,
                                                     const DeviceNeeds& needs, std::uint64_t gather_slots);

}  // namespace hoist::detail
