// SPDX-License-Identifier: Apache-2.0
// aio/backend.hpp - the small interface behind Engine: one way of getting blocks to and from a file.
//
// Engine cuts transfers into blocks, orders them by priority, checks every result and retries; a backend only moves a
// block and reports what the kernel said. Tests implement it to inject faults.
//
// Threading  submit, reap and wake_up's counterpart reap run on the engine's I/O thread; wake_up on any thread.
// Memory     A Block belongs to the engine; it stays where it is until reported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace hoist::aio {

class File;

enum class Operation : std::uint8_t { read, write, sync };

struct Block {
  Operation operation = Operation::read;
  const File* file = nullptr;
  std::uint64_t offset_bytes = 0;
  std::byte* data = nullptr;      // null for sync
  std::uint64_t length_bytes = 0; // 0 for sync
  // Set by the backend before the block is reported: bytes moved (0 for sync), or -errno.
  std::int64_t result = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string description() const = 0;
  // Hands the block to the kernel. At most `queue_depth` blocks are in flight.
  virtual void submit(Block& block) = 0;
  // Waits until at least one block has finished or wake_up() was called, then writes finished blocks to `done` and
  // returns how many.
  virtual std::size_t reap(std::span<Block*> done) = 0;
  // Makes a reap() that is waiting, or the next one, return. Any thread.
  virtual void wake_up() = 0;
};

}  // namespace hoist::aio
