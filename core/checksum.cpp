// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <isa-l/crc64.h>

#include <hoist/core/checksum.hpp>

namespace hoist {

std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed) {
  return crc64_ecma_refl(seed, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

std::uint64_t tile_checksum(const TileIdentity& identity, std::span<const std::byte> bytes) {
  static_assert(sizeof(TileIdentity) == 32, "the identity has no padding: every byte of it is checksummed");
  return checksum(bytes, checksum(std::as_bytes(std::span(&identity, 1))));
}

}  // namespace hoist
