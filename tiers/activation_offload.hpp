// SPDX-License-Identifier: Apache-2.0
// tiers/activation_offload.hpp - a program's activations in pinned memory between its forward and its backward pass.
//
// Copies go over two streams of its own, beside the program's compute stream and beside the engine's: an item comes
// down while the next layers compute, and goes up again before its layer's turn.
//
// Threading  One thread.
// Memory     Every item has a place of its own in pinned memory, taken from the budget at construction. Device memory
//            is the program's; it outlives the copies, for which a stash waits at its end.
// Errors     BudgetError when the places do not fit. A failed copy fails whoever waits for its event.
// Main path  stash(item, source, compute) -> the event says when the source may be overwritten; unstash(item, target,
//            compute) -> the event says when the target is filled. Both wait for what is on `compute` so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <hoist/platform/device.hpp>
#include <hoist/tiers/pinned_pool.hpp>

namespace hoist::tiers {

struct ActivationOffloadOptions {
  std::size_t items = 0;
  std::uint64_t item_bytes = 0;
  bool huge_pages = true;
};

class ActivationOffload {
 public:
  ActivationOffload(platform::Device& device, Budget& pinned, const ActivationOffloadOptions& options);
  ~ActivationOffload();
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;

  // Copies item_bytes down. `source` must hold what work enqueued on `compute` so far leaves there.
  platform::StreamEvent stash(std::size_t item, const std::byte* source, platform::StreamRef compute);
  // Copies the item's last content up. `target` is not used by anything enqueued on `compute` later, until that waits
  // for the event; copies down that were asked for before may still read it: this waits for them.
  platform::StreamEvent unstash(std::size_t item, std::byte* target, platform::StreamRef compute);

  // Of pinned memory, for ActivationOffloadOptions.
  static std::uint64_t bytes(const ActivationOffloadOptions& options);

 private:
  std::byte* place(std::size_t item) const;
  platform::Device& device_;
  const ActivationOffloadOptions options_;
  PinnedPool pool_;
  std::vector<std::span<std::byte>> places_;
  platform::StreamEvent last_stashed_;
  std::unique_ptr<platform::Stream> down_;
  std::unique_ptr<platform::Stream> up_;
};

}  // namespace hoist::tiers
