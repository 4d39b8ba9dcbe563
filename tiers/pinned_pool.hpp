// SPDX-License-Identifier: Apache-2.0
// tiers/pinned_pool.hpp - divides one registered block of host memory into exact pieces.
//
// Everything is allocated at start-up: sizes are planned first, then the memory is taken once, in full, and divided.
// Pieces are 4 KiB aligned, sizes rounded to 4 KiB only. io_uring registers memory in slices of at most 1 GiB; a slice
// ends early where the next piece would not fit it, so that all transfers of a piece are registered. Of a piece longer
// than a slice, a block across a boundary is transferred unregistered.
//
// Threading  carve() during start-up, one thread; the pieces are plain memory afterwards.
// Errors     BudgetError before anything is allocated, if the plan exceeds the budget.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/units.hpp>
#include <hoist/platform/host_memory.hpp>
#include <hoist/tiers/budget.hpp>

namespace hoist::tiers {

// Adds up carve() requests as the pool will place them. Requests in the same order.
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
  // `options.bytes`: what all carve() calls together will need, PinnedPlan::bytes(). 0: an empty pool.
  PinnedPool(Budget& budget, const platform::HostMemoryOptions& options);
  // The next piece: exactly `bytes`, 4 KiB aligned. Going beyond the plan is a bug. Contents are zero.
  std::span<std::byte> carve(std::uint64_t bytes, const std::string& what);
  const platform::HostMemory& memory() const { return memory_; }
  // For a drive that stopped answering and may still write here: the memory is never used again and never returned to
  // the system. The pool cannot be used afterwards.
  void quarantine();

 private:
  Budget::Hold hold_;
  platform::HostMemory memory_;
  PinnedPlan carved_;
};

}  // namespace hoist::tiers
