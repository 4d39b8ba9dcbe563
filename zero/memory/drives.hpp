// SPDX-License-Identifier: Apache-2.0
// zero/memory/drives.hpp - the drives of a store: for each directory an aio::DriveQueue, which has a thread of its own.
//
// Threading  Constant after construction; stats from any thread.
// Memory     The queues borrow the pinned memory, which must outlive this. It is quarantined if a drive gave up.
// Errors     As aio::DriveQueue; IoError from measuring.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

// The directory itself or, if it does not exist yet, the closest one above it that does: callers ask about the drive
// that a store will be on.
std::string existing_part(const std::string& directory);

// The queue for transfers of a directory's drive. `registered_memory`: may be empty.
std::unique_ptr<aio::DriveQueue> make_drive_queue(const RuntimeOptions& runtime, const std::string& directory,
                                                  const std::vector<std::span<std::byte>>& registered_memory);

// The NUMA nodes of a store's staging buffers: what the runtime's options say, or the node of its drives. Empty: those
// of the rest of pinned memory.
std::vector<int> staging_nodes(const RuntimeOptions& runtime, const EngineOptions& options);

class Drives {
 public:
  Drives(const RuntimeOptions& runtime, const EngineOptions& options, Memory& memory);
  ~Drives();
  Drives(const Drives&) = delete;
  Drives& operator=(const Drives&) = delete;

  std::vector<aio::DriveQueue*> queues() const;
  // Each drive's share of a new store. Measured, for about a second, when there are several; a drive with no room for
  // that counts like the others.
  std::vector<std::uint32_t> measured_weights() const;
  // Bytes are summed over all drives; busy is that of the busiest drive.
  aio::DriveQueue::Stats stats() const;
  // Bytes that are outside of steps in any case, since the beginning: what a mirror has read, and saves have written.
  struct OutsideBytes {
    std::uint64_t read = 0, written = 0;
  };
  // Tells the ledger what the drives have moved since the last call: as work of steps, or outside of them.
  void count_into(Ledger& ledger, bool in_steps, const OutsideBytes& outside);
  std::string describe() const;

 private:
  Memory& memory_;
  std::vector<std::string> directories_;
  std::vector<std::unique_ptr<aio::DriveQueue>> queues_;
  aio::DriveQueue::Stats counted_{};
  OutsideBytes counted_outside_;
};

}  // namespace hoist::detail
