// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/comm/agreement.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/ranks/common_options.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>

namespace hoist::detail {

namespace {

std::string text_of(const LossScaleOptions& scale) {
  const auto& [dynamic, first, window, hysteresis, consecutive_hysteresis, scale_min] = scale;
  if (!dynamic) return fmt::format("{}", first);
  return fmt::format("dynamic from {} up after {}, hysteresis {}{}, at least {}", first, window, hysteresis,
                     consecutive_hysteresis ? " in a row" : "", scale_min);
}

}  // namespace

// Names every member, so that a new one does not compile before somebody has thought about it.
std::vector<CommonOption> common_options(const EngineOptions& engine, const RuntimeOptions& runtime,
                                         std::span<const GroupOptions> groups) {
  const auto& [stage, parameters, optimizer, optimizer_pinned_fraction, parameters_pinned_fraction,
               parameters_pinned_elements_max, gradient_spill_units, optimizer_offload_ratio, store_directory,
               stripe_directories, durability, commit_every, keep_steps, mirror, caller_state_bytes_max, lock_timeout,
               micro_batches_max, micro_batch_order, update_mode, sub_group_elements, update_buffer_count,
               staging_buffer_count, prefetch_elements, live_elements_max, reuse_distance_elements,
               persistence_elements, secondary_shard_ranks, metrics_path, gradient_clipping, gradients_are_reduced,
               weights_dtype, loss_scale, optimizer_defaults, learning_rate_schedule] = engine;
  // Each rank has its own memory and drives: they decide how much of its shard is where, and how large the pieces are
  // that it moves at a time, which changes neither a bit nor what other ranks do.
  static_cast<void>(optimizer_pinned_fraction), static_cast<void>(parameters_pinned_fraction);
  static_cast<void>(parameters_pinned_elements_max), static_cast<void>(gradient_spill_units),
      static_cast<void>(stripe_directories);
  static_cast<void>(lock_timeout);
  static_cast<void>(sub_group_elements), static_cast<void>(update_buffer_count);
  static_cast<void>(staging_buffer_count);
  // Each rank's program saves state of its own. Every call that takes it tells all ranks when one is too long.
  static_cast<void>(caller_state_bytes_max);
  static_cast<void>(metrics_path);   // rank 0 writes
  static_cast<void>(weights_dtype);  // what comes of it is part of the model, which is compared
  // May change from step to step, and are compared at each (StepSettings::hash).
  static_cast<void>(gradient_clipping), static_cast<void>(optimizer_defaults),
      static_cast<void>(learning_rate_schedule);

  std::vector<double> accumulators;  // of groups, what only Engine::create() looks at
  for (const GroupOptions& group : groups) accumulators.push_back(group.initial_accumulator);
  return {{"parameter groups", fmt::to_string(groups.size())},
          {"zero_optimization.stage", fmt::to_string(stage)},
          {"zero_optimization.offload_param.device", placement_key(parameters)},
          {"zero_optimization.offload_optimizer.device", placement_key(optimizer)},
          {"zero_optimization.offload_optimizer.ratio", fmt::to_string(optimizer_offload_ratio)},
          {"zero_optimization.offload_optimizer.nvme_path", store_directory.empty() ? "no store" : "a store"},
          {"hoist.durability",
           durability == tiers::Durability::none ? "none" : "a commit every " + counted(commit_every, "step")},
          {"hoist.keep_steps", fmt::to_string(keep_steps)},
          {"hoist.mirror.every", mirror.directory.empty() ? "no mirror" : fmt::to_string(mirror.every)},
          {"gradient_accumulation_steps", fmt::to_string(micro_batches_max)},
          {"hoist.micro_batch_order", micro_batch_order == MicroBatchOrder::vertical ? "vertical" : "horizontal"},
          {"hoist.update_mode", update_mode_name(engine.resolved_update_mode())},
          {"zero_optimization.stage3_prefetch_bucket_size", fmt::to_string(prefetch_elements)},
          {"zero_optimization.stage3_max_live_parameters", fmt::to_string(live_elements_max)},
          {"zero_optimization.stage3_max_reuse_distance", fmt::to_string(reuse_distance_elements)},
          {"zero_optimization.stage3_param_persistence_threshold", fmt::to_string(persistence_elements)},
          {"zero_optimization.zero_hpz_partition_size", fmt::to_string(secondary_shard_ranks)},
          {"EngineOptions::gradients_are_reduced", fmt::to_string(gradients_are_reduced)},
          {"fp16.loss_scale", text_of(loss_scale)},
          {"optimizer.params.initial_accumulator_value", fmt::format("{}", fmt::join(accumulators, ", "))},
          {"hoist.comm_scratch", fmt::to_string(runtime.comm_scratch_bytes)}};
}

void agree_on_options(comm::Communicator& ranks, std::span<const CommonOption> options) {
  std::vector<std::uint64_t> mine;
  for (const CommonOption& option : options) mine.push_back(text_hash(option.value));
  const auto size = static_cast<std::size_t>(ranks.size());
  std::vector<std::uint64_t> all(size * mine.size());
  ranks.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (std::size_t o = 0; o < options.size(); ++o) {
    for (std::size_t rank = 1; rank < size; ++rank) {
      if (all[rank * mine.size() + o] != all[o])  // seen by every rank, so that all of them come here
        comm::agree(ranks, mine[o], fmt::format("{} = {}", options[o].key, options[o].value));
    }
  }
}

}  // namespace hoist::detail
