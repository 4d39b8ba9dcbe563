// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/pinned_pool.hpp>

namespace hoist::tiers {

namespace {

using platform::HostMemory;

struct PoolPiece {
  std::uint64_t offset;
  std::uint64_t end;
};

// The position of a piece when `used` bytes are taken: the rule of both plan and pool.
PoolPiece place(std::uint64_t used, std::uint64_t bytes) {
  const std::uint64_t rounded = round_up(bytes, kBlockAlignment);
  const std::uint64_t left_in_slice = HostMemory::kSliceBytes - used % HostMemory::kSliceBytes;
  const bool fits_a_slice = rounded <= HostMemory::kSliceBytes;
  const std::uint64_t offset = rounded <= left_in_slice || !fits_a_slice ? used : used + left_in_slice;
  return {offset, offset + rounded};
}

}  // namespace

std::uint64_t PinnedPlan::add(std::uint64_t bytes) {
  const PoolPiece piece = place(bytes_, bytes);
  bytes_ = piece.end;
  return piece.offset;
}

PinnedPool::PinnedPool(Budget& budget, const PinnedPoolOptions& options)
    : hold_(budget.take(options.bytes, "the pinned pool")),
      memory_({.bytes = options.bytes,
               .huge_pages = options.huge_pages,
               .numa_nodes = options.numa_nodes,
               .touch_threads = options.touch_threads}) {}

std::span<std::byte> PinnedPool::carve(std::uint64_t bytes, const std::string& what) {
  const PoolPiece piece = place(used_bytes_, bytes);
  HOIST_ASSERT(piece.end <= memory_.bytes().size(), "{} of {} bytes at {} was not in the plan of {} bytes", what, bytes,
               piece.offset, memory_.bytes().size());
  used_bytes_ = piece.end;
  return memory_.bytes().subspan(piece.offset, bytes);
}

void PinnedPool::quarantine() {
  static Mutex mutex;
  static auto* const kept = new std::vector<HostMemory>;  // never destroyed: reachable to the end
  const MutexLock lock(mutex);
  kept->push_back(std::move(memory_));
}

}  // namespace hoist::tiers
