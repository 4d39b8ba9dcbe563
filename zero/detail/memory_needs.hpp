// SPDX-License-Identifier: Apache-2.0
// zero/detail/memory_needs.hpp - how many bytes of each kind an engine needs, and how a budget is divided. Arithmetic
// only: Memory takes what is decided here, and a prediction prints it.
//
// Which units have which home follows from the placements; see zero/detail/memory.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <hoist/scheduler/director.hpp>
#include <hoist/tiers/pinned_pool.hpp>
#include <hoist/zero/detail/unit_table.hpp>
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

// A run of tiles of one trainable record: read, updated and written as one.
struct Piece {
  UnitId unit{};
  std::uint32_t first_tile = 0;
  std::uint32_t tile_count = 0;
};

// Pinned memory.
class PinnedNeeds {
 public:
  PinnedNeeds(const EngineOptions& options, const UnitTable& table, bool homes_apart = false);

  bool weights_at_home() const { return options_.parameters != Placement::nvme; }
  // Whether a unit's state, and its gradients, are in device memory instead.
  bool state_on_device(UnitId unit) const { return states_.holds(unit); }
  // Whether it is so in memory that the CPU cannot read.
  bool apart(UnitId unit) const { return homes_apart_ && states_.holds(unit); }
  // How many of a unit's tiles, the first ones, have their state in memory rather than on NVMe, and its pinned bytes.
  std::uint32_t state_tiles_at_home(UnitId unit) const { return state_tiles_at_home_[unit.index]; }
  std::uint64_t state_bytes_at_home(UnitId unit) const;
  std::uint64_t secondary_bytes(const Unit& unit) const;
  bool state_at_home(const Piece& piece) const {
    return piece.first_tile + piece.tile_count <= state_tiles_at_home(piece.unit);
  }
  bool keeps_host_weights(UnitId unit) const;  // a copy of the weights that the CPU can read

  struct Buffers {
    std::uint64_t piece_tiles = 1;
    unsigned update_count = 0;
    unsigned staging_count = 0;
    std::uint64_t gradient_ring_bytes = 0;  // 0 where gradients have homes
  };
  // What is asked for, as far as it fits: the least that makes progress, whether or not that fits, and then more of
  // each kind until none has room for more (of a piece: for twice as much). What is left goes to the ring, up to all
  // gradients.
  Buffers choose(std::uint64_t available_bytes) const;
  Buffers wanted() const;  // what is asked for; of the ring, kRingGradients
  std::uint64_t bytes(const Buffers& buffers) const;

  // No piece has state in both places. Those of a unit take turns by place, so that the drive works under the others.
  std::vector<Piece> cut(std::uint64_t piece_tiles) const;
  // Where a piece's regions lie in an update buffer: weights, then state; what is at home in memory is not there.
  struct PieceBytes {
    std::uint64_t weights = 0;
    std::uint64_t state = 0;
    std::uint64_t total() const { return weights + state; }
  };
  PieceBytes buffered_bytes(const Piece& piece) const;
  std::uint64_t update_buffer_bytes(std::uint64_t piece_tiles) const;  // the largest piece
  std::uint64_t staging_buffer_bytes() const;                          // the largest unit's weights
  // Gradients of one unit on their way to fp32 sums: kSumBuffers of them, where steps have several micro-batches.
  static constexpr unsigned kSumBuffers = 2;
  std::uint64_t sum_buffer_bytes() const;
  std::uint64_t findings_bytes() const;  // where they come down to; 0 unless homes are apart
  const DeviceStates& device_states() const { return states_; }
  // The largest gradients that a ring is wanted to hold at least; with more of them the drive may lag further behind.
  static constexpr unsigned kRingGradients = 2;
  // Whether gradients live in a ring: in update mode `backward`, unless sums over passes need homes.
  bool rings_gradients() const;

 private:
  bool streams() const;  // whether any update needs a buffer
  // Of a ring for so many of the largest gradients, or for all; 0 where there is none.
  std::uint64_t ring_bytes(unsigned gradients) const;
  void grow_ring(Buffers& chosen, std::uint64_t available_bytes) const;

  const EngineOptions& options_;
  const UnitTable& table_;
  const bool homes_apart_;
  const DeviceStates states_;
  std::vector<std::uint32_t> state_tiles_at_home_;  // by unit
};

// The largest share of the optimizer's states, in hundredths, that fits `available_bytes` of pinned memory beside the
// buffers that there are with the share asked for; of a gradient ring, beside room for two gradients.
double largest_pinned_fraction(EngineOptions options, const UnitTable& table, bool homes_apart,
                               std::uint64_t available_bytes);

// Where the options have the gradients of several micro-batches added up.
GradientSums gradient_sums(const EngineOptions& options);
unsigned passes_of_a_step(const EngineOptions& options);

// The mode that steps are carried out in: `automatic` is none.
UpdateMode update_mode(const EngineOptions& options);
std::string describe_update_mode(const EngineOptions& options);  // and why, where it was not asked for

// What the director plans with.
scheduler::DirectorOptions director_options(const EngineOptions& options, const UnitTable& table,
                                            const DeviceNeeds& needs, std::uint64_t gather_slots);

// What one step of training moves, by formula, when each unit is fetched fetches[unit] times: bytes per parameter of
// each link, summed over the parameters whose state crosses it. Of several steps to a commit, their mean.
StepPhases step_phases(const EngineOptions& options, const UnitTable& table, std::span<const std::uint32_t> fetches,
                       bool homes_apart = false);

// Whether a step writes to the store what lives in memory, beside what lives there: it does when it is committed.
bool writes_homes(const EngineOptions& options, bool committed);

}  // namespace hoist::detail
