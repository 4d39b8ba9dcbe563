// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/budget.hpp>

namespace hoist::tiers {

Budget::Budget(std::string tier, std::string key, std::uint64_t limit_bytes, Budget* common)
    : tier_(std::move(tier)), key_(std::move(key)), limit_bytes_(limit_bytes), common_(common) {}

Budget::~Budget() { HOIST_ASSERT(held_bytes_ == 0, "{} bytes of the {} budget outlive it", held_bytes_, tier_); }

Budget::Hold Budget::take(std::uint64_t bytes, const std::string& what) {
  MutexLock lock(mutex_);
  if (bytes > limit_bytes_ - held_bytes_) {
    const std::string beside =
        held_bytes_ == 0 ? "" : fmt::format(" (beside the {} held already)", format_bytes(held_bytes_));
    throw BudgetError({.tier = tier_,
                       .have_bytes = limit_bytes_,
                       .need_bytes = held_bytes_ + bytes,
                       .key = key_,
                       .detail = what + beside});
  }
  Hold in_common = common_ != nullptr ? common_->take(bytes, what) : Hold();
  in_common.budget_ = nullptr;  // give_back() gives these bytes back, too
  held_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, held_bytes_);
  return {this, bytes};
}

std::uint64_t Budget::free_bytes() const {
  const std::uint64_t own = limit_bytes_ - held_bytes();
  return common_ == nullptr ? own : std::min(own, common_->free_bytes());
}

std::uint64_t Budget::held_bytes() const {
  MutexLock lock(mutex_);
  return held_bytes_;
}

std::uint64_t Budget::peak_bytes() const {
  MutexLock lock(mutex_);
  return peak_bytes_;
}

void Budget::give_back(std::uint64_t bytes) noexcept {
  MutexLock lock(mutex_);
  HOIST_ASSERT(bytes <= held_bytes_, "{} bytes released, {} held", bytes, held_bytes_);
  held_bytes_ -= bytes;
  if (common_ != nullptr) common_->give_back(bytes);
}

Budget::Hold::Hold(Hold&& other) noexcept
    : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Budget::Hold& Budget::Hold::operator=(Hold&& other) noexcept {
  Hold taken(std::move(other));  // self-assignment changes nothing
  std::swap(budget_, taken.budget_);
  std::swap(bytes_, taken.bytes_);
  return *this;
}

Budget::Hold::~Hold() {
  if (budget_ != nullptr) budget_->give_back(bytes_);
}

}  // namespace hoist::tiers
