// SPDX-License-Identifier: Apache-2.0
// zero/memory/pinned_needs.hpp - how many bytes of pinned memory an engine needs, and how a budget is divided.
// Arithmetic only, like device_needs.hpp.
//
// Cost       By units and segments, but for cut(): a model may have tens of millions of tiles.
#pragma once

#include <cstdint>
#include <vector>

#include <hoist/tiers/pinned_pool.hpp>
#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/memory/device_needs.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

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
  std::uint64_t update_buffer_bytes(std::uint64_t piece_tiles) const;  // of cut()'s largest piece
  std::uint64_t staging_buffer_bytes() const;                          // the largest unit's weights
  // Gradients of one unit on their way to fp32 sums: kSumBuffers of them, where steps have several micro-batches.
  static constexpr unsigned kSumBuffers = 2;
  std::uint64_t sum_buffer_bytes() const;
  std::uint64_t findings_bytes() const;  // where they come down to; 0 unless homes are apart
  // What passes through it at once between device-only memory and pageable memory.
  static constexpr std::uint64_t kCopyBufferBytes = 1 << 20;
  std::uint64_t copy_buffer_bytes() const { return homes_apart_ ? kCopyBufferBytes : 0; }
  const DeviceStates& device_states() const { return states_; }
  // The largest gradients that a ring is wanted to hold at least; with more of them the drive may lag further behind.
  static constexpr unsigned kRingGradients = 2;
  // Whether gradients live in a ring: in update mode `backward`, unless sums over passes need homes.
  bool rings_gradients() const;

 private:
  std::uint64_t largest_piece(UnitId unit, std::uint64_t begin, std::uint64_t end, std::uint64_t piece_tiles) const;
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

}  // namespace hoist::detail
