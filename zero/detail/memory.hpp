// SPDX-License-Identifier: Apache-2.0
// zero/detail/memory.hpp - every byte an engine will use, sized and taken once.
//
// Homes hold state between uses; buffers hold it on the way. Which units have which home follows from the placements:
//
//                 parameters = device     pinned             nvme
//   weights       pinned (or device, when the optimizer is there too)   pinned   none (store)
//   state         by optimizer: device | pinned | none (store)
//   gradient      device when the optimizer is there, else pinned
//
// Where weights stay on the device but are updated on the host, the host copy is their home and the device's copy is
// refreshed after each step.
//
// Threading  Constant after construction.
// Errors     BudgetError naming the key and the smallest value that works, before anything is taken.
#pragma once

#include <string>
#include <vector>

#include <hoist/tiers/device_arena.hpp>
#include <hoist/tiers/pinned_pool.hpp>
#include <hoist/zero/detail/unit_table.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist::detail {

struct UnitHome {
  std::byte* weights = nullptr;       // host layout, readable by the CPU; null when only the store has them
  std::byte* state = nullptr;         // S region of the trainable record; likewise
  std::byte* gradient = nullptr;      // this rank's shards
  std::byte* device_shard = nullptr;  // host layout, on the device: what gathers start from without crossing a link
  std::byte* own_memory = nullptr;    // gathered layout: the unit never competes for a slot
  std::byte* own_gradient = nullptr;  // gradient layout: held from the first use by a tied unit to the owner's finish
};

// A run of tiles of one trainable record: read, updated and written as one.
struct Piece {
  UnitId unit{};
  std::uint32_t first_tile = 0;
  std::uint32_t tile_count = 0;
};

// What the units need of the device, by their placements. Arithmetic only.
class DeviceNeeds {
 public:
  DeviceNeeds(const EngineOptions& options, const UnitTable& table);

  bool has_own_memory(const Unit& unit) const;
  bool needs_device_shard(const Unit& unit) const;
  bool is_slotted(const Unit& unit) const { return !has_own_memory(unit) && !unit.options.binding; }

  std::uint64_t homes_bytes = 0;     // states, resident weights and tied gradients
  std::uint64_t slot_bytes = 0;      // one gathered unit; 0 when no unit needs a slot
  std::uint64_t gradient_bytes = 0;  // one unit's gradient
  std::uint64_t slot_count = 0;      // units that compete for slots
  std::uint64_t slots_min = 0;       // that a single gather() pins at most: the unit's own and its tied owners'
  // The least that trains: program and engine together need this beside the program's own blocks.
  std::uint64_t least_bytes() const { return homes_bytes + slots_min * slot_bytes + gradient_bytes; }

 private:
  std::uint64_t homes_of(const Unit& unit) const;
  const EngineOptions& options_;
  const UnitTable& table_;
};

// Throws BudgetError unless the device has room for what the engine needs at least and `program_bytes` more.
void require_device_memory(Runtime& runtime, const DeviceNeeds& needs, std::uint64_t program_bytes);

class Memory {
 public:
  Memory(Runtime& runtime, const EngineOptions& options, const UnitTable& table, std::uint64_t store_memory_bytes);

  const UnitHome& home(UnitId unit) const { return homes_[unit.index]; }
  const std::vector<std::byte*>& gather_slots() const { return gather_slots_; }
  const std::vector<std::byte*>& gradient_slots() const { return gradient_slots_; }
  const std::vector<std::span<std::byte>>& update_buffers() const { return update_buffers_; }
  const std::vector<std::span<std::byte>>& staging_buffers() const { return staging_buffers_; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  std::vector<std::span<std::byte>> registered_slices() const { return pool_->memory().slices(); }
  bool gradients_on_device() const { return options_.optimizer == Placement::device; }
  std::string describe() const;

  // Where a piece's regions lie in an update buffer: weights (when not at home in memory), then state.
  struct PieceBytes {
    std::uint64_t weights = 0;
    std::uint64_t state = 0;
    std::uint64_t total() const { return weights + state; }
  };
  PieceBytes buffered_bytes(const Piece& piece) const;

 private:
  struct Buffers {
    std::uint64_t piece_tiles = 1;
    unsigned update_count = 0;
    unsigned staging_count = 0;
  };
  bool weights_at_home() const { return options_.parameters != Placement::nvme; }
  bool state_at_home() const { return options_.optimizer != Placement::nvme; }
  bool on_device(Placement placement) const { return placement == Placement::device; }
  std::vector<Piece> cut(std::uint64_t piece_tiles) const;
  std::uint64_t piece_bytes_max(std::uint64_t piece_tiles) const;
  void plan_homes(tiers::PinnedPlan& plan) const;
  void plan_buffers(tiers::PinnedPlan& plan, const Buffers& buffers) const;
  Buffers choose_buffers(std::uint64_t store_memory_bytes) const;
  std::uint64_t pinned_bytes(const Buffers& buffers) const;
  void take_pinned(const Buffers& buffers);
  void take_device();
  std::byte* take_device_block(std::uint64_t bytes, const std::string& what);

  Runtime& runtime_;
  const EngineOptions& options_;
  const UnitTable& table_;
  const DeviceNeeds needs_;
  std::vector<UnitHome> homes_;
  tiers::Budget::Hold store_hold_;
  std::unique_ptr<tiers::PinnedPool> pool_;
  std::vector<tiers::DeviceBlock> device_blocks_;
  std::vector<std::byte*> gather_slots_;
  std::vector<std::byte*> gradient_slots_;
  std::vector<std::span<std::byte>> update_buffers_;
  std::vector<std::span<std::byte>> staging_buffers_;
  std::vector<Piece> pieces_;
  std::uint64_t piece_tiles_ = 0;
};

}  // namespace hoist::detail
