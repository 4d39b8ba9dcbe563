// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/platform/update_arrays.hpp>
#include <hoist/zero/update/step_update.hpp>

namespace hoist::detail {

StepUpdate::StepUpdate(std::uint64_t step, std::span<const GroupOptions> groups, double gradient_scale, int rank)
    : step_(step), rank_(static_cast<std::uint64_t>(rank)) {
  for (const GroupOptions& group : groups) {
    coefficients_.emplace_back(group, step, gradient_scale);
    seeds_.push_back(group.rounding_seed);
  }
}

optim::Rounding StepUpdate::rounding(const TileAccess& tile) const {
  const Segment& segment = *tile.segment;
  const std::uint64_t first = rank_ * segment.shard_elements + tile.tile->first_element;
  std::uint64_t key = random_bits(seeds_[segment.group.index], step_);
  key = random_bits(key, tile.unit.index);
  key = random_bits(key, segment.record_segment);
  return {.key = static_cast<std::uint32_t>(random_bits(key, first >> 32)), .first = static_cast<std::uint32_t>(first)};
}

void StepUpdate::apply(const TileAccess& tile, const std::byte* gradient) {
  const Segment& segment = *tile.segment;
  const tiers::StateTileView state = tile.view();
  const optim::UpdateCoefficients& c = coefficients_[segment.group.index];
  const optim::TileState arrays{.moment1 = state.moments[0],
                                .moment2 = state.moments[1],
                                .gradient = gradient,
                                .gradient_dtype = segment.gradient_shard_dtype,
                                .count = tile.tile->elements,
                                .moment_type = segment.state.moments,
                                .rounding = rounding(tile),
                                .scale1 = state.scales[0],
                                .scale2 = state.scales[1]};
  const auto update = [&](const auto& tile_of_type) {
    if (!optim::update_tile(c, tile_of_type)) broken_ = tile.unit.index;
  };
  switch (segment.dtype) {
    case DType::bf16:
      return update(optim::SplitTile{arrays, reinterpret_cast<bf16*>(tile.weights), state.remainder, state.remainder8});
    case DType::fp16:
      return update(optim::Fp16Tile{arrays, reinterpret_cast<std::uint16_t*>(tile.weights), state.master});
    case DType::fp32:
      return update(optim::WholeTile{arrays, reinterpret_cast<float*>(tile.weights)});
  }
}

void StepUpdate::enqueue(UnitId id, const Segment& segment, std::span<const tiers::Tile> tiles, const Memory& memory,
                         platform::Stream& stream) const {
  const UnitMemory& here = memory.unit(id);
  const tiers::Tile& first = tiles.front();
  const TileAccess access{.unit = id,
                          .segment = &segment,
                          .tile = &first,
                          .weights = here.weights + first.w_offset,
                          .state = here.state + first.s_offset};
  const tiers::StateTileView state = access.view();
  std::uint64_t count = 0;
  for (const tiers::Tile& tile : tiles) count += tile.elements;
  auto* const master = segment.dtype == DType::fp16 ? static_cast<void*>(state.master) : state.remainder;
  stream.update(coefficients_[segment.group.index],
                {.weights = access.weights,
                 .weights_dtype = segment.dtype,
                 .master = static_cast<std::byte*>(master),
                 .moment1 = static_cast<std::byte*>(state.moments[0]),
                 .moment2 = static_cast<std::byte*>(state.moments[1]),
                 .moment_dtype = segment.state.moments == MomentType::bf16 ? DType::bf16 : DType::fp32,
                 .gradient = here.gradient + segment.gradient_shard_offset +
                             first.first_element * dtype_bytes(segment.gradient_shard_dtype),
                 .gradient_dtype = segment.gradient_shard_dtype,
                 .count = count,
                 .tile_elements = first.elements,
                 .tile_stride_bytes = first.s_bytes,
                 .rounding = rounding(access),
                 .refused = reinterpret_cast<std::uint32_t*>(memory.device_results().data()),
                 .refused_value = id.index + 1});
}

void StepUpdate::run_on_device(const UnitTable& table, const Memory& memory, platform::Stream& stream) {
  stream.fill(memory.device_results().data(), 0, sizeof(std::uint32_t));
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const UnitId id{u};
    if (!memory.device_only(id)) continue;
    const Unit& unit = table.unit(id);
    // One launch for the full tiles of a segment, as far as their rounding has one key, and one for its short last one.
    const auto tiles = unit.trainable.tiles();
    for (std::size_t begin = 0, end = 0; begin < tiles.size(); begin = end) {
      const Segment& segment = unit.segments[tiles[begin].segment];
      const auto index = [&](std::size_t t) { return (rank_ * segment.shard_elements + tiles[t].first_element) >> 32; };
      do {
        ++end;
      } while (end < tiles.size() && tiles[end].segment == tiles[begin].segment &&
               tiles[end].elements == tiles[begin].elements && index(end) == index(begin));
      enqueue(id, segment, tiles.subspan(begin, end - begin), memory, stream);
    }
  }
  const std::span<std::byte> here = memory.results_copy().first(sizeof(std::uint32_t));
  stream.copy(here.data(), memory.device_results().data(), here.size(), platform::CopyKind::device_to_host);
  stream.synchronize();
  std::uint32_t refused = 0;
  std::memcpy(&refused, here.data(), sizeof refused);
  if (refused != 0) broken_ = refused - 1;
}

void StepUpdate::check(const UnitTable& table, bool has_store) const {
  if (broken_ == ~0u) return;
  throw Error(
      fmt::format("step {} made a parameter or moment of unit '{}' infinite or too large for its type; nothing of it "
                  "was committed: clip gradients or lower the learning rate, and {}start anew",
                  step_, table.units()[broken_].name, has_store ? "restore the last commit or " : ""));
}

}  // namespace hoist::detail
