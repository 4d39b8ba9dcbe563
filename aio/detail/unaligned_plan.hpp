// SPDX-License-Identifier: Apache-2.0
// aio/detail/unaligned_plan.hpp - divides a transfer of any offset, length and address into pieces. Arithmetic only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <hoist/core/units.hpp>

namespace hoist::aio::detail {

struct UnalignedPiece {
  std::uint64_t offset_bytes = 0;  // in the file; the first byte that the caller wants moved
  std::uint64_t length_bytes = 0;
  bool direct = false;  // straight between drive and the caller's memory; else through a bounce buffer

  std::uint64_t end_bytes() const { return offset_bytes + length_bytes; }
  // The whole sectors that contain it.
  std::uint64_t cover_begin(std::uint64_t alignment) const { return round_down(offset_bytes, alignment); }
  std::uint64_t cover_end(std::uint64_t alignment) const { return round_up(end_bytes(), alignment); }
};

struct UnalignedRange {
  std::uint64_t offset_bytes = 0;
  std::uint64_t length_bytes = 0;
  std::uint64_t address = 0;
};

// Pieces in ascending order, without gap or overlap. Where memory is aligned to the file, all but the ends is direct; a
// bounced piece covers at most `bounce_bytes`. Pre: `bounce_bytes` is a positive multiple of `alignment`.
inline std::vector<UnalignedPiece> plan_unaligned(const UnalignedRange& range, std::uint64_t alignment,
                                                  std::uint64_t bounce_bytes) {
  std::vector<UnalignedPiece> pieces;
  const std::uint64_t end = range.offset_bytes + range.length_bytes;
  const bool congruent = range.address % alignment == range.offset_bytes % alignment;
  const std::uint64_t direct_begin = round_up(range.offset_bytes, alignment);
  const std::uint64_t direct_end = congruent ? round_down(end, alignment) : 0;
  for (std::uint64_t at = range.offset_bytes; at < end;) {
    const bool direct = at >= direct_begin && at < direct_end;
    std::uint64_t piece_end = direct ? direct_end : std::min(end, round_down(at, alignment) + bounce_bytes);
    if (at < direct_begin && direct_begin < direct_end) piece_end = direct_begin;
    pieces.push_back({at, piece_end - at, direct});
    at = piece_end;
  }
  return pieces;
}

}  // namespace hoist::aio::detail
