// SPDX-License-Identifier: Apache-2.0
// zero/memory/memory.hpp - every byte an engine will use, sized and taken once.
//
// Homes hold state between uses; buffers hold it on the way. Which units have which home follows from the placements:
//
//                 parameters = device     pinned             nvme
//   weights       pinned (or device, when the optimizer is there too)   pinned   none (store)
//   state         by optimizer: device | pinned | none (store); of none, the first tiles may be pinned
//   gradient      device when the optimizer is there, else pinned; in update mode `backward` a ring for all
//
// Of an optimizer that is offloaded in part, some units are as if it were on the device (DeviceStates).
//
// Where the device's memory is not the CPU's to read, units with state there are `apart()`: nobody dereferences their
// homes; their steps run there, and everything else goes through buffers in pinned memory (TilePipeline, RecordIo).
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
#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/memory/pinned_needs.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist::detail {

struct UnitHome {
  std::byte* weights = nullptr;       // host layout; null when only the store has them
  std::byte* state = nullptr;         // S region of the trainable record, its first state_tiles tiles
  std::uint32_t state_tiles = 0;      // the others' state only the store has
  std::byte* gradient = nullptr;      // this rank's shards; null where there is a ring
  std::byte* secondary = nullptr;     // secondary shard, where the group gathers; with the weights' placement
  std::byte* device_shard = nullptr;  // host layout, on the device: what gathers start from without crossing a link
  std::byte* own_memory = nullptr;    // gathered layout: the unit never competes for a slot
  std::byte* own_gradient = nullptr;  // gradient layout: held from the first use by a tied unit to the owner's finish
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
  const std::vector<std::span<std::byte>>& sum_buffers() const { return sum_buffers_; }
  std::span<std::byte> gradient_ring() const { return gradient_ring_; }  // instead of homes, or empty
  bool hands_gradients_on() const { return options_.update_mode == UpdateMode::backward; }
  const std::vector<Piece>& pieces() const { return pieces_; }
  std::span<std::byte> pinned() const { return pool_->memory().bytes(); }
  std::vector<std::span<std::byte>> io_slices() const { return pool_->memory().slices(); }  // to be registered
  bool state_on_device(UnitId unit) const { return pinned_needs_.state_on_device(unit); }   // and the gradient
  bool apart(UnitId unit) const { return pinned_needs_.apart(unit); }
  bool homes_apart() const { return homes_apart_; }  // of some units, or of all
  // Of a step on the device, and where they come down to; empty unless homes are apart.
  std::byte* device_findings() const { return device_findings_; }
  std::span<std::byte> findings() const { return findings_; }
  std::span<std::byte> copy_buffer() const { return copy_buffer_; }  // RecordIo's alone
  std::string describe() const;
  // Pinned memory is never given back to the system: a drive may still write to it.
  void quarantine() { pool_->quarantine(); }

  using PieceBytes = PinnedNeeds::PieceBytes;
  bool state_at_home(const Piece& piece) const { return pinned_needs_.state_at_home(piece); }
  PieceBytes buffered_bytes(const Piece& piece) const { return pinned_needs_.buffered_bytes(piece); }
  const DeviceNeeds& device_needs() const { return needs_; }

 private:
  bool on_device(Placement placement) const { return placement == Placement::device; }
  PinnedNeeds::Buffers choose_buffers(std::uint64_t store_memory_bytes) const;
  void take_pinned(const PinnedNeeds::Buffers& buffers);
  void take_device();
  std::byte* take_device_block(std::uint64_t bytes, const std::string& what);

  Runtime& runtime_;
  const EngineOptions& options_;
  const UnitTable& table_;
  const bool homes_apart_;
  const DeviceNeeds needs_;
  const PinnedNeeds pinned_needs_;
  std::vector<UnitHome> homes_;
  tiers::Budget::Hold store_hold_;
  std::unique_ptr<tiers::PinnedPool> pool_;
  std::vector<tiers::DeviceBlock> device_blocks_;
  std::vector<std::byte*> gather_slots_;
  std::vector<std::byte*> gradient_slots_;
  std::vector<std::span<std::byte>> update_buffers_;
  std::vector<std::span<std::byte>> staging_buffers_;
  std::vector<std::span<std::byte>> sum_buffers_;
  std::byte* device_findings_ = nullptr;
  std::span<std::byte> findings_;
  std::span<std::byte> copy_buffer_;
  std::span<std::byte> gradient_ring_;
  std::vector<Piece> pieces_;
  std::uint64_t piece_tiles_ = 0;
};

}  // namespace hoist::detail
