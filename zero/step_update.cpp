// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/detail/step_update.hpp>

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

void StepUpdate::apply(const TileAccess& tile, const Memory& memory) {
  const Segment& segment = *tile.segment;
  const std::byte* gradient = memory.home(tile.unit).gradient + segment.home_gradient_offset +
                              tile.tile->first_element * dtype_bytes(segment.home_gradient_dtype);
  const StateArrays state = tile.view();
  const optim::UpdateCoefficients& c = coefficients_[segment.group.index];
  const auto update = [&](auto arrays) {
    arrays.moment1 = state.moment1;
    arrays.moment2 = state.moment2;
    arrays.gradient = gradient;
    arrays.gradient_dtype = segment.home_gradient_dtype;
    arrays.count = tile.tile->elements;
    arrays.moment_dtype = segment.state.moments;
    arrays.rounding = rounding(tile);
    if (!optim::update_tile(c, arrays)) broken_ = tile.unit.index;
  };
  switch (segment.dtype) {
    case DType::bf16:
      return update(optim::SplitTile{.weight = reinterpret_cast<bf16*>(tile.weights), .remainder = state.remainder});
    case DType::fp16:
      return update(optim::Fp16Tile{.weight = reinterpret_cast<std::uint16_t*>(tile.weights), .master = state.master});
    case DType::fp32:
      return update(optim::WholeTile{.weight = reinterpret_cast<float*>(tile.weights)});
  }
}

void StepUpdate::check(const UnitTable& table) const {
  if (broken_ == ~0u) return;
  throw Error(
      fmt::format("step {} made a parameter or moment of unit '{}' infinite or too large for its type; nothing of it "
                  "was committed: lower the learning rate and restore the last commit",
                  step_, table.units()[broken_].name));
}

}  // namespace hoist::detail
