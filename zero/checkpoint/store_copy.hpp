// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_copy.hpp - copies one rank's commit, verified, into a store in another directory.
//
// Threading  One thread at a time.
// Memory     Two buffers of a few MiB, and the tables of the new store.
// Errors     CorruptionError naming what of the source is damaged, StoreError when the destination holds something
//            else, BudgetError when it has too little space, IoError. The destination has no commit then.
// Main path  copy_commit -> Store::create -> read (verified), checksum, write -> commit.
#pragma once

#include <cstdint>
#include <functional>

#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_reader.hpp>

namespace hoist::detail {

// Called with the bytes that were copied since the last call.
using CopyProgress = std::function<void(std::uint64_t bytes)>;

// `target`: the store to be made, as StoreReader::options() describes one that can hold the same, with its directories.
// Its commit is of the same step and has the same caller state. Where that commit is already, the two are compared
// instead. Returns whether anything was copied.
bool copy_commit(tiers::StoreReader& source, const tiers::StoreOptions& target, std::uint64_t step,
                 const CopyProgress& progress);

}  // namespace hoist::detail
