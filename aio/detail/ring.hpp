// SPDX-License-Identifier: Apache-2.0
// aio/detail/ring.hpp - an io_uring with its registered memory and files.
//
// Every block goes to the kernel in its own call, because the kernel merges neighbours that are submitted together into
// requests that are too large for drives. The last block is kept back until the next call, which in a full queue is the
// one that waits, so a block costs one system call in all.
//
// Threading  Made on any thread; everything from start() on, and destruction, on the I/O thread.
// Memory     A block stays where it is until collect() has returned it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <liburing.h>

#include <hoist/aio/detail/registered_files.hpp>
#include <hoist/aio/drive_queue.hpp>

namespace hoist::aio::detail {

class Ring {
 public:
  explicit Ring(std::shared_ptr<const WakeUp> wake_up)
      : files_(std::make_shared<RegisteredFiles>(std::move(wake_up))) {}
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // An errno, or 0. Memory or files that cannot be registered are not an error; description() reports them.
  int make(const DriveQueueOptions& options);
  std::string description() const;  // "registered buffers, registered files"

  void start();
  void put(Block& block);
  // Polls for the descriptor to become readable; submitted with the next submission.
  void put_poll(int descriptor);
  // Submits the block that was kept back.
  void flush() {
    if (unsubmitted_) submit();
  }
  // Submits, and waits until something has finished or `timeout` has passed.
  void wait(Nanoseconds timeout);
  // Releases files that are being closed.
  void serve_closing_files() { files_->serve(); }

  struct Collected {
    std::size_t block_count = 0;
    bool polled = false;  // the poll of put_poll() has fired
  };
  Collected collect(std::span<Block*> done);

 private:
  void submit();
  void register_buffers(const std::vector<std::span<std::byte>>& memory);
  int slice_of(const Block& block) const;
  io_uring_sqe* next_entry();
  void prepare(io_uring_sqe* entry, Block& block);

  io_uring ring_{};
  unsigned flags_ = 0;
  std::shared_ptr<RegisteredFiles> files_;
  std::vector<std::span<std::byte>> slices_;  // registered, in this order; ascending addresses
  int buffers_code_ = 0;
  int files_code_ = 0;
  bool made_ = false;
  bool started_ = false;
  bool unsubmitted_ = false;  // a block was put and not submitted
};

}  // namespace hoist::aio::detail
