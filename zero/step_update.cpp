// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/detail/step_update.hpp>

namespace hoist::detail {

StepUpdate::StepUpdate(std::uint64_t step, std::span<const GroupOptions> groups, double gradient_scale) : step_(step) {
  for (const GroupOptions& group : groups) coefficients_.emplace_back(group, step, gradient_scale);
}

void StepUpdate::apply(const TileAccess& tile, const Memory& memory) {
  const Segment& segment = *tile.segment;
  const std::byte* gradient = memory.home(tile.unit).gradient + segment.home_gradient_offset +
                              tile.tile->first_element * dtype_bytes(segment.home_gradient_dtype);
  const StateArrays state = tile.view();
  auto* const moment1 = static_cast<float*>(state.moment1);
  auto* const moment2 = static_cast<float*>(state.moment2);
  const optim::UpdateCoefficients& c = coefficients_[segment.group.index];
  const bool sound = segment.dtype == DType::fp32
                         ? optim::update_tile(c, optim::WholeTile{.weight = reinterpret_cast<float*>(tile.weights),
                                                                  .moment1 = moment1,
                                                                  .moment2 = moment2,
                                                                  .gradient = gradient,
                                                                  .gradient_dtype = segment.home_gradient_dtype,
                                                                  .count = tile.tile->elements})
                         : optim::update_tile(c, optim::SplitTile{.weight = reinterpret_cast<bf16*>(tile.weights),
                                                                  .remainder = state.remainder,
                                                                  .moment1 = moment1,
                                                                  .moment2 = moment2,
                                                                  .gradient = gradient,
                                                                  .gradient_dtype = segment.home_gradient_dtype,
                                                                  .count = tile.tile->elements});
  if (!sound) broken_ = tile.unit.index;
}

void StepUpdate::check(const UnitTable& table) const {
  if (broken_ == ~0u) return;
  throw Error(
      fmt::format("step {} made a parameter or moment of unit '{}' infinite or too large for bf16; nothing of it "
                  "was committed: lower the learning rate and restore the last commit",
                  step_, table.units()[broken_].name));
}

}  // namespace hoist::detail
