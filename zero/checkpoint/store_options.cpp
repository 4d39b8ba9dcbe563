// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>
#include <hoist/zero/checkpoint/store_copy.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>

namespace hoist::detail {

tiers::StoreOptions store_options(const EngineOptions& options, const UnitTable& table, const RecordMap& records,
                                  int rank, const StoreDirectory& where, Trace* trace) {
  return {.directory = where.in(options.store_directory),
          .directory_key = options.uses_nvme() ? "nvme_path" : "hoist.checkpoint_path",
          .stripe_directories = where.in(options.stripe_directories),
          .identity = {.layout = table.identity(), .rank = rank, .world_size = table.world_size()},
          .records = records.records(),
          // With nothing on NVMe commits are explicit saves.
          .durability = options.uses_nvme() ? options.durability : tiers::Durability::step,
          .caller_state_bytes_max = options.caller_state_bytes_max + kCommitHeadBytes,
          .checkpoints_max = options.keep_steps,
          .held_commits_max = options.mirror.directory.empty() ? 0u : 1u,
          .lock_timeout = options.lock_timeout,
          .trace = trace};
}

StoreCost store_cost(const EngineOptions& options, const UnitTable& table, const RecordMap& records, int rank) {
  if (options.store_directory.empty()) return {};
  const tiers::Store::Cost store = tiers::Store::cost(store_options(options, table, records, rank));
  StoreCost cost{.memory_bytes = store.memory_bytes, .disk_bytes = store.disk_bytes};
  if (options.mirror.directory.empty()) return cost;
  const tiers::Store::Cost mirror = tiers::Store::cost(store_options(mirror_options(options), table, records, rank));
  cost.memory_bytes += kCopyBufferBytes + mirror.memory_bytes;
  cost.mirror_disk_bytes = mirror.disk_bytes;
  return cost;
}

EngineOptions mirror_options(const EngineOptions& options) {
  EngineOptions mirror = options;
  mirror.store_directory = options.mirror.directory;
  mirror.stripe_directories.clear();
  mirror.durability = tiers::Durability::step;
  mirror.keep_steps = 0;
  mirror.mirror = {};
  return mirror;
}

bool has_room(const EngineOptions& options, std::span<const std::byte> program_state) {
  return program_state.size() <= options.caller_state_bytes_max;
}

void require_room(const EngineOptions& options, std::span<const std::byte> program_state) {
  if (has_room(options, program_state)) return;
  throw UsageError(
      fmt::format("the caller state has {} bytes, and room was reserved for {}; raise hoist.caller_state_max "
                  "(EngineOptions::caller_state_bytes_max)",
                  program_state.size(), options.caller_state_bytes_max));
}

}  // namespace hoist::detail
