// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/reshard.hpp - continuing with another number of ranks: a new store beside the old one takes over its
// state, and the old one is removed once the new one is committed everywhere. A crash at any moment leaves one of them
// whole.
//
// Threading  The program's thread.
#pragma once

#include <cstdint>

#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>

namespace hoist::detail {

// [J] Removes stores of order `first` and later that an earlier attempt did not finish. Errors: StoreError when another
// process uses one of them.
void remove_unfinished_stores(const RankAgreement& ranks, const EngineOptions& options, std::uint64_t first);

// [J] Removes the store in the offload directory itself if another number of ranks made it and never committed: its
// files would be taken for parts of the new one. Errors: StoreError when another process is making it.
void remove_never_committed(const RankAgreement& ranks, const EngineOptions& options);

// [J] Removes stores that `present` has taken over from, but those that are `spared`. A store stays if it keeps named
// steps that newer ones do not have, and those have fewer than EngineOptions::keep_steps; if it is not whole; and,
// until the next start, if somebody reads it.
void remove_older_stores(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& present,
                         std::span<const StoreDirectory> spared);

}  // namespace hoist::detail
