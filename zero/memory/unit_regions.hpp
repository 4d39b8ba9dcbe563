// SPDX-License-Identifier: Apache-2.0
// zero/memory/unit_regions.hpp - which memory holds each unit's weights, optimizer state and gradient. Pure data, made
// from the options and the model alone; zero/memory/memory_plan.hpp adds the buffers, which also depend on budgets.
//
//                 parameters = device              pinned             nvme
//   weights       pinned, or device (1)            pinned             NVMe; the first tiles may be pinned
//   state         by optimizer: device | pinned | NVMe; of state on NVMe the first tiles may be pinned
//   gradient      device if the state is there, else pinned; in update mode `backward` a ring for all (2). NVMe, and
//                 a ring on the way there, for the last EngineOptions::gradient_spill_units units
//
// (1) If the optimizer is on the device, too. Otherwise the CPU updates the pinned weights, and a copy on the device,
//     the device shard, is refreshed after each step.
// (2) Unless gradients are summed over several passes.
//
// If the optimizer is offloaded in part (EngineOptions::optimizer_offload_ratio), the first units that fit into the
// share that is not have their state on the device: whole units, since a unit is updated in one place; the first, since
// forward begins with them while the host updates the others, and backward ends with them.
//
// A unit is device-only if its state is in device memory that the CPU cannot read. The device carries out its steps;
// everything else that is done with its records goes through pinned buffers (TilePipeline, RecordIo).
//
// Threading  Constant after construction. Borrows the table.
// Cost       By units and runs of equal tiles, except sub_groups(): a model may have tens of millions of tiles.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <hoist/tiers/pinned_pool.hpp>
#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

enum class MemoryTier : std::uint8_t { device, pinned, nvme };
inline constexpr std::size_t kMemoryTierCount = 3;

// The purpose of a region of memory.
enum class MemoryRole : std::uint8_t {
  // One unit's regions, which it has between its uses:
  weights,             // host layout, or the first tiles of each of the unit's two records
  stored_weights,      // the other tiles, which are on NVMe only
  state,               // the first tiles of the trainable record's S region
  stored_state,        // the other tiles, which are on NVMe only
  gradient,            // this rank's shards
  spilled_gradient,    // the same on NVMe; the offset is within the scratch file
  gradient_checksums,  // of a spilled gradient, one for each tile
  secondary_shard,     // what this rank keeps of the gathered unit for its group (EngineOptions::secondary_shard_ranks)
  device_shard,        // host layout, on the device: gathers start from it without crossing a link
  gathered,            // gathered layout: the unit does not share the gather memory
  own_gradient,        // gradient layout: of units that are not finished before other units' gradients begin
  // The engine's regions:
  device_results,  // what the device leaves for the host: a sum of squares a chunk, then a word for a unit whose update
                   // may not be committed
  gather_memory,   // gathered units, in places that they share
  gradient_buffer,  // one unit's gradient
  gradient_ring,    // gradients that wait for their unit's update, or on their way to NVMe
  update_buffer,    // one sub-group's records
  staging_buffer,   // one unit's weights from NVMe
  sum_buffer,       // one unit's gradient on its way to fp32 sums
  results_copy,     // of the device's results
  copy_buffer,      // RecordIo's: between device-only memory and pageable memory
};
inline constexpr std::size_t kUnitRoleCount = 11;
inline constexpr std::size_t kMemoryRoleCount = 20;

struct MemoryRegion {
  MemoryRole role = MemoryRole::weights;
  MemoryTier tier = MemoryTier::nvme;
  std::optional<UnitId> unit{};  // of a role of one unit
  std::uint64_t offset = 0;      // within what the engine takes of the tier; 0 in the store, which decides itself
  std::uint64_t bytes = 0;       // 0: there is no such region
};

// Places regions of one tier one behind the other.
class TierLayout {
 public:
  explicit TierLayout(MemoryTier tier) : tier_(tier) {}
  std::uint64_t add(std::uint64_t bytes);  // returns the offset
  std::uint64_t bytes() const { return tier_ == MemoryTier::pinned ? pinned_.bytes() : bytes_; }
  const tiers::PinnedPlan& pinned() const { return pinned_; }

 private:
  MemoryTier tier_;
  tiers::PinnedPlan pinned_;
  std::uint64_t bytes_ = 0;
};

// Whether the CPU can dereference device memory.
enum class DeviceAccess : std::uint8_t { cpu_and_device, device_only };
DeviceAccess device_access(const RuntimeOptions& runtime);
// Whether the options ask for state in device memory that the CPU cannot read.
bool asks_for_device_only(const RuntimeOptions& runtime, const EngineOptions& options);

// How many ranks gather units among themselves (EngineOptions::secondary_shard_ranks); 1: there are no such groups.
int gathering_group(const EngineOptions& options, int world_size);

// A run of tiles of one trainable record: read, updated and written as one.
struct SubGroup {
  UnitId unit{};
  std::uint32_t first_tile = 0;
  std::uint32_t tile_count = 0;
};

