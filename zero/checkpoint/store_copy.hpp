// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_copy.hpp - copies one rank's commit, verified, into a store in another directory: all of it, or
// the records that a mirror does not have yet.
//
// Threading  One thread at a time.
// Memory     Two buffers of a few MiB, and the tables of the new store.
// Errors     CorruptionError naming what of the source is damaged, StoreError when the destination holds something
//            else, UsageError when that is this run at another step, or this commit on other drives, BudgetError when
//            it has too little space, IoError. Nothing was committed in the destination then.
// Main path  copy_commit -> Store::create -> read (verified), checksum, write -> commit.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_reader.hpp>
#include <hoist/zero/layout/record_pieces.hpp>

namespace hoist::detail {

// The two buffers of a copy: it reads into one while it writes the other.
inline constexpr std::uint64_t kCopyBufferBytes = 2 * kPieceBytesMax;

// Called with the bytes that were copied since the last call. An exception from it ends the copy.
using CopyProgress = std::function<void(std::uint64_t bytes)>;

// Writes records of the commit, those for which `wanted` is true, into the open step of `target`, a store with the same
// records. All writes have ended when it returns or throws.
void copy_records(tiers::StoreReader& source, tiers::Store& target, std::span<const tiers::StoreRecord> records,
                  const std::function<bool(tiers::RecordId)>& wanted, const CopyProgress& progress);

// `target`: the store to be made, as StoreReader::options() describes one that can hold the same, with its directories.
// Its commit is of the same step and has the same caller state. Where that commit is already, the two are compared
// instead. Returns whether anything was copied.
bool copy_commit(tiers::StoreReader& source, const tiers::StoreOptions& target, std::uint64_t step,
                 const CopyProgress& progress);

}  // namespace hoist::detail
