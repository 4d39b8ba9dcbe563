// SPDX-License-Identifier: Apache-2.0
// zero/layout/tile_access.hpp - pointers to one tile's weights, optimizer state and gradient.
//
// Memory     Borrows all of them; whoever made a TileAccess says how long they stay.
#pragma once

#include <cstddef>
#include <cstdint>

#include <hoist/zero/layout/unit_table.hpp>

namespace hoist::detail {

// One tile's weights and state, readable and writable, wherever they are at the moment.
struct TileAccess {
  UnitId unit{};
  const Segment* segment = nullptr;
  const tiers::Tile* tile = nullptr;
  std::byte* weights = nullptr;
  std::byte* state = nullptr;
  const std::byte* gradient = nullptr;  // if it came with them, from NVMe

  // moments[0] and scales[0] are those of State::moment1, [1] those of State::moment2; null if the optimizer does not
  // keep one. Pre: the segment is trainable.
  tiers::StateTileView view() const;
};

}  // namespace hoist::detail
