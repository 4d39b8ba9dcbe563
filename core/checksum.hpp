// SPDX-License-Identifier: Apache-2.0
// core/checksum.hpp - 64-bit checksums of stored bytes, with the identity of a tile mixed in.
//
// The bytes run through eight lanes of 16 bytes, each of which takes one AES round for each 16 bytes: one instruction,
// or two on ARM. docs/format.md has the definition, and docs/decisions/0034-checksums.md what was measured. A round is
// a bijection of its lane, so that a change within one block of 16 bytes always changes the lane's final value; eight
// lanes become 64 bits at the end. It guards against damage, not against an adversary: there is no key.
//
// A tile's checksum depends on its identity, so that the right bytes in the wrong place (a stale, misdirected or
// swapped block) fail exactly like a flipped bit.
//
// Threading  Pure functions; any thread.
// Memory     No allocation; no alignment is needed.
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

// The same on every processor.
std::uint64_t tile_checksum(const TileIdentity& identity, std::span<const std::byte> bytes);

// The checksum of bytes without an identity (manifest, superblock): tile_checksum() with an identity of zeros.
std::uint64_t checksum(std::span<const std::byte> bytes);

}  // namespace hoist
