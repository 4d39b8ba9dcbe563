// SPDX-License-Identifier: Apache-2.0
// aio/unaligned.hpp - reads and writes of any offset, length and address, for callers that cannot align to 4 KiB.
//
// Aligned parts go directly between the drive and the caller's memory; the rest is copied through bounce buffers,
// and a write of part of a sector reads that sector first. Slower than DriveQueue, by a copy and up to two small reads.
//
// Threading  Any thread. Copies run on the queue's I/O thread.
// Memory     Bounce buffers of `bounce_bytes` in all, taken at construction; transfers without a free buffer wait, in
//            order, foreground first. A transfer borrows its memory and its file until its completion is done.
// Errors     IoError as of DriveQueue, with the offsets of whole sectors. A read past the end of the file: code 0.
// Main path  read -> plan_unaligned -> pieces -> StripedFile -> copy -> Completion.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <hoist/aio/striped_file.hpp>

namespace hoist::aio {

struct UnalignedOptions {
  std::uint64_t bounce_bytes = 16 * kMiB;  // at least 4 KiB; rounded down to whole pieces
  std::uint64_t piece_bytes = kMiB;        // a bounced transfer is cut into these; a multiple of 4 KiB
};

// Pre: all files are on one DriveQueue. When it gives its drive up, a late answer may still write to a bounce buffer;
// every later transfer fails then, so no caller gets those bytes.
class Unaligned {
 public:
  // Errors: UsageError for options out of range.
  explicit Unaligned(const UnalignedOptions& options = {});
  // Started transfers continue; the bounce buffers live until the last has ended.
  ~Unaligned();
  Unaligned(const Unaligned&) = delete;
  Unaligned& operator=(const Unaligned&) = delete;

  Completion read(StripedFile& file, std::uint64_t offset_bytes, std::span<std::byte> target, Priority priority);
  // Writes through one Unaligned may share a sector; sectors at the ends of a write must not be written at the same
  // time by anything else. A write past the end of a file makes it longer, to the next multiple of 4 KiB.
  Completion write(StripedFile& file, std::uint64_t offset_bytes, std::span<const std::byte> source, Priority priority);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace hoist::aio
