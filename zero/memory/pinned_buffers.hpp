// SPDX-License-Identifier: Apache-2.0
// zero/memory/pinned_buffers.hpp - how many buffers an engine has in pinned memory beside its units' regions, and how
// large they are.
//
// Threading  A chooser is for one thread; the rest are pure functions. Borrows the regions.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include <hoist/zero/memory/unit_regions.hpp>

namespace hoist::detail {

struct PinnedBuffers {
  std::uint64_t sub_group_tiles = 1;  // at most; an update buffer holds that many
  unsigned update_count = 0;
  unsigned staging_count = 0;
  std::uint64_t gradient_ring_bytes = 0;  // 0: each gradient has a region of its unit
};

class PinnedBufferChooser {
 public:
  PinnedBufferChooser(const EngineOptions& options, const UnitRegions& regions);

  // The buffers that the options ask for, and a ring of kRingGradients.
  const PinnedBuffers& wanted() const { return wanted_; }
  // As many of the buffers asked for as fit into `free_bytes` together with the units' regions: first the fewest that
  // make progress, whether or not they fit, then more of each kind until no further one fits (sub-groups grow to twice
  // their size). The ring gets the rest, up to all gradients.
  PinnedBuffers choose(std::uint64_t free_bytes) const;
  std::uint64_t bytes(const PinnedBuffers& buffers) const;  // with the units' regions
  // Calls visit(role, bytes) for every buffer, in the order in which they lie in memory.
  template <typename Visit>
  void for_each(const PinnedBuffers& buffers, const Visit& visit) const {
    if (buffers.gradient_ring_bytes > 0) visit(MemoryRole::gradient_ring, buffers.gradient_ring_bytes);
    const std::uint64_t update_bytes = buffers.update_count > 0 ? update_buffer_bytes(buffers) : 0;
    for (unsigned i = 0; i < buffers.update_count; ++i) visit(MemoryRole::update_buffer, update_bytes);
    for (unsigned i = 0; i < buffers.staging_count; ++i) visit(MemoryRole::staging_buffer, staging_bytes_);
    for (unsigned i = 0; sum_bytes_ > 0 && i < kSumBuffers; ++i) visit(MemoryRole::sum_buffer, sum_bytes_);
    if (!regions_.has_device_only()) return;
    visit(MemoryRole::results_copy, regions_.device_results_bytes());
    visit(MemoryRole::copy_buffer, kCopyBufferBytes);
  }
  std::uint64_t update_buffer_bytes(const PinnedBuffers& buffers) const;

  // If a step has several micro-batches, so many of their gradients are on their way to fp32 sums at once.
  static constexpr unsigned kSumBuffers = 2;
  // The ring holds at least so many of the largest gradients if it can; with more the drive may lag further behind, be
  // it with updates or with spilled gradients.
  static constexpr unsigned kRingGradients = 2;
  // What RecordIo copies at once between device-only memory and pageable memory.
  static constexpr std::uint64_t kCopyBufferBytes = 1 << 20;

 private:
  std::uint64_t ring_bytes(
      std::uint64_t gradients) const;  // for so many of the largest, or for all; 0: there is no ring
  void grow_ring(PinnedBuffers& chosen, std::uint64_t free_bytes) const;

  const UnitRegions& regions_;
  std::uint64_t largest_gradient_bytes_ = 0, all_gradient_bytes_ = 0;  // that the ring is for
  std::uint64_t staging_bytes_ = 0;                                    // the most weights of a unit on NVMe
  std::uint64_t sum_bytes_ = 0;                                        // 0: gradients are not summed in memory
  PinnedBuffers wanted_;
  mutable std::map<std::uint64_t, std::uint64_t> update_buffer_bytes_;  // by tiles, as far as asked for
};

// A share of what is on NVMe that lives in pinned memory nevertheless, empty where it is left open.
using PinnedShare = std::optional<double> EngineOptions::*;
// The largest one, in hundredths, that fits into `free_bytes` of pinned memory beside the buffers that there are with
// the share asked for; of a gradient ring, beside room for two gradients.
double largest_pinned_share(EngineOptions options, PinnedShare share, const UnitTable& table, DeviceAccess access,
                            std::uint64_t free_bytes);
// Decides what is left open. First which gradients are spilled: those of the last units, as few as leave room for the
// buffers asked for, as far as these are no more than the default update buffers and two staging buffers, and for two
// gradients on their way. Then puts the largest in place of open shares, of weights first: a byte of weights saves more
// reads.
void choose_pinned_shares(EngineOptions& options, const UnitTable& table, DeviceAccess access,
                          std::uint64_t free_bytes);

}  // namespace hoist::detail
