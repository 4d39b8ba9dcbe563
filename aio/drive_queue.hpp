// SPDX-License-Identifier: Apache-2.0
// aio/drive_queue.hpp - many direct reads and writes in flight on a drive. Start here.
//
// Threading  Any thread may submit and wait. Each queue has one I/O thread, on the processors that its options name;
//            continuations of completions run on it and must neither block nor destroy the queue.
// Memory     Queues are sized at construction and grow only when more transfers wait than ever before. A transfer
//            borrows its buffer until its completion is done.
// Errors     A failed transfer fails its completion with IoError{operation, path, offset, length, errno} after bounded
//            retries (EINTR, EAGAIN, short transfers). A read past the end of the file is short: code 0. Misalignment
//            is a bug.
// Main path  read -> blocks -> backend -> result checked against length -> Completion.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <hoist/aio/backend.hpp>
#include <hoist/aio/backend_kind.hpp>
#include <hoist/aio/file.hpp>
#include <hoist/core/completion.hpp>

namespace hoist::aio {

namespace detail {
struct Request;
}

struct DriveQueueOptions {
  BackendKind backend = BackendKind::automatic;
  std::uint64_t block_bytes = kMiB;  // a transfer is cut into blocks of this; a multiple of 4 KiB, at most 1 GiB
  unsigned queue_depth = 16;         // blocks in flight, 1 to 4096
  unsigned thread_count = 4;         // of the `threads` backend only, 1 to 256
  std::vector<int> cpus{};           // processors, OS numbers, where the I/O thread runs; empty: anywhere
  // Memory for transfers, registered with the kernel if it allows that; pieces of at most 1 GiB. Transfers outside of
  // it work too, slightly slower.
  std::vector<std::span<std::byte>> registered_memory{};
  unsigned retries_max = 8;  // per block, for EINTR, EAGAIN and short transfers; then the error is delivered
  // Destructor: the longest time without an answer of the drive; then its transfers fail.
  Nanoseconds drain_timeout = std::chrono::seconds(30);
  // A drive that has blocks and finishes none for this long is given up: every transfer fails with ETIMEDOUT from then
  // on. Linux gives a command of an NVMe drive 30 s before it resets the drive, and retries a few times, so a working
  // drive answers earlier. Time in which this process was stopped does not count, here and above (core/deadline.hpp).
  Nanoseconds answer_timeout = std::chrono::minutes(5);
};

// Foreground: someone waits for it (a prefetch, a record to update). Background: write-back that makes room. Commit:
// write-back that only a commit waits for. The rule: a foreground read never waits behind more than one queue depth of
// other transfers. Blocks that the kernel already has are not recalled; every free place goes to a foreground block as
// long as there is one, then to a background block. Within a priority, first come, first served. The last priority may
// get nothing as long as the others are busy.
enum class Priority : std::uint8_t { foreground, background, commit };
inline constexpr std::size_t kPriorityCount = 3;

// The backend that DriveQueue(options) uses, for tests that wrap it.
// Errors: Error if io_uring is requested by name and not available.
std::unique_ptr<Backend> make_backend(const DriveQueueOptions& options);

class DriveQueue {
 public:
  // Errors: UsageError for options out of range.
  explicit DriveQueue(const DriveQueueOptions& options);
  // With the caller's own backend (fault injection in tests); null: that of the options.
  DriveQueue(const DriveQueueOptions& options, std::unique_ptr<Backend> backend);
  // Finishes every started transfer. Transfers that the drive does not answer within `drain_timeout` fail with
  // ETIMEDOUT; the kernel may still write to those buffers, so their owner must never use them again. The queue leaks
  // its own part of them, with a line in the log. If the I/O thread itself is stuck, in the kernel or in a
  // continuation, it is left behind in the same way, and the completions of its transfers are never done.
  ~DriveQueue();
  DriveQueue(const DriveQueue&) = delete;
  DriveQueue& operator=(const DriveQueue&) = delete;

  // Starts reading target.size() bytes of `file` at `offset_bytes`.
  // Pre:  offset, length and address are multiples of File::kAlignment; `file` outlives the transfer.
  // Cost: never blocks; a system call on this thread only to wake an idle I/O thread.
  Completion read(const File& file, std::uint64_t offset_bytes, std::span<std::byte> target, Priority priority);
  Completion write(const File& file, std::uint64_t offset_bytes, std::span<const std::byte> source, Priority priority);
  // fdatasync, ordered after every write of `file` whose completion was done before this call. Never retried: after a
  // failed flush the kernel may have dropped the dirty pages, and a second call would lie.
  Completion sync(const File& file);

  struct Stats {
    std::uint64_t read_bytes = 0;     // delivered
    std::uint64_t written_bytes = 0;  // acknowledged
    Nanoseconds read_busy{0};         // time with at least one read in flight
    Nanoseconds write_busy{0};
    std::uint64_t retries = 0;
  };
  Stats stats() const;
  // The drive stopped answering. Memory of transfers that were in flight may still be written to by the kernel: it must
  // neither be used again nor freed.
  bool gave_up() const;
  // For reports: "io_uring (registered buffers, registered files)", "threads (io_uring: Operation not permitted)".
  const std::string& description() const;

 private:
  friend class StripedFile;  // starts shares of its transfers
  class Impl;
  Completion start(const detail::Request& request, Priority priority);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hoist::aio
