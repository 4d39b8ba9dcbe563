// SPDX-License-Identifier: Apache-2.0
// aio/detail/drive_queue_impl.hpp - the I/O thread behind a DriveQueue: queues, blocks in flight, results, retries,
// draining.
//
// Threading  enqueue, stats and stop from any thread; everything below "I/O thread only" on that thread.
// Main path  enqueue -> take_arrivals -> fill (cut, submit) -> reap -> finish_block -> retire -> Completion.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <thread>

#include <hoist/aio/detail/transfer.hpp>
#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/busy_clock.hpp>
#include <hoist/core/deadline.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::aio {

class DriveQueue::Impl {
 public:
  Impl(const DriveQueueOptions& options, std::unique_ptr<Backend> backend);
  ~Impl();

  Completion enqueue(const detail::Request& request, Priority priority);
  Stats stats() const;
  bool gave_up() const;
  const std::string& description() const { return description_; }
  // Drains and ends the I/O thread. False: it did not end in time, and this object must be leaked.
  bool stop() noexcept;

 private:
  using Queues = std::array<detail::TransferQueue, kPriorityCount>;

  // I/O thread only.
  void run() noexcept;
  bool take_arrivals();  // true while stopping
  void fill();
  void resubmit_due();
  detail::Transfer* next_to_cut();
  void cut_block(detail::Transfer& transfer);
  void end_cutting(detail::Transfer& transfer);
  void submit(detail::Flight& flight);
  bool may_wait();
  Nanoseconds wait_limit(bool stopping) const;
  bool is_silent();
  const std::string& path_in_flight() const;
  void finish_block(detail::Flight& flight);
  void finish_short(detail::Flight& flight, std::uint64_t moved_bytes);
  void finish_at_end(detail::Flight& flight, std::uint64_t moved_bytes);
  bool try_again(detail::Flight& flight, Nanoseconds pause);
  void count(const detail::Flight& flight, std::uint64_t moved_bytes);
  void fail(detail::Flight& flight, int code);
  void close_block(detail::Flight& flight);
  void retire(detail::Transfer& transfer);
  void abandon();
  bool idle() const;

  const DriveQueueOptions options_;
  std::string description_;
  std::unique_ptr<Backend> backend_;

  mutable Mutex mutex_;
  ConditionVariable ended_changed_;
  Queues arrivals_ HOIST_GUARDED_BY(mutex_);
  detail::TransferQueue unused_ HOIST_GUARDED_BY(mutex_);
  std::deque<detail::Transfer> transfers_ HOIST_GUARDED_BY(mutex_);  // addresses are stable
  bool waiting_ HOIST_GUARDED_BY(mutex_) = false;                    // the I/O thread sleeps and can take more blocks
  bool stopping_ HOIST_GUARDED_BY(mutex_) = false;
  std::uint64_t drain_progress_ HOIST_GUARDED_BY(mutex_) = 0;  // grows while the drive answers
  bool ended_ HOIST_GUARDED_BY(mutex_) = false;
  bool abandoned_ HOIST_GUARDED_BY(mutex_) = false;
  bool silence_said_ HOIST_GUARDED_BY(mutex_) = false;  // in the log: that the drive is given up

  // I/O thread only.
  Queues queues_;
  detail::TransferQueue retired_;  // will move to unused_
  std::vector<detail::Flight> flights_;
  std::vector<detail::Flight*> free_flights_;
  std::vector<detail::Flight*> retrying_;
  std::vector<Block*> done_;
  unsigned in_flight_ = 0;
  Deadline silence_;         // since the last answer, or since the drive got work
  Deadline drain_;           // since the last answer, or since the queue was told to end
  bool progressed_ = false;  // a block has finished since take_arrivals, or the queue was told to end
  bool draining_ = false;

  std::array<BusyClock, 3> busy_;  // one for each Operation; that of sync is not read
  std::atomic<std::uint64_t> read_bytes_{0};
  std::atomic<std::uint64_t> written_bytes_{0};
  std::atomic<std::uint64_t> retries_{0};

  std::atomic<std::thread::id> io_thread_;
  std::thread thread_;
};

}  // namespace hoist::aio
