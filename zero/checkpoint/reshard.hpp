// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/reshard.hpp - continuing with another number of ranks: a new store beside the old one takes over its
// state, and the old one is removed once the new one is committed everywhere. A crash at any moment leaves one of them
// whole.
//
// Threading  The program's thread.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>

namespace hoist::detail {

// Stores by StoreDirectory::order, which is 0 for the one in the offload directory itself.
struct StoreOrders {
  std::uint64_t first = 0, last = std::numeric_limits<std::uint64_t>::max();
};

// [J] Removes unfinished stores of these orders: no commit of such a store is on all ranks, and no rank has more than
// its first commit, so no caller was told of one. They must go before a new store is made there, because their files
// would be taken for parts of it. One whose other files may only be out of reach stays, if it is further than step
// `continued`, which every rank has. Errors: StoreError when another process uses one of them, or somebody may still
// want a file (tiers::Store::check_unfinished).
void remove_unfinished_stores(const RankAgreement& ranks, const EngineOptions& options, StoreOrders orders = {},
                              std::uint64_t continued = 0);

// [J] Removes the stores that `present` has replaced, and unfinished ones of any order above 0 (as above, beside the
// step of `present`), except those in `spared`; the log says which of these stay because somebody may still want a
// file. An older store stays if it is not whole, if somebody reads it (then until the next start), or if it has named
// checkpoints whose names no newer store has, and the newer stores have fewer than EngineOptions::keep_steps.
void remove_replaced_stores(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& present,
                            std::span<const StoreDirectory> spared);

}  // namespace hoist::detail
