// SPDX-License-Identifier: Apache-2.0
// aio/detail/registered_files.hpp - the files that a ring has registered, each from its first transfer until it is
// closed.
//
// A ring keeps a registered file open, and therefore locked. Closing a File waits (at most kForgetTimeout) until the
// I/O thread has removed it from the ring's table, which only that thread may do.
//
// Threading  start, slot_of, serve and detach on the I/O thread; closing on any.
// Memory     Shared by the backend and the files, which tell it when they close.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include <liburing.h>

#include <hoist/aio/detail/wake_up.hpp>
#include <hoist/aio/file.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::aio::detail {

class RegisteredFiles final : public FileObserver, public std::enable_shared_from_this<RegisteredFiles> {
 public:
  static constexpr unsigned kSlotCount = 64;
  static constexpr Nanoseconds kForgetTimeout = std::chrono::seconds(1);

  // `wake_up` wakes the I/O thread.
  explicit RegisteredFiles(std::shared_ptr<const WakeUp> wake_up) : wake_up_(std::move(wake_up)) {}

  // Makes the table in the ring. Returns an errno if the kernel refuses; then no file is ever registered.
  int prepare(io_uring& ring);
  // From now on the calling thread is the I/O thread.
  void start();
  // The slot of a file, which is registered now if a slot is free. -1: use its descriptor.
  int slot_of(const File& file);
  // Unregisters the files that are waiting to close.
  void serve();
  // The ring will be destroyed.
  void detach();

  void closing(std::uint64_t file_id) noexcept override;

 private:
  int find(std::uint64_t file_id) const HOIST_REQUIRES(mutex_);
  void forget(std::uint64_t file_id) HOIST_REQUIRES(mutex_);

  const std::shared_ptr<const WakeUp> wake_up_;
  Mutex mutex_;
  ConditionVariable forgotten_;
  io_uring* ring_ HOIST_GUARDED_BY(mutex_) = nullptr;  // null before prepare and after detach
  std::thread::id io_thread_ HOIST_GUARDED_BY(mutex_);
  std::array<std::uint64_t, kSlotCount> file_ids_ HOIST_GUARDED_BY(mutex_){};  // 0: free
  std::vector<std::uint64_t> leaving_ HOIST_GUARDED_BY(mutex_);
  std::atomic<bool> asked_{false};  // leaving_ is not empty
};

}  // namespace hoist::aio::detail
