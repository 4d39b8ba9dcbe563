// SPDX-License-Identifier: Apache-2.0
// zero/update/step_update.hpp - carries out one decided step on tiles, on the CPU or on the device.
//
// Threading  apply() from any thread, on different tiles; check() when all of them are done.
// Errors     Those of check().
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include <hoist/optim_cpu/update.hpp>
#include <hoist/zero/update/tile_pipeline.hpp>

namespace hoist::detail {

class StepUpdate {
 public:
  // `groups` as the schedule has them for `step`, which is counted from 1.
  StepUpdate(std::uint64_t step, std::span<const GroupOptions> groups, double gradient_scale, int rank);

  // Updates a tile with its gradient.
  void apply(const TileAccess& tile, const std::byte* gradient);
  // Has the device update the device-only units, and waits for it. Pre: nothing uses their weights.
  void run_on_device(const UnitTable& table, const Memory& memory, platform::Stream& stream);
  // Errors: Error naming a unit whose new state cannot be committed. Pre: all updates of the step are done.
  void check(const UnitTable& table, bool has_store) const;

 private:
  // Stochastic rounding draws by the parameter's place in its segment, so that every number of ranks draws alike. That
  // holds for segments of up to 2^32 elements: in a longer one, a tile that contains element 2^32 draws for all of its
  // elements with the upper half of its first element's index.
  optim::Rounding rounding(const TileAccess& tile) const;
  // Tiles of one segment that lie behind each other, all but the last of full length.
  void enqueue(UnitId unit, const Segment& segment, std::span<const tiers::Tile> tiles, const Memory& memory,
               platform::Stream& stream) const;

  std::uint64_t step_;
  std::uint64_t rank_;
  std::vector<std::uint64_t> seeds_;                     // by group
  std::vector<optim::UpdateCoefficients> coefficients_;  // by group
  std::atomic<std::uint32_t> broken_{~0u};               // a unit with a state that cannot be committed; ~0u: none
};

}  // namespace hoist::detail
