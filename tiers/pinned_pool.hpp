// SPDX-License-Identifier: Apache-2.0
// tiers/pinned_pool.hpp - plans how one block of pinned host memory is divided into pieces, and owns that block.
//
// Everything is allocated at start-up: PinnedPlan gives each piece its offset, then PinnedPool takes the memory once,
// in full. Pieces are 4 KiB aligned, sizes rounded to 4 KiB only. io_uring registers memory in slices of at most 1 GiB;
// a slice ends early where the next piece would not fit it, so that all transfers of a piece are registered. If a piece
// is longer than a slice, its blocks that cross the end of a slice are transferred unregistered.
//
// Threading  One thread plans; the pool's memory is plain memory.
// Errors     BudgetError before anything is allocated, if the plan exceeds the budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <hoist/core/units.hpp>
#include <hoist/platform/host_memory.hpp>
#include <hoist/tiers/budget.hpp>

namespace hoist::tiers {

// Places the pieces one behind the other, in the order of add().
class PinnedPlan {
 public:
  std::uint64_t add(std::uint64_t bytes);  // returns the offset of the piece
  std::uint64_t bytes() const { return bytes_; }
  // What a piece adds to bytes(), whatever was added before.
  static std::uint64_t piece_bytes(std::uint64_t bytes) { return round_up(bytes, kBlockAlignment); }
  // The pool's memory, bytes() long, in the slices that io_uring registers as one buffer each.
  std::vector<std::span<std::byte>> slices(std::span<std::byte> memory) const;

 private:
  std::uint64_t bytes_ = 0;
  std::vector<std::uint64_t> slice_begins_;
};

class PinnedPool {
 public:
  // `options.bytes`: PinnedPlan::bytes(). 0: an empty pool. Contents are zero.
  PinnedPool(Budget& budget, const platform::HostMemoryOptions& options);
  const platform::HostMemory& memory() const { return memory_; }
  // For a drive that stopped answering and may still write here: the memory is never used again and never returned to
  // the system. The pool cannot be used afterwards.
  void quarantine();

 private:
  Budget::Hold hold_;
  platform::HostMemory memory_;
};

}  // namespace hoist::tiers