// Where one unit's bytes live between uses.
struct UnitPlacement {
  std::array<MemoryRegion, kUnitRoleCount> regions{};  // by role
  std::optional<MemoryRole> weights{};  // which of them holds weights in memory; empty: only the store has them
  bool state_on_device = false;         // and the gradient
  bool device_only = false;
  bool gradient_spilled = false;
  bool gradient_in_ring = false;  // it passes through the ring, and has no region of its own
  bool stays_gathered = false;    // else it shares the gather memory
  // The first ones, which are in memory: state and weights of the trainable record, weights of the frozen one.
  std::uint32_t state_tiles = 0, weight_tiles = 0, frozen_tiles = 0;

  const MemoryRegion& region(MemoryRole role) const { return regions[static_cast<std::size_t>(role)]; }
  bool reads_weights() const { return region(MemoryRole::stored_weights).bytes > 0; }  // every fetch, from NVMe
};

// A part of a unit's host layout, and where it begins among the weights in the same place.
struct HostPiece {
  std::uint64_t host_offset = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  std::uint64_t host_end() const { return host_offset + bytes; }
};
// A unit's host layout: of either record first the tiles in memory, then those on NVMe only. The weights of a unit that
// are in one place lie there one behind the other.
struct HostPieces {
  HostPiece trainable, stored_trainable, frozen, stored_frozen;
};

class UnitRegions {
 public:
  UnitRegions(const EngineOptions& options, const UnitTable& table, DeviceAccess access);

  const UnitTable& table() const { return table_; }
  const UnitPlacement& unit(UnitId id) const { return units_[id.index]; }
  HostPieces host_pieces(UnitId id) const;
  bool has_device_only() const { return has_device_only_; }       // whether any unit is
  std::uint64_t scratch_bytes() const { return scratch_bytes_; }  // of all spilled gradients
  // How many consecutive ranks' shards of each segment a secondary shard holds. Together the group has the unit in its
  // gathered layout.
  std::uint64_t secondary_shard_parts() const { return secondary_shard_parts_; }
  std::uint64_t device_results_bytes() const;  // 0 if no unit is device-only
  const MemoryRegion& device_results() const { return device_results_; }
  std::uint64_t device_state_bytes() const;  // of all units
  double device_state_share() const;         // of the trainable parameters
  double pinned_weight_share() const;        // of weights on NVMe: what is in pinned memory nevertheless
  // Everything above. Buffers follow it in each tier.
  const TierLayout& layout(MemoryTier tier) const { return layouts_[static_cast<std::size_t>(tier)]; }

  // Cuts the records of all units. No sub-group has weights both in memory and on NVMe only, nor state. The kinds of a
  // unit's sub-groups take turns by place, so that the drive works under those in memory.
  std::vector<SubGroup> sub_groups(std::uint64_t tiles_max) const;
  bool is_state_resident(const SubGroup& sub_group) const {
    return sub_group.first_tile + sub_group.tile_count <= unit(sub_group.unit).state_tiles;
  }
  bool are_weights_resident(const SubGroup& sub_group) const {
    return sub_group.first_tile + sub_group.tile_count <= unit(sub_group.unit).weight_tiles;
  }
  // The parts of a sub-group that pass through an update buffer: weights, then state, then gradient. The CPU uses the
  // other parts in place.
  struct BufferedBytes {
    std::uint64_t weights = 0;
    std::uint64_t state = 0;
    std::uint64_t gradient = 0;
    std::uint64_t record() const { return weights + state; }
    std::uint64_t total() const { return record() + gradient; }
  };
  BufferedBytes buffered_bytes(const SubGroup& sub_group) const;
  bool uses_update_buffers() const;
  std::uint64_t update_buffer_bytes(std::uint64_t tiles_max) const;  // for the largest of such sub-groups

 private:
  void choose_units_on_device(const EngineOptions& options);
  void choose_spilled_gradients(const EngineOptions& options);
  void choose_resident_state(const EngineOptions& options);
  void choose_resident_weights(const EngineOptions& options);
  void place(UnitId id, const EngineOptions& options);
  void add(UnitId id, MemoryRole role, MemoryTier tier, std::uint64_t bytes);
  std::array<std::uint64_t, 4> boundaries(UnitId id) const;  // between which a unit's tiles are of one kind
  std::uint64_t largest_buffered_bytes(UnitId id, std::uint64_t begin, std::uint64_t end,
                                       std::uint64_t tiles_max) const;

  const UnitTable& table_;
  bool rings_gradients_;
  bool has_device_only_ = false;
  std::uint64_t secondary_shard_parts_;
  std::uint64_t elements_ = 0, device_elements_ = 0;  // trainable ones of this rank, and those with state on the device
  std::uint64_t scratch_bytes_ = 0;
  std::vector<UnitPlacement> units_;
  MemoryRegion device_results_{};
  std::array<TierLayout, kMemoryTierCount> layouts_{TierLayout(MemoryTier::device), TierLayout(MemoryTier::pinned),
                                                    TierLayout(MemoryTier::nvme)};
};

}  // namespace hoist::detail
