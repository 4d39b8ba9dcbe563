// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include <hoist/core/units.hpp>
#include <hoist/optim_cpu/norm.hpp>
#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/zero/passes/gradient_norm.hpp>

namespace hoist::detail {

GradientNorm::GradientNorm(Runtime& runtime, const UnitTable& table, const Memory& memory)
    : runtime_(runtime), table_(table), memory_(memory) {
  for (const Unit& unit : table.units()) {
    first_chunk_.push_back(chunks_.size());
    for (const Segment& segment : unit.trainable_segments()) {
      const std::uint64_t element_bytes = dtype_bytes(segment.gradient_shard_dtype);
      for (std::uint64_t first = 0; first < segment.shard_elements; first += kNormChunkElements) {
        chunks_.push_back({.offset_bytes = segment.gradient_shard_offset + first * element_bytes,
                           .dtype = segment.gradient_shard_dtype,
                           .count = std::min<std::uint64_t>(kNormChunkElements, segment.shard_elements - first),
                           .in_norm = segment.counts_in_norm});
      }
    }
  }
  first_chunk_.push_back(chunks_.size());
}

std::span<GradientNorm::Chunk> GradientNorm::chunks_of(UnitId unit) {
  const std::size_t begin = first_chunk_[unit.index];
  return std::span(chunks_).subspan(begin, first_chunk_[unit.index + 1] - begin);
}

void GradientNorm::sum_chunk(Chunk& chunk, const std::byte* shards) {
  chunk.sum = optim::sum_of_squares_chunk(shards + chunk.offset_bytes, chunk.dtype, chunk.count);
}

void GradientNorm::sum(UnitId unit, const std::byte* shards) {
  const std::span<Chunk> chunks = chunks_of(unit);
  runtime_.update_pool().run(chunks.size(), [&](std::size_t i) { sum_chunk(chunks[i], shards); });
}

void GradientNorm::sum(std::span<const UnitId> units, std::span<std::byte* const> shards) {
  work_.clear();
  for (const UnitId unit : units)
    for (Chunk& chunk : chunks_of(unit)) work_.push_back({&chunk, shards[unit.index]});
  runtime_.update_pool().run(work_.size(), [this](std::size_t i) { sum_chunk(*work_[i].chunk, work_[i].shards); });
}

void GradientNorm::sum_on_device(platform::Stream& stream) {
  auto* const sums = reinterpret_cast<double*>(memory_.device_results().data());
  std::uint64_t count = 0;
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    if (!memory_.device_only(UnitId{u})) continue;
    for (const Segment& segment : table_.units()[u].trainable_segments()) {
      stream.sums_of_squares(sums + count, memory_.unit(UnitId{u}).gradient + segment.gradient_shard_offset,
                             segment.gradient_shard_dtype, segment.shard_elements);
      count += divide_up(segment.shard_elements, kNormChunkElements);
    }
  }
  const std::span<std::byte> here = memory_.results_copy().first(count * sizeof(double));
  stream.copy(here.data(), memory_.device_results().data(), here.size(), platform::CopyKind::device_to_host);
  stream.synchronize();
  const auto* next = reinterpret_cast<const double*>(here.data());
  for (std::uint32_t u = 0; u < table_.units().size(); ++u) {
    if (!memory_.device_only(UnitId{u})) continue;
    for (Chunk& chunk : chunks_of(UnitId{u})) chunk.sum = *next++;
  }
}

bool GradientNorm::is_finite(UnitId unit) const {
  return std::all_of(chunks_.begin() + static_cast<std::ptrdiff_t>(first_chunk_[unit.index]),
                     chunks_.begin() + static_cast<std::ptrdiff_t>(first_chunk_[unit.index + 1]),
                     [](const Chunk& chunk) { return std::isfinite(chunk.sum); });
}

double GradientNorm::total() const {
  double total = 0;
  bool finite = true;
  for (std::size_t unit = 0; unit + 1 < first_chunk_.size(); ++unit) {
    double unit_sum = 0;
    for (std::size_t i = first_chunk_[unit]; i < first_chunk_[unit + 1]; ++i) {
      if (chunks_[i].in_norm) unit_sum += chunks_[i].sum;
      finite = finite && std::isfinite(chunks_[i].sum);
    }
    total += unit_sum;
  }
  return finite ? total : std::numeric_limits<double>::infinity();
}

}  // namespace hoist::detail
