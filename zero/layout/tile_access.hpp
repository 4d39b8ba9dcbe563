// SPDX-License-Identifier: Apache-2.0
// zero/layout/tile_access.hpp - pointers to one tile's weights, optimizer state and gradient.
//
// Memory     Borrows all of them; whoever made a TileAccess says how long they stay.
#pragma once

#include <cstddef>
#include <cstdint>

#include <hoist/zero/layout/unit_table.hpp>

namespace hoist::detail {

// The arrays of a tile's state. Null: what the weights' type has not, and moments that the optimizer does not keep.
struct StateArrays {
  std::int16_t* remainder = nullptr;  // of bf16 weights, or remainder8
  std::int8_t* remainder8 = nullptr;
  float* master = nullptr;  // beside fp16 weights
  void* moment1 = nullptr;  // of Segment::state.moments
  void* moment2 = nullptr;
  std::uint8_t* scale1 = nullptr;  // of moments of fp8
  std::uint8_t* scale2 = nullptr;
};

// One tile's weights and state, readable and writable, wherever they are at the moment.
struct TileAccess {
  UnitId unit{};
  const Segment* segment = nullptr;
  const tiers::Tile* tile = nullptr;
  std::byte* weights = nullptr;
  std::byte* state = nullptr;
  const std::byte* gradient = nullptr;  // if it came with them, from NVMe

  StateArrays view() const;
};

}  // namespace hoist::detail
