// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_options.hpp - the store that an engine's options describe.
//
// Threading  Pure function.
#pragma once

#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/layout/record_map.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

// `directory`: which of the stores below EngineOptions::store_directory. `trace` may be null.
tiers::StoreOptions store_options(const EngineOptions& options, const UnitTable& table, const RecordMap& records,
                                  int rank, const StoreDirectory& directory = {}, Trace* trace = nullptr);

}  // namespace hoist::detail
