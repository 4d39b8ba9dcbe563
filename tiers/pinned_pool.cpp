// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include <hoist/core/assert.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/tiers/pinned_pool.hpp>

namespace hoist::tiers {

std::uint64_t PinnedPlan::add(std::uint64_t bytes) {
  constexpr std::uint64_t kSliceBytes = platform::HostMemory::kSliceBytes;
  const std::uint64_t offset = bytes_;
  bytes_ += piece_bytes(bytes);
  if (slice_begins_.empty() || bytes_ - slice_begins_.back() > kSliceBytes) slice_begins_.push_back(offset);
  while (bytes_ - slice_begins_.back() > kSliceBytes) slice_begins_.push_back(slice_begins_.back() + kSliceBytes);
  return offset;
}

std::vector<std::span<std::byte>> PinnedPlan::slices(std::span<std::byte> memory) const {
  HOIST_ASSERT(memory.size() == bytes_, "{} bytes of memory for a plan of {}", memory.size(), bytes_);
  std::vector<std::span<std::byte>> slices;
  for (std::size_t i = 0; i < slice_begins_.size(); ++i) {
    const std::uint64_t end = i + 1 < slice_begins_.size() ? slice_begins_[i + 1] : bytes_;
    if (end > slice_begins_[i]) slices.push_back(memory.subspan(slice_begins_[i], end - slice_begins_[i]));
  }
  return slices;
}

PinnedPool::PinnedPool(Budget& budget, const platform::HostMemoryOptions& options)
    : hold_(budget.take(options.bytes, "the pinned pool")), memory_(options) {}

void PinnedPool::quarantine() { leave_unfreed(new platform::HostMemory(std::move(memory_))); }

}  // namespace hoist::tiers
