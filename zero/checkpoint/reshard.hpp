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

// [J] Removes stores of these orders that an earlier attempt did not finish: no commit of theirs is on all ranks, and
// no rank has more than the first one. Nothing of them was promised; a store of any number of ranks may take their
// place, and none may be made beside their files, which would be taken for parts of it. Errors: StoreError when another
// process uses one of them, or somebody may still want a file (tiers::Store::check_unfinished).
void remove_unfinished_stores(const RankAgreement& ranks, const EngineOptions& options, StoreOrders orders = {});

// [J] Removes stores that `present` has taken over from, but those that are `spared`. A store stays if it keeps named
// steps that newer ones do not have, and those have fewer than EngineOptions::keep_steps; if it is not whole; and,
// until the next start, if somebody reads it.
void remove_older_stores(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& present,
                         std::span<const StoreDirectory> spared);

}  // namespace hoist::detail
