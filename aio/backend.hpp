// SPDX-License-Identifier: Apache-2.0
// aio/backend.hpp - the small interface behind DriveQueue: one method of moving blocks to and from a file.
//
// DriveQueue cuts transfers into blocks, orders them by priority, checks every result and retries; a backend only moves
// a block and reports the kernel's result. Tests implement it to inject faults.
//
// Threading  Made on any thread; submit and reap run on its queue's I/O thread, where the backend is destroyed too;
//            wake_up on any thread.
// Memory     A Block belongs to the queue; it stays where it is until reported. A backend that still holds blocks is
//            never destroyed: the queue leaks it, because the kernel may still write to their memory.
// Errors     A block's result reports every failure; submit and reap do not throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include <hoist/core/clock.hpp>

namespace hoist::aio {

class File;

enum class Operation : std::uint8_t { read, write, sync };

struct Block {
  Operation operation = Operation::read;
  const File* file = nullptr;
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;       // null for sync
  std::uint64_t length_bytes = 0;  // 0 for sync
  // Set by the backend before the block is reported: bytes moved (0 for sync), or -errno.
  std::int64_t result = 0;
};

class Backend {
 public:
  // Nanoseconds::max() would overflow when it is added to a time.
  static constexpr Nanoseconds kForever = std::chrono::hours(24 * 365);

  Backend() = default;
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  virtual std::string description() const = 0;
  // Hands the block to the kernel. At most `queue_depth` blocks are in flight.
  virtual void submit(Block& block) = 0;
  // Waits until a block has finished, wake_up() was called, or `timeout` has passed (0: does not wait); then writes
  // finished blocks to `done` and returns how many. May return none early.
  virtual std::size_t reap(std::span<Block*> done, Nanoseconds timeout) = 0;
  // Makes a reap() that is waiting, or the next one, return. Any thread.
  virtual void wake_up() = 0;
};

}  // namespace hoist::aio
