// SPDX-License-Identifier: Apache-2.0
// tiers/detail/aligned_bytes.hpp - zeroed memory that direct transfers may use.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <span>

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

 private:
  std::byte* bytes_;
  std::uint64_t count_;
};

}  // namespace hoist::tiers::detail
