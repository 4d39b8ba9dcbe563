// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/assert.hpp>
#include <hoist/tiers/record_layout.hpp>

namespace hoist::tiers {

RecordLayout::RecordLayout(std::span<const RecordSegment> segments) : segments_(segments.begin(), segments.end()) {
  std::uint64_t count = 0;
  for (const RecordSegment& segment : segments_) count += divide_up(segment.shard_elements, kTileElements);
  // Tile numbers are 32 bits in the identity of a checksum and in the manifest.
  HOIST_ASSERT(count < UINT32_MAX, "{} tiles", count);
  Tiles tiles;
  tiles.all.reserve(count);
  for (std::uint32_t index = 0; index < segments_.size(); ++index) {
    const RecordSegment& segment = segments_[index];
    HOIST_ASSERT(segment.moment_count <= 2, "segment {}: {} moments", index, segment.moment_count);
    HOIST_ASSERT(segment.shard_elements % kShardMultiple == 0, "segment {}: {} elements", index,
                 segment.shard_elements);
    segment_w_offsets_.push_back(w_bytes_);
    for (std::uint64_t first = 0; first < segment.shard_elements; first += kTileElements) {
      Tile tile;
      tile.segment = index;
      tile.first_element = first;
      tile.elements = std::min(kTileElements, segment.shard_elements - first);
      tile.w_offset = w_bytes_;
      tile.w_bytes = round_up(tile.elements * dtype_bytes(segment.dtype), kBlockAlignment);
      tile.s_offset = s_bytes_;
      tile.s_bytes = round_up(segment.state_bytes(tile.elements), kBlockAlignment);
      if (first == 0 || tile.elements < kTileElements) {
        tiles.equal.push_back({.segment = index,
                               .first_tile = tiles.all.size(),
                               .elements = tile.elements,
                               .w_bytes = tile.w_bytes,
                               .s_bytes = tile.s_bytes});
      }
      ++tiles.equal.back().tile_count;
      w_bytes_ += tile.w_bytes;
      s_bytes_ += tile.s_bytes;
      tiles.all.push_back(tile);
    }
  }
  tiles_ = std::make_shared<const Tiles>(std::move(tiles));
}

StateTileView view_state_tile(const RecordSegment& segment, std::uint64_t elements, std::byte* tile) {
  StateTileView view;
  if (segment.dtype == DType::bf16) {
    if (segment.remainder == RemainderType::int16) view.remainder = reinterpret_cast<std::int16_t*>(tile);
    if (segment.remainder == RemainderType::int8) view.remainder8 = reinterpret_cast<std::int8_t*>(tile);
  }
  if (segment.dtype == DType::fp16) view.master = reinterpret_cast<float*>(tile);
  tile += elements * segment.master_bytes_per_element();
  const bool has_scales = segment.moment_type == MomentType::fp8;
  for (unsigned i = 0; i < segment.moment_count; ++i) {
    view.moments[i] = tile;
    tile += has_scales ? elements : moment_bytes(segment.moment_type, elements);
  }
  for (unsigned i = 0; has_scales && i < segment.moment_count; ++i) {
    view.scales[i] = reinterpret_cast<std::uint8_t*>(tile);
    tile += elements / kMomentBlock;
  }
  return view;
}

}  // namespace hoist::tiers
