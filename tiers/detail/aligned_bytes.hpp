// SPDX-License-Identifier: Apache-2.0
// tiers/detail/aligned_bytes.hpp - zeroed memory that direct transfers may use.
#pragma once

#include <cstddef>
#include <cstring>
#include <mutex>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <hoist/core/units.hpp>

namespace hoist::tiers::detail {

class AlignedBytes {
 public:
  explicit AlignedBytes(std::uint64_t count)
      : bytes_(static_cast<std::byte*>(::operator new (count, std::align_val_t{kBlockAlignment}))), count_(count) {
    if (count != 0) std::memset(bytes_, 0, count);
  }
  ~AlignedBytes() { ::operator delete (bytes_, std::align_val_t{kBlockAlignment}); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  std::span<std::byte> span() const { return {bytes_, count_}; }
  // Never freed, for memory that a drive was given up with: the kernel may still use it. Reachable to the end, so that
  // a leak checker tells it apart from a leak. Empty afterwards.
  void quarantine() {
    static std::mutex mutex;
    static auto* const kept = new std::vector<std::byte*>;
    const std::lock_guard lock(mutex);
    kept->push_back(std::exchange(bytes_, nullptr));
    count_ = 0;
  }

 private:
  std::byte* bytes_;
  std::uint64_t count_;
};

}  // namespace hoist::tiers::detail
