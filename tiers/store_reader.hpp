// SPDX-License-Identifier: Apache-2.0
// tiers/store_reader.hpp - one rank's store, read-only: any one of its commits, verified, without continuing it.
//
// For tools, for ranks that take over another rank's state, and for what reads a commit while its process trains on: to
// copy it (Store::hold), or to verify it (Lock::none).
//
// Threading  One thread at a time per object.
// Memory     The record tables and one commit's image; kept as long as the object.
// Errors     StoreError (no such store or commit, other records, or a trainer holds the lock), StoreChangedError (the
//            commit was replaced since the caller looked), IoError, CorruptionError naming unit, file and offset.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tiers/store.hpp>

namespace hoist::tiers {

namespace detail {
struct HeldCommit;
}

class StoreReader {
 public:
  enum class Lock : std::uint8_t {
    shared,  // that of the data file, with other readers, while the object lives: no trainer moves the extents under it
    none,    // the extents can be written over as soon as a newer commit has landed on all ranks
  };
  // Nothing on disk is changed. `records` are those the store was made with (its layout text says which). `drives`:
  // directories in which further drives are looked for, in any order, besides those where they were when the store was
  // made.
  StoreReader(const std::string& directory, int rank, std::vector<StoreRecord> records, const CommitHeader& commit,
              aio::DriveQueue& queue, Lock lock = Lock::shared, std::span<const std::string> drives = {});
  explicit StoreReader(detail::HeldCommit commit);  // for Store::hold()
  ~StoreReader();
  StoreReader(const StoreReader&) = delete;
  StoreReader& operator=(const StoreReader&) = delete;

  // Reads tiles [first, first + count) of a record's region, contiguous as on disk, and verifies each.
  // Pre:  `target` is as long as the tiles and aligned for direct transfers.
  void read(RecordId record, Region region, std::uint32_t first, std::uint32_t count, std::span<std::byte> target);
  // The same, but what is wrong is returned, one error a tile, instead of thrown. IoError is thrown.
  std::vector<CorruptionError> check(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                                     std::span<std::byte> target);
  std::span<const std::byte> caller_state() const;
  // Equal for two commits of one store where the record is the same in both.
  std::uint64_t fingerprint(RecordId record) const;
  // The options of a store that can hold the same commits, with the same number, on one drive. Its directory is left
  // empty.
  StoreOptions options() const;
  std::uint64_t memory_bytes() const;  // its memory, for callers with a budget
  std::uint64_t bytes_read() const;    // from the drives so far, its tables included

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hoist::tiers
