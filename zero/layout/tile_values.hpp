// SPDX-License-Identifier: Apache-2.0
// zero/layout/tile_values.hpp - single values in a record's tiles, for access to state outside of steps.
//
// Threading  Pure functions on memory that nobody else is changing.
#pragma once

#include <functional>
#include <span>

#include <hoist/zero/layout/partition.hpp>
#include <hoist/zero/layout/tile_access.hpp>

namespace hoist::detail {

// Tiles looked at in one go: at most 3 MiB of bf16 record.
inline constexpr std::uint32_t kAccessTiles = 16;

// Elements [first, first + out.size()) of an array of `dtype`.
void load_elements(const std::byte* elements, DType dtype, std::uint64_t first, std::span<float> out);

// Values of elements [first, first + out.size()) of a tile: `master` is the fp32 value whatever the weights' type.
// Pre: the segment has the moment.
void load_values(const TileAccess& tile, State state, std::uint64_t first, std::span<float> out);
// Values of elements [first, first + values.size()) of a tile, to the nearest that its type can hold. In a block of
// moments of fp8 others may move where its range ends; what was loaded comes back as it was.
void store_values(const TileAccess& tile, State state, std::uint64_t first, std::span<const float> values);
// The state in which training begins: everything zero but what the optimizer's sum of squares begins with.
void begin_state(const TileAccess& tile, const GroupOptions& group);

// The part of shard elements [first, first + count) that lies in a tile, relative to the tile.
ElementRange overlap(const tiers::Tile& tile, std::uint64_t first, std::uint64_t count);

// Tiles [first, first + count) of one segment in one region of a record.
struct TileRun {
  tiers::Region region = tiers::Region::weights;
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  std::uint64_t offset_bytes = 0;  // within the region
  std::uint64_t length_bytes = 0;
};
TileRun tile_run(const tiers::RecordLayout& layout, tiers::Region region, std::uint32_t first, std::uint32_t count);
// Gives verified bytes of a run, which stay valid until the next call for the same region.
using FetchTiles = std::function<const std::byte*(const TileRun& run)>;

// Values of elements [first, first + out.size()) of a segment's shard.
// Pre: `layout` is that of the record the segment belongs to.
void read_values(const tiers::RecordLayout& layout, const Segment& segment, State state, std::uint64_t first,
                 std::span<float> out, const FetchTiles& fetch);
// The weights of the same elements, bit by bit in the segment's type. Pre: out.size() is a multiple of its bytes.
void read_weights(const tiers::RecordLayout& layout, const Segment& segment, std::uint64_t first,
                  std::span<std::byte> out, const FetchTiles& fetch);

}  // namespace hoist::detail
