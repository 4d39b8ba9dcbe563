// SPDX-License-Identifier: Apache-2.0
// aio/striped_file.hpp - one logical file over one or several drives, without RAID.
//
// Each drive has its own DriveQueue with its I/O thread and counters, so a slow drive delays only its own data.
//
// Threading  Any thread may start transfers.
// Memory     Owns its files and borrows the queues, which must outlive it. Neither it nor a buffer may be destroyed
//            while a transfer is in flight.
// Errors     A transfer ends when its parts on all drives have, with the IoError of the first drive (in their order)
//            that failed: the path is that drive's, the offset the one in its file.
// Main path  read -> one range for each drive -> DriveQueue -> when_all.
#pragma once

#include <string>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/aio/stripe_layout.hpp>

namespace hoist::aio {

struct StripeDrive {
  DriveQueue* queue = nullptr;
  File file;
};

class StripedFile {
 public:
  // Pre: one drive for each weight of the layout, in the same order.
  StripedFile(StripeLayout layout, std::vector<StripeDrive> drives);
  StripedFile(DriveQueue& queue, File file);  // on one drive
  StripedFile(const StripedFile&) = delete;
  StripedFile& operator=(const StripedFile&) = delete;

  // As in DriveQueue, with offsets in the logical file.
  // Cost: on one drive, that of DriveQueue::read. On several, one transfer for each drive that the range touches and
  //       one joint completion, however many units there are.
  Completion read(std::uint64_t offset_bytes, std::span<std::byte> target, Priority priority);
  Completion write(std::uint64_t offset_bytes, std::span<const std::byte> source, Priority priority);
  // A read of which only the first `needed_bytes` must exist: bytes past the end of the file read as zeros.
  Completion read_padded(std::uint64_t offset_bytes, std::span<std::byte> target, std::uint64_t needed_bytes,
                         Priority priority);
  // fdatasync of every drive's file, under the rule of DriveQueue::sync.
  Completion sync();

  // Whether the queue of a drive has given it up.
  bool gave_up() const;

  const StripeLayout& layout() const { return layout_; }
  const File& file(unsigned drive) const { return drives_[drive].file; }
  std::vector<std::string> data_paths() const;

 private:
  Completion start(Operation operation, std::uint64_t offset_bytes, std::span<std::byte> memory,
                   std::uint64_t needed_bytes, Priority priority);

  const StripeLayout layout_;
  std::vector<StripeDrive> drives_;  // their addresses are stable: transfers in flight refer to the files
};

}  // namespace hoist::aio
