// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_options.hpp - the store that an engine's options describe.
//
// Threading  Pure function.
#pragma once

#include <cstddef>
#include <span>

#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

// `directory`: which of the stores below EngineOptions::store_directory. `trace` may be null.
tiers::StoreOptions store_options(const EngineOptions& options, const UnitTable& table, const RecordMap& records,
                                  int rank, const StoreDirectory& directory = {}, Trace* trace = nullptr);

// What a store takes of memory, with its mirror if there is one, and of the space on the drives of each.
struct StoreCost {
  std::uint64_t memory_bytes = 0;
  std::uint64_t disk_bytes = 0;
  std::uint64_t mirror_disk_bytes = 0;
};
StoreCost store_cost(const EngineOptions& options, const UnitTable& table, const RecordMap& records, int rank);

// The options of the mirror, which is found, made and opened like a store of its own.
EngineOptions mirror_options(const EngineOptions& options);

// Whether a program's state fits EngineOptions::caller_state_bytes_max.
bool has_room(const EngineOptions& options, std::span<const std::byte> program_state);
// The same as a refusal. Errors: UsageError.
void require_room(const EngineOptions& options, std::span<const std::byte> program_state);

}  // namespace hoist::detail
