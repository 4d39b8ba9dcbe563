// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstring>

#include <hoist/comm/host_collectives.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/float_environment.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/elements.hpp>

namespace hoist::comm {

namespace {

constexpr std::uint64_t kChunkAlignment = 64;  // a cache line: chunks of one round do not share one

// Partial sums of this many elements stay in the first-level cache while the ranks are added one after another.
constexpr std::uint64_t kBlockElements = 1024;

// Copies in and out by memcpy: neither device memory nor scratch promises an alignment beyond bytes.
template <typename As>
void sum_block(std::byte* target, const std::byte* received, std::uint64_t rank_stride_bytes, int ranks,
               std::uint64_t count, float scale) {
  std::array<typename As::Stored, kBlockElements> stored;
  std::array<float, kBlockElements> sum;
  const std::uint64_t block_bytes = count * sizeof(typename As::Stored);
  std::memcpy(stored.data(), received, block_bytes);
  for (std::uint64_t i = 0; i < count; ++i) sum[i] = As::load(stored[i]);
  for (int r = 1; r < ranks; ++r) {
    std::memcpy(stored.data(), received + static_cast<std::uint64_t>(r) * rank_stride_bytes, block_bytes);
    for (std::uint64_t i = 0; i < count; ++i) sum[i] += As::load(stored[i]);
  }
  for (std::uint64_t i = 0; i < count; ++i) stored[i] = As::store(scale * sum[i]);
  std::memcpy(target, stored.data(), block_bytes);
}

template <typename As>
void sum_elements(std::byte* target, const std::byte* received, int ranks, std::uint64_t count, float scale) {
  constexpr std::uint64_t kBytes = sizeof(typename As::Stored);
  for (std::uint64_t first = 0; first < count; first += kBlockElements) {
    sum_block<As>(target + first * kBytes, received + first * kBytes, count * kBytes, ranks,
                  std::min(kBlockElements, count - first), scale);
  }
}

}  // namespace

std::uint64_t reduce_scratch_bytes_min(int ranks) { return static_cast<std::uint64_t>(ranks) * kChunkAlignment; }

ReduceRounds::ReduceRounds(std::span<const ReducePiece> pieces, int ranks, std::uint64_t scratch_bytes)
    : pieces_(pieces), ranks_(static_cast<std::uint64_t>(ranks)), scratch_bytes_(scratch_bytes) {
  HOIST_ASSERT(scratch_bytes >= reduce_scratch_bytes_min(ranks), "{} bytes of scratch for {} ranks", scratch_bytes,
               ranks);
}

bool ReduceRounds::next(std::vector<ReduceChunk>& round) {
  round.clear();
  std::uint64_t used_bytes = 0;
  while (piece_ < pieces_.size()) {
    const ReducePiece& piece = pieces_[piece_];
    const std::uint64_t left = piece.shard_elements - element_;
    const std::uint64_t element_bytes = ranks_ * dtype_bytes(piece.dtype);
    const std::uint64_t room = (scratch_bytes_ - std::min(used_bytes, scratch_bytes_)) / element_bytes;
    // A cut that is not the piece's end falls on a whole cache line per rank where the room allows it.
    const std::uint64_t line = kChunkAlignment / dtype_bytes(piece.dtype);
    const std::uint64_t take = left <= room ? left : (room >= line ? round_down(room, line) : room);
    if (left > 0 && take == 0) break;
    if (take > 0) round.push_back({piece_, element_, take, used_bytes});
    used_bytes = round_up(used_bytes + take * element_bytes, kChunkAlignment);
    element_ += take;
    if (element_ < piece.shard_elements) break;
    ++piece_;
    element_ = 0;
  }
  return !round.empty();
}

void sum_in_rank_order(std::byte* target, const std::byte* received, DType dtype, int ranks, std::uint64_t count,
                       float scale) {
  const FloatEnvironment environment;
  switch (dtype) {
    case DType::bf16:
      return sum_elements<platform::AsBf16>(target, received, ranks, count, scale);
    case DType::fp16:
      return sum_elements<platform::AsFp16>(target, received, ranks, count, scale);
    case DType::fp32:
      return sum_elements<platform::AsFp32>(target, received, ranks, count, scale);
  }
}

}  // namespace hoist::comm
