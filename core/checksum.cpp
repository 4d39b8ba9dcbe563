// SPDX-License-Identifier: Apache-2.0
#include <hoist/core/checksum.hpp>

// clang-format off: the first include compiles the kernel for every dynamic target, the second for the baseline.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hoist/core/detail/checksum-inl.h"
#include <hwy/foreach_target.h>

#include <hoist/core/detail/checksum-inl.h>
// clang-format on

namespace hoist {

HWY_EXPORT(checksum_of);

std::uint64_t tile_checksum(const TileIdentity& identity, std::span<const std::byte> bytes) {
  return HWY_DYNAMIC_DISPATCH(checksum_of)(bytes, identity);
}

std::uint64_t checksum(std::span<const std::byte> bytes) { return tile_checksum(TileIdentity{}, bytes); }

}  // namespace hoist
