// SPDX-License-Identifier: Apache-2.0
// core/norm_order.hpp - the order in which every device adds up the squares of a gradient shard.
//
// fp64, 16 lanes by element index modulo 16 inside chunks of kNormChunkElements counted from the start of the shard;
// lanes are added in a fixed tree (i with i + 8, then + 4, + 2, + 1), chunks in order by the caller. A square of a
// float is exact in double, so each addition is the only rounding.
#pragma once

#include <cstddef>

#include <hoist/core/arithmetic.hpp>

namespace hoist {

inline constexpr std::size_t kNormChunkElements = 65536;
inline constexpr std::size_t kNormLanes = 16;

// Adds the lanes in the tree's order; returns lanes[0]. The other values of `lanes` are overwritten.
HOIST_HOST_DEVICE inline double sum_of_lanes(double* lanes) {
  for (std::size_t half = kNormLanes / 2; half != 0; half /= 2) {
    for (std::size_t k = 0; k < half; ++k) lanes[k] = exact::add(lanes[k], lanes[k + half]);
  }
  return lanes[0];
}

}  // namespace hoist
