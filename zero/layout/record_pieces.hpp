// SPDX-License-Identifier: Apache-2.0
// zero/layout/record_pieces.hpp - a store's records in pieces of a few MiB, in the order in which they lie in the file:
// for what reads all of a commit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include <hoist/tiers/record_layout.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/zero/layout/tile_values.hpp>

namespace hoist::detail {

// The most that a piece takes, in memory for direct transfers.
inline constexpr std::uint64_t kPieceBytesMax = kAccessTiles * tiers::kTileElements * tiers::kStateBytesMax;

// Some tiles of one region of a record.
struct RecordPiece {
  tiers::RecordId record;
  tiers::Region region;
  std::uint32_t first = 0;
  std::span<const tiers::Tile> tiles;

  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const tiers::Tile& tile : tiles) sum += tile.bytes(region);
    return sum;
  }
  std::uint32_t count() const { return static_cast<std::uint32_t>(tiles.size()); }
};

template <typename Visit>
void for_each_piece(std::span<const tiers::StoreRecord> records, const Visit& visit) {
  for (std::uint32_t r = 0; r < records.size(); ++r) {
    const auto tiles = records[r].layout.tiles();
    for (const tiers::Region region : {tiers::Region::weights, tiers::Region::state}) {
      for (std::uint32_t first = 0; first < tiles.size(); first += kAccessTiles) {
        const std::size_t count = std::min<std::size_t>(kAccessTiles, tiles.size() - first);
        const RecordPiece piece{tiers::RecordId{r}, region, first, tiles.subspan(first, count)};
        if (piece.bytes() > 0) visit(piece);
      }
    }
  }
}

inline std::uint64_t bytes_of(std::span<const tiers::StoreRecord> records) {
  std::uint64_t bytes = 0;
  for (const tiers::StoreRecord& record : records) bytes += record.layout.bytes();
  return bytes;
}

}  // namespace hoist::detail
