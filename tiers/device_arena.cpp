// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/device_arena.hpp>

namespace hoist::tiers {

DeviceBlock::DeviceBlock(DeviceBlock&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      bytes_(std::exchange(other.bytes_, {})),
      hold_(std::move(other.hold_)) {}

DeviceBlock& DeviceBlock::operator=(DeviceBlock&& other) noexcept {
  DeviceBlock taken(std::move(other));
  std::swap(arena_, taken.arena_);
  std::swap(bytes_, taken.bytes_);
  std::swap(hold_, taken.hold_);
  return *this;
}

DeviceBlock::~DeviceBlock() {
  if (arena_ != nullptr) arena_->release(*this);
}

DeviceArena::DeviceArena(platform::Device& device, Budget& budget) : device_(device), budget_(budget) {
  const std::uint64_t bytes = round_down(device.memory().size(), kAlignment);
  if (bytes > 0) holes_.emplace(0, bytes);
}

DeviceArena::~DeviceArena() {
  HOIST_ASSERT(blocks_alive_ == 0, "{} blocks outlive their arena: engines and device blocks end before their Runtime",
               blocks_alive_);
}

DeviceBlock DeviceArena::allocate(std::uint64_t bytes, const std::string& what) {
  if (bytes == 0) return {};
  MutexLock lock(mutex_);
  if (bytes > device_.memory().size()) throw no_hole(bytes, what);  // which may be too large to round up
  const std::uint64_t rounded = round_up(bytes, kAlignment);
  const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const auto& h) { return h.second >= rounded; });
  if (hole == holes_.end()) throw no_hole(bytes, what);
  Budget::Hold hold = budget_.take(rounded, what);
  const auto [offset, hole_bytes] = *hole;
  const std::span<std::byte> piece = device_.memory().subspan(offset, rounded);
  device_.acquired(piece);
  holes_.erase(hole);
  if (hole_bytes > rounded) holes_.emplace(offset + rounded, hole_bytes - rounded);
  ++blocks_alive_;
  return {this, piece.first(bytes), std::move(hold)};
}

std::uint64_t DeviceArena::least_bytes_for(std::uint64_t bytes) const {
  const MutexLock lock(mutex_);
  return least_arena(bytes);
}

// First fit never looks past a hole that suffices. In a larger arena every live block would have the same position, and
// only the last hole would be longer.
std::uint64_t DeviceArena::least_arena(std::uint64_t bytes) const {
  const std::uint64_t arena_bytes = device_.memory().size();
  std::uint64_t tail_bytes = 0;
  for (const auto& [offset, hole_bytes] : holes_)
    if (offset + hole_bytes == round_down(arena_bytes, kAlignment)) tail_bytes = hole_bytes;
  constexpr std::uint64_t kCountedMax = std::uint64_t{1} << 62;  // no device has more
  return round_up(arena_bytes - tail_bytes + round_up(std::min(bytes, kCountedMax), kAlignment), kBlockAlignment);
}

BudgetError DeviceArena::no_hole(std::uint64_t bytes, const std::string& what) const {
  std::uint64_t free_bytes = 0;
  for (const auto& [offset, hole_bytes] : holes_) free_bytes += hole_bytes;
  return BudgetError(
      {.tier = budget_.tier(),
       .have_bytes = device_.memory().size(),
       .need_bytes = least_arena(bytes),
       .key = budget_.key(),
       .detail = fmt::format("{} of {} beside the present blocks ({} free, the largest hole {})", what,
                             format_bytes(bytes), format_bytes(free_bytes), format_bytes(largest_hole()))});
}

std::uint64_t DeviceArena::largest_hole_bytes() const {
  MutexLock lock(mutex_);
  return largest_hole();
}

std::uint64_t DeviceArena::largest_hole() const {
  std::uint64_t largest = 0;
  for (const auto& [offset, bytes] : holes_) largest = std::max(largest, bytes);
  return largest;
}

void DeviceArena::release(DeviceBlock& block) noexcept {
  if (!process_.is_this()) return;  // a forked process has no device
  const std::span<std::byte> all = device_.memory();
  auto offset = static_cast<std::uint64_t>(block.bytes_.data() - all.data());
  std::uint64_t bytes = round_up(block.bytes_.size(), kAlignment);
  device_.released(all.subspan(offset, bytes));  // before the lock: the piece is still this block's alone

  MutexLock lock(mutex_);
  auto next = holes_.lower_bound(offset);
  if (next != holes_.end()) {
    HOIST_ASSERT(offset + bytes <= next->first, "[{}, +{}) is free already", offset, bytes);
    if (offset + bytes == next->first) {
      bytes += next->second;
      next = holes_.erase(next);
    }
  }
  if (next != holes_.begin()) {
    const auto previous = std::prev(next);
    HOIST_ASSERT(previous->first + previous->second <= offset, "[{}, +{}) is free already", offset, bytes);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      holes_.erase(previous);
    }
  }
  holes_.emplace(offset, bytes);
  --blocks_alive_;
  block.hold_ = {};  // under the lock, so that a hole and its bytes in the budget come free together
}

}  // namespace hoist::tiers
