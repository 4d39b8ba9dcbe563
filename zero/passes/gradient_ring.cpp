// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <hoist/core/assert.hpp>
#include <hoist/zero/passes/gradient_ring.hpp>

namespace hoist::detail {

// Held pieces lie in [oldest, end of newest), or around the end of the block.
std::optional<std::uint64_t> GradientRing::room_for(std::uint64_t bytes) const {
  if (held_.empty()) return 0;
  const std::uint64_t begin = held_.front().offset, end = held_.back().offset + held_.back().bytes;
  const bool around = held_.back().offset < begin;
  if (end + bytes <= (around ? begin : block_.size())) return end;
  if (!around && bytes <= begin) return 0;
  return std::nullopt;
}

std::byte* GradientRing::take(std::uint64_t bytes) {
  HOIST_ASSERT(bytes > 0 && bytes <= block_.size(), "a gradient of {} bytes, of {}", bytes, block_.size());
  while (true) {
    while (!held_.empty() && held_.front().used.done()) held_.pop_front();
    if (const auto offset = room_for(bytes)) {
      held_.push_back({*offset, bytes, {}});
      return block_.data() + *offset;
    }
    held_.front().used.wait_quietly();  // an error is its owner's
  }
}

void GradientRing::lend(Completion used) {
  HOIST_ASSERT(!held_.empty(), "nothing was taken");
  held_.back().used = std::move(used);
}

}  // namespace hoist::detail
