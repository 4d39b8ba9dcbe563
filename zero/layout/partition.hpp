// SPDX-License-Identifier: Apache-2.0
// zero/layout/partition.hpp - which rank owns which elements. Pure arithmetic.
//
// A segment is a flat array of elements; it is padded so that every rank owns an equal contiguous shard. ZeRO:
// Rajbhandari et al., arXiv 1910.02054.
#pragma once

#include <algorithm>
#include <cstdint>

#include <hoist/core/units.hpp>
#include <hoist/tiers/record_layout.hpp>

namespace hoist {

// Elements each of `world_size` ranks owns of a segment; a multiple of tiers::kShardMultiple, padding included.
constexpr std::uint64_t shard_elements(std::uint64_t segment_elements, int world_size) {
  return round_up(divide_up(segment_elements, static_cast<std::uint64_t>(world_size)), tiers::kShardMultiple);
}

// Parameters start at multiples of this many elements within their segment (64 bytes of bf16), whatever the world size.
inline constexpr std::uint64_t kParameterAlignment = 32;

struct ElementRange {
  std::uint64_t first = 0;
  std::uint64_t count = 0;
};

// The part of segment elements [first, first + count) that `rank` owns, as a range within that rank's shard, and where
// it begins within [first, first + count).
struct OwnedRange {
  ElementRange shard;
  std::uint64_t offset = 0;
};
constexpr OwnedRange owned_range(std::uint64_t first, std::uint64_t count, std::uint64_t shard, int rank) {
  const std::uint64_t begin = static_cast<std::uint64_t>(rank) * shard;
  const std::uint64_t low = std::max(first, begin);
  const std::uint64_t high = std::min(first + count, begin + shard);
  if (low >= high) return {};
  return {{low - begin, high - low}, low - first};
}

}  // namespace hoist
