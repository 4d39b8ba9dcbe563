// SPDX-License-Identifier: Apache-2.0
// tiers/record_layout.hpp - the layout of one rank's shard of one unit in memory and on disk. Pure arithmetic.
//
// A record is a W region (weights, read alone by every gather) followed by an S region (optimizer state). Both are cut
// into tiles of kTileElements parameters, the grain of checksums and of the update. Neither depends on block size,
// subgroup size, buffer count or placement.
//
//   segment    W tile                S tile
//   bf16       2 bytes per element   [remainder int16 | moments], 10 bytes per element with two moments of fp32
//   fp16       2 bytes per element   [master fp32 | moments], 12 bytes per element with two moments of fp32
//   fp32       4 bytes per element   [moments], 8 bytes per element with two moments of fp32
//   frozen     as above              none
//
// A segment's optimizer decides how many moments there are, 0 to 2, and of which type: fp32, bf16 or fp8, whose scales,
// a byte for each kMomentBlock elements, lie behind all moments. It also decides whether the remainder is an int8.
//
// Segments follow each other; the last tile of a segment is short and padded with zeros to 4 KiB in both regions, so
// every tile starts and ends on a 4 KiB boundary and tiles of a segment are contiguous.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <hoist/core/dtype.hpp>
#include <hoist/core/units.hpp>

namespace hoist::tiers {

// Of bf16: 160 KiB of S, 32 KiB of W and up to 64 KiB of gradient, which an L2 of 256 KiB holds.
inline constexpr std::uint64_t kTileElements = 16384;

// The largest number of bytes of an element in the S region: a master and two moments of fp32.
inline constexpr std::uint64_t kStateBytesMax = 12;

// Elements per shard are a multiple of this, so the arrays inside an S tile keep 64-byte alignment.
// Arrays of bytes keep it in full tiles only. No block of moments of fp8 is cut by a shard or a tile.
inline constexpr std::uint64_t kShardMultiple = 32;
static_assert(kShardMultiple % kMomentBlock == 0);

enum class Region : std::uint8_t { weights = 0, state = 1 };

struct RecordSegment {
  DType dtype = DType::bf16;
  bool trainable = true;
  std::uint64_t shard_elements = 0;  // a multiple of kShardMultiple
  unsigned moment_count = 2;         // of a trainable segment
  MomentType moment_type = MomentType::fp32;
  RemainderType remainder = RemainderType::int16;  // of bf16 weights

  friend bool operator==(const RecordSegment&, const RecordSegment&) = default;

  // Bytes of the master beside its weight: the remainder for bf16, the whole master for fp16, none for fp32.
  std::uint64_t master_bytes_per_element() const {
    return dtype == DType::bf16 ? remainder_bytes(remainder) : dtype == DType::fp16 ? 4 : 0;
  }
  // Bytes for this many elements, a multiple of kShardMultiple.
  std::uint64_t state_bytes(std::uint64_t elements) const {
    return trainable ? elements * master_bytes_per_element() + moment_count * moment_bytes(moment_type, elements) : 0;
  }
};

struct Tile {
  std::uint32_t segment = 0;
  std::uint64_t first_element = 0;  // within the segment's shard
  std::uint64_t elements = 0;
  std::uint64_t w_offset = 0, w_bytes = 0;  // within the W region, padding included
  std::uint64_t s_offset = 0, s_bytes = 0;  // within the S region; s_bytes is 0 when frozen

  std::uint64_t offset(Region region) const { return region == Region::weights ? w_offset : s_offset; }
  std::uint64_t bytes(Region region) const { return region == Region::weights ? w_bytes : s_bytes; }
};

// Consecutive tiles that differ only in their position: the full ones of a segment, or its short last one.
struct EqualTiles {
  std::uint32_t segment = 0;
  std::uint64_t first_tile = 0, tile_count = 0;
  std::uint64_t elements = 0, w_bytes = 0, s_bytes = 0;  // of each

  std::uint64_t end_tile() const { return first_tile + tile_count; }
};

class RecordLayout {
 public:
  explicit RecordLayout(std::span<const RecordSegment> segments);

  std::span<const RecordSegment> segments() const { return segments_; }
  std::span<const Tile> tiles() const { return tiles_->all; }
  // The same tiles as runs, at most two for each segment, for sums over all of them.
  std::span<const EqualTiles> equal_tiles() const { return tiles_->equal; }
  std::uint64_t region_bytes(Region region) const { return region == Region::weights ? w_bytes_ : s_bytes_; }
  std::uint64_t bytes() const { return w_bytes_ + s_bytes_; }
  // Bytes of consecutive tiles, padding included.
  std::uint64_t tile_bytes(Region region, std::uint64_t first, std::uint64_t count) const {
    return offset(region, first + count) - offset(region, first);
  }
  // The offset of a segment's weights within the W region.
  std::uint64_t segment_w_offset(std::uint32_t segment) const { return segment_w_offsets_[segment]; }

 private:
  // The offset of a tile within its region; after the last tile, the region's end.
  std::uint64_t offset(Region region, std::uint64_t tile) const {
    return tile == tiles().size() ? region_bytes(region) : tiles()[tile].offset(region);
  }

  std::vector<RecordSegment> segments_;
  struct Tiles {
    std::vector<Tile> all;
    std::vector<EqualTiles> equal;
  };
  std::shared_ptr<const Tiles> tiles_;  // of all copies: a model of 10^12 parameters has 61 million
  std::vector<std::uint64_t> segment_w_offsets_;
  std::uint64_t w_bytes_ = 0;
  std::uint64_t s_bytes_ = 0;
};

// The arrays inside one S tile.
struct StateTileView {
  std::int16_t* remainder = nullptr;  // of bf16 segments, or remainder8
  std::int8_t* remainder8 = nullptr;
  float* master = nullptr;                // of fp16 segments
  std::array<void*, 2> moments{};         // of RecordSegment::moment_type; null from moment_count on
  std::array<std::uint8_t*, 2> scales{};  // of moments of fp8
};
StateTileView view_state_tile(const RecordSegment& segment, std::uint64_t elements, std::byte* tile);

}  // namespace hoist::tiers
