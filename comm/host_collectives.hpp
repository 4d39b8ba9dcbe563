// SPDX-License-Identifier: Apache-2.0
// comm/host_collectives.hpp - the arithmetic that all CPU backends share, so that their bits agree.
//
// A reduction moves each rank's contributions to the shard's owner unchanged and adds them there: in fp32, in rank
// order 0, 1, ..., times the scale, rounded once. An element's result depends only on the ranks' values of that
// element, never on how the transfer was divided, so scratch size and grouping cannot change a bit.
//
// Threading  Pure functions and one cursor.
// Memory     A round's contributions lie in scratch as [rank, element] per chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <hoist/comm/communicator.hpp>

namespace hoist::comm {

// Elements [first_element, first_element + element_count) of a piece's shard, received at `scratch_offset_bytes`.
struct ReduceChunk {
  std::size_t piece = 0;
  std::uint64_t first_element = 0;
  std::uint64_t element_count = 0;
  std::uint64_t scratch_offset_bytes = 0;
};

// Cuts a grouped reduction into rounds whose received bytes fit `scratch_bytes`; small pieces share a round.
class ReduceRounds {
 public:
  // Pre: scratch_bytes >= reduce_scratch_bytes_min(ranks). `pieces` is borrowed.
  ReduceRounds(std::span<const ReducePiece> pieces, int ranks, std::uint64_t scratch_bytes);
  // Replaces `round` with the next one; false if there is none.
  bool next(std::vector<ReduceChunk>& round);

 private:
  std::span<const ReducePiece> pieces_;
  std::uint64_t ranks_;
  std::uint64_t scratch_bytes_;
  std::size_t piece_ = 0;
  std::uint64_t element_ = 0;
};

// The smallest scratch a reduction over `ranks` works with.
std::uint64_t reduce_scratch_bytes_min(int ranks);

// target[i] = round(scale * (received[0][i] + received[1][i] + ...)), received as [rank, element] of `dtype`. The sum
// starts with rank 0's value, so one rank and scale 1 changes nothing. Runs in the default floating-point environment,
// independent of the embedding program's. `target` may not overlap `received`.
void sum_in_rank_order(std::byte* target, const std::byte* received, DType dtype, int ranks, std::uint64_t count,
                       float scale);

}  // namespace hoist::comm
