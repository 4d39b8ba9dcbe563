// SPDX-License-Identifier: Apache-2.0
// core/checksum.hpp - CRC-64 of a tile, with the tile's identity mixed in.
//
// A tile's checksum starts from its identity, so that the right bytes in the wrong place (a stale, misdirected or
// swapped block) fail exactly like a flipped bit. CRC-64 (ECMA-182, reflected) from ISA-L.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hoist {

// Identifies a tile and the write that made it. `generation` is the step that wrote it.
struct TileIdentity {
  std::uint64_t store;   // random number of the store
  std::uint32_t record;  // record within the store
  std::uint32_t tile;    // tile within the region
  std::uint32_t region;  // 0 weights, 1 optimizer state
  std::uint32_t extent;  // extent it was written to
  std::uint64_t generation;
};

std::uint64_t tile_checksum(const TileIdentity& identity, std::span<const std::byte> bytes);

// CRC-64 of plain bytes (manifest, superblock).
std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed = 0);

}  // namespace hoist
