// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/predict/step_bytes.hpp>

namespace hoist::detail {

namespace {

std::uint64_t tiles_from(std::uint64_t first, const tiers::EqualTiles& run) {
  return run.end_tile() - std::clamp(first, run.first_tile, run.end_tile());
}

// Counts the elements alone, without what fills the last tile of a segment up. Full tiles are whole pages, except those
// of one moment of fp8, which move the rest of the page with every step.
std::uint64_t state_bytes(const Unit& unit, std::uint64_t first_tile) {
  std::uint64_t bytes = 0;
  for (const tiers::EqualTiles& run : unit.trainable.equal_tiles()) {
    const std::uint64_t tiles = tiles_from(first_tile, run);
    const bool full = run.elements == tiers::kTileElements;
    bytes += tiles * (full ? run.s_bytes : unit.segments[run.segment].record().state_bytes(run.elements));
  }
  return bytes;
}

// The same for weights. `made`: those of segments whose update makes them.
struct WeightBytes {
  std::uint64_t all = 0, made = 0;
};
WeightBytes weight_bytes(const tiers::RecordLayout& layout, std::uint64_t first_tile) {
  WeightBytes bytes;
  for (const tiers::EqualTiles& run : layout.equal_tiles()) {
    const DType dtype = layout.segments()[run.segment].dtype;
    const std::uint64_t run_bytes = tiles_from(first_tile, run) * run.elements * dtype_bytes(dtype);
    bytes.all += run_bytes;
    if (update_makes_weights(dtype)) bytes.made += run_bytes;
  }
  return bytes;
}

// This rank's shards, in the type in which they come down or are added up.
std::uint64_t gradient_bytes(const Unit& unit) {
  std::uint64_t bytes = 0;
  for (const Segment& segment : unit.trainable_segments())
    bytes += segment.shard_elements * dtype_bytes(segment.gradient_shard_dtype);
  return bytes;
}

// The mean of several steps, for one unit after the other: together exactly the mean of all.
class StepMean {
 public:
  explicit StepMean(std::uint64_t steps) : steps_(steps) {}
  std::uint64_t add(std::uint64_t bytes) {
    const std::uint64_t before = bytes_ / steps_;
    bytes_ += bytes;
    return bytes_ / steps_ - before;
  }

 private:
  std::uint64_t steps_;
  std::uint64_t bytes_ = 0;
};

}  // namespace

std::vector<UnitStep> unit_steps(const EngineOptions& options, const UnitRegions& units,
                                 std::span<const std::uint32_t> fetches) {
  const UnitTable& table = units.table();
  const bool weights_on_device = options.parameters == Placement::device;
  const bool commits_resident = writes_resident_state(options, /*committed=*/true);
  const auto others = static_cast<std::uint64_t>(table.world_size() - 1);
  const auto peers_in_group = static_cast<std::uint64_t>(gathering_group(options, table.world_size()) - 1);
  const std::uint64_t passes = passes_of_a_step(options);
  StepMean written_by_commits(options.commit_every), brought_down_by_commits(options.commit_every);
  std::vector<UnitStep> steps(table.units().size());
  for (std::uint32_t u = 0; u < table.units().size(); ++u) {
    const Unit& unit = table.units()[u];
    UnitStep& step = steps[u];
    const UnitPlacement& placement = units.unit(UnitId{u});
    const std::uint64_t trainable = weight_bytes(unit.trainable, 0).all;
    const std::uint64_t weights = trainable + weight_bytes(unit.frozen, 0).all;
    // The bytes that are on NVMe only, and those of them that an update does not read.
    const auto [stored_trainable, made] = weight_bytes(unit.trainable, placement.weight_tiles);
    const std::uint64_t stored_weights = stored_trainable + weight_bytes(unit.frozen, placement.frozen_tiles).all;
    const std::uint64_t state = state_bytes(unit, /*first_tile=*/0);
    const std::uint64_t streamed = state_bytes(unit, placement.state_tiles);
    const bool state_on_device = placement.state_on_device;
    // Units that stay gathered are fetched once after each step, whatever passes there are.
    const bool stays = placement.stays_gathered;
    const std::uint64_t count = stays ? std::min(fetches[u], 1u) : passes * fetches[u];
    const std::uint64_t forward = stays ? count : passes * std::min(fetches[u], 1u);
    // With a secondary shard, only the first fetch after an update comes from the unit's weights and from all ranks.
    const std::uint64_t secondary_bytes = placement.region(MemoryRole::secondary_shard).bytes;
    const auto fetch = [&](StepBytes& phase, std::uint64_t whole, std::uint64_t in_group) {
      phase.nvme_read += whole * stored_weights;
      if (!weights_on_device) phase.host_to_device += whole * weights + in_group * secondary_bytes;
      const std::uint64_t group_bytes = peers_in_group * in_group * secondary_bytes;
      phase.wire += others * whole * weights + group_bytes;
      phase.wire_in_group += group_bytes;
    };
    const std::uint64_t in_group = secondary_bytes > 0 && count > 0 ? count - 1 : 0;
    const std::uint64_t forward_in_group = std::min(in_group, forward > 0 ? forward - 1 : 0);
    const std::uint64_t backward_in_group = in_group - forward_in_group;
    fetch(step.forward_fetch, forward - forward_in_group, forward_in_group);
    fetch(step.backward_fetch, count - forward - backward_in_group, backward_in_group);
    if (!weights_on_device && in_group > 0) step.forward_fetch.device_to_host += secondary_bytes;
    if (!state_on_device && weights_on_device) step.forward_fetch.host_to_device += weights;  // once after each update
    if (!state_on_device) step.gradient.device_to_host += passes * trainable;
    if (placement.gradient_spilled) {
      const std::uint64_t spilled = gradient_bytes(unit);
      step.gradient.nvme_write = passes * spilled;
      step.gradient.nvme_read = (passes - 1) * spilled;  // the sums so far
      step.update.nvme_read = spilled;
    }
    if (!options.gradients_are_reduced) step.gradient.wire += others * passes * trainable;
    // Under the next forward, the first fetch takes its weights from the update, which has read, or made, them already.
    const bool shared = updates_under_forward(options) && count > 0;
    if (shared) step.forward_fetch.nvme_read -= made;
    step.update.nvme_read += (shared ? 0 : stored_trainable - made) + streamed;
    const std::uint64_t on_nvme = stored_trainable + streamed;
    const std::uint64_t committed = commits_resident ? trainable + state : on_nvme;
    step.resident_write_bytes = written_by_commits.add(committed - on_nvme);
    step.update.nvme_write += on_nvme + step.resident_write_bytes;
    if (commits_resident && placement.device_only)
      step.update.device_to_host = brought_down_by_commits.add(trainable + state);
  }
  return steps;
}

StepBytes sum_of(std::span<const UnitStep> steps) {
  StepBytes sum;
  for (const UnitStep& step : steps)
    for (const StepBytes& part : {step.forward_fetch, step.backward_fetch, step.gradient, step.update}) sum += part;
  return sum;
}

}  // namespace hoist::detail
