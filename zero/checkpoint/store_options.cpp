// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>
#include <hoist/zero/checkpoint/store_options.hpp>

namespace hoist::detail {

tiers::StoreOptions store_options(const EngineOptions& options, const UnitTable& table, const RecordMap& records,
                                  int rank, const StoreDirectory& where, Trace* trace) {
  const bool nvme = options.parameters == Placement::nvme || options.optimizer == Placement::nvme;
  std::vector<std::string> stripes;
  for (const std::string& directory : options.stripe_directories) stripes.push_back(where.in(directory));
  return {.directory = where.in(options.store_directory),
          .stripe_directories = std::move(stripes),
          .identity = {.layout = table.identity(), .rank = rank, .world_size = table.world_size()},
          .records = records.records(),
          .durability = nvme ? options.durability : tiers::Durability::step,  // without, commits are explicit saves
          .caller_state_bytes_max = options.caller_state_bytes_max + kCommitHeadBytes,
          .kept_steps_max = options.keep_steps,
          .lock_timeout = options.lock_timeout,
          .trace = trace};
}

void require_room(const EngineOptions& options, std::span<const std::byte> program_state) {
  if (program_state.size() <= options.caller_state_bytes_max) return;
  throw UsageError(
      fmt::format("the caller state has {} bytes; at most {} were reserved (EngineOptions::caller_state_bytes_max)",
                  program_state.size(), options.caller_state_bytes_max));
}

}  // namespace hoist::detail
