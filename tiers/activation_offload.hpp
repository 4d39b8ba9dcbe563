// SPDX-License-Identifier: Apache-2.0
// tiers/activation_offload.hpp - keeps a program's activations in pinned memory between its forward and its backward
// pass.
//
// Copies run on two streams of its own, beside the program's compute stream and the engine's streams. An item is copied
// down while the next layers compute, and up again before its layer's turn.
//
// Threading  One thread.
// Memory     Every item has its own place in pinned memory, taken from the budget at construction. Device memory
//            belongs to the program and must outlive the copies; the destructor waits for them.
// Errors     BudgetError if the places do not fit. UsageError for an item that is not there or was never offloaded.
//            A failed copy fails every wait for its event.
// Main path  offload(item, source, compute) -> the event says when the source may be overwritten; reload(item, target,
//            compute) -> the event says when the target is filled. Both wait for the work on `compute` so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <hoist/platform/device.hpp>

namespace hoist::tiers {

class Budget;
class PinnedPool;

struct ActivationOffloadOptions {
  std::size_t items = 0;
  std::uint64_t item_bytes = 0;
  bool huge_pages = true;
  std::vector<int> numa_nodes{}, touch_cpus{};  // of the pinned memory, as HostMemoryOptions has them
};

class ActivationOffload {
 public:
  ActivationOffload(platform::Device& device, Budget& pinned, const ActivationOffloadOptions& options);
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;

  // Copies item_bytes down. Work enqueued on `compute` so far has filled `source`. Earlier copies up may still read the
  // item; this copy waits for them.
  platform::StreamEvent offload(std::size_t item, const std::byte* source, platform::StreamRef compute);
  // Copies the item's last content up. Work enqueued on `compute` later must wait for the event before it uses
  // `target`. Earlier copies down may still read it; this copy waits for them.
  platform::StreamEvent reload(std::size_t item, std::byte* target, platform::StreamRef compute);

  // Bytes of pinned memory for these ActivationOffloadOptions. Errors: UsageError if 64 bits cannot count them.
  static std::uint64_t bytes(const ActivationOffloadOptions& options);

 private:
  std::byte* place(std::size_t item) const;
  platform::Device& device_;
  const ActivationOffloadOptions options_;
  std::unique_ptr<PinnedPool> pool_;
  std::vector<bool> offloaded_;  // by item
  platform::StreamEvent last_offloaded_, last_reloaded_;
  std::unique_ptr<platform::Stream> down_;
  std::unique_ptr<platform::Stream> up_;
};

}  // namespace hoist::tiers
