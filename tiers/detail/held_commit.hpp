// SPDX-License-Identifier: Apache-2.0
// tiers/detail/held_commit.hpp - the parts of an open store that a StoreReader of a held commit reads.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <hoist/aio/striped_file.hpp>
#include <hoist/tiers/detail/record_table.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/tiers/store_format.hpp>

namespace hoist::tiers::detail {

struct HeldCommit {
  const Superblock& superblock;
  std::string directory;
  std::vector<StoreRecord> records;
  CommitHeader commit;
  aio::DriveQueue& queue;  // of the manifest
  aio::StripedFile& data;
  std::function<void()> release;  // called once, at the reader's end
};

// Memory of the reader.
inline std::uint64_t held_commit_bytes(std::span<const StoreRecord> records, const Superblock& superblock) {
  return RecordTable::memory_bytes(records, Durability::step, superblock.extents_per_record) + superblock.slot_bytes() +
         superblock.layout.size() + superblock.caller_state_bytes_max;
}

}  // namespace hoist::tiers::detail
