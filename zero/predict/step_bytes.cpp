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

// Whole fetches come from the unit's weights and all ranks, those in a group from its secondary shards.
struct FetchCounts {
  std::uint64_t whole = 0, in_group = 0;
};
struct StepFetches {
  FetchCounts forward, backward;
};

// The fetches in a step of a unit that each pass fetches `fetches` times. A unit that stays gathered is fetched once
// after each step, whatever passes there are. With a secondary shard, only the first fetch after an update is a whole
// one.
StepFetches step_fetches(const UnitPlacement& placement, std::uint64_t fetches, std::uint64_t passes) {
  const std::uint64_t forward_in_pass = std::min(fetches, std::uint64_t{1});
  if (placement.stays_gathered) {
    passes = 1;
    fetches = forward_in_pass;
  }
  const std::uint64_t all = passes * fetches, forward = passes * forward_in_pass, backward = all - forward;
  if (placement.region(MemoryRole::secondary_shard).bytes == 0 || all == 0) return {{forward, 0}, {backward, 0}};
  return {{1, forward - 1}, {0, backward}};
}

// What a step moves for one unit.
class UnitFormula {
 public:
  UnitFormula(const EngineOptions& options, const UnitRegions& units, UnitId id, std::uint32_t fetches)
      : options_(options),
        placement_(units.unit(id)),
        weights_on_device_(options.parameters == Placement::device),
        other_ranks_(static_cast<std::uint64_t>(units.table().world_size() - 1)),
        peers_in_group_(static_cast<std::uint64_t>(gathering_group(options, units.table().world_size()) - 1)),
        passes_(passes_of_a_step(options)),
        fetches_(step_fetches(placement_, fetches, passes_)) {
    const Unit& unit = units.table().unit(id);
    trainable_ = weight_bytes(unit.trainable, 0).all;
    weights_ = trainable_ + weight_bytes(unit.frozen, 0).all;
    stored_ = weight_bytes(unit.trainable, placement_.weight_tiles);
    stored_frozen_ = weight_bytes(unit.frozen, placement_.frozen_tiles).all;
    secondary_ = placement_.region(MemoryRole::secondary_shard).bytes;
    state_ = state_bytes(unit, /*first_tile=*/0);
    stored_state_ = state_bytes(unit, placement_.state_tiles);
    spilled_ = placement_.gradient_spilled ? gradient_bytes(unit) : 0;
    update_feeds_fetch_ = updates_under_forward(options) && fetches > 0;
  }

  StepBytes forward_fetch() const {
    StepBytes bytes = fetch(fetches_.forward);
    const bool keeps_secondary = fetches_.forward.in_group + fetches_.backward.in_group > 0;
    if (keeps_secondary && !weights_on_device_) bytes.device_to_host += secondary_;
    if (!placement_.state_on_device && weights_on_device_) bytes.host_to_device += weights_;  // once after each update
    if (update_feeds_fetch_) bytes.nvme_read -= stored_.made;
    return bytes;
  }

  StepBytes backward_fetch() const { return fetch(fetches_.backward); }

  StepBytes gradient() const {
    StepBytes bytes;
    if (!placement_.state_on_device) bytes.device_to_host = passes_ * trainable_;
    if (!options_.gradients_are_reduced) bytes.wire = other_ranks_ * passes_ * trainable_;
    bytes.nvme_write = passes_ * spilled_;
    bytes.nvme_read = (passes_ - 1) * spilled_;  // the sums so far
    return bytes;
  }

  // Without what a commit writes from memory.
  StepBytes update() const {
    StepBytes bytes;
    bytes.nvme_read = spilled_ + stored_state_ + (update_feeds_fetch_ ? 0 : stored_.all - stored_.made);
    bytes.nvme_write = stored_.all + stored_state_;
    return bytes;
  }

  std::uint64_t record_bytes() const { return trainable_ + state_; }

 private:
  StepBytes fetch(const FetchCounts& count) const {
    StepBytes bytes;
    bytes.nvme_read = count.whole * (stored_.all + stored_frozen_);
    if (!weights_on_device_) bytes.host_to_device = count.whole * weights_ + count.in_group * secondary_;
    bytes.wire_in_group = peers_in_group_ * count.in_group * secondary_;
    bytes.wire = other_ranks_ * count.whole * weights_ + bytes.wire_in_group;
    return bytes;
  }

  const EngineOptions& options_;
  const UnitPlacement& placement_;
  const bool weights_on_device_;
  const std::uint64_t other_ranks_, peers_in_group_, passes_;
  const StepFetches fetches_;
  std::uint64_t trainable_ = 0, weights_ = 0, secondary_ = 0;  // of weights
  WeightBytes stored_;                                         // trainable ones that are on NVMe only
  std::uint64_t stored_frozen_ = 0;
  std::uint64_t state_ = 0, stored_state_ = 0;
  std::uint64_t spilled_ = 0;
  // Under the next forward, the first fetch takes its weights from the update, which has read, or made, them already.
  bool update_feeds_fetch_ = false;
};

}  // namespace

std::vector<UnitStep> unit_steps(const EngineOptions& options, const UnitRegions& units,
                                 std::span<const std::uint32_t> fetches) {
  const bool commits_resident = options.commits_steps();
  StepMean written_by_commits(options.commit_every), brought_down_by_commits(options.commit_every);
  std::vector<UnitStep> steps;
  for (std::uint32_t u = 0; u < units.table().units().size(); ++u) {
    const UnitFormula unit(options, units, UnitId{u}, fetches[u]);
    UnitStep& step = steps.emplace_back(UnitStep{.forward_fetch = unit.forward_fetch(),
                                                 .backward_fetch = unit.backward_fetch(),
                                                 .gradient = unit.gradient(),
                                                 .update = unit.update()});
    if (!commits_resident) continue;
    step.resident_write_bytes = written_by_commits.add(unit.record_bytes() - step.update.nvme_write);
    step.update.nvme_write += step.resident_write_bytes;
    if (units.unit(UnitId{u}).device_only)
      step.update.device_to_host = brought_down_by_commits.add(unit.record_bytes());
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
