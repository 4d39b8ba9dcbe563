// SPDX-License-Identifier: Apache-2.0
// zero/passes/gradient_ring.hpp - pinned memory that units share for gradients in transit: until their unit's update
// (update mode `backward`), or until they are on NVMe (gradient_spill).
//
// The block is cut in the order in which gradients come down. A piece that does not fit before the end of the block
// begins at its beginning; when nothing is held, everything begins there, so that any unit fits that is not larger than
// the block.
//
// Threading  One thread (the executor) takes; pieces come back by their completions, on any thread.
// Errors     A piece whose completion failed is free all the same: whoever owns the failure reports it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>

#include <hoist/core/completion.hpp>

namespace hoist::detail {

class GradientRing {
 public:
  explicit GradientRing(std::span<std::byte> block) : block_(block) {}

  // The next piece. Waits for the oldest ones until there is room. Pre: bytes <= the block; lend() since the last
  // take().
  std::byte* take(std::uint64_t bytes);
  // The piece taken last is held until `used` is done.
  void lend(Completion used);

 private:
  struct Held {
    std::uint64_t offset = 0, bytes = 0;
    Completion used;
  };
  std::optional<std::uint64_t> room_for(std::uint64_t bytes) const;  // where they fit next

  std::span<std::byte> block_;
  std::deque<Held> held_;  // oldest first; they follow one another around the block
};

}  // namespace hoist::detail
