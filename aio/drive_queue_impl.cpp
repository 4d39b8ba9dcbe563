// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <utility>

#include <sys/stat.h>

#include <hoist/aio/detail/backends.hpp>
#include <hoist/aio/detail/drive_queue_impl.hpp>
#include <hoist/aio/detail/transfer_error.hpp>
#include <hoist/aio/given_up.hpp>
#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/core/units.hpp>

namespace hoist::aio {

using detail::Flight;
using detail::operation_name;
using detail::Request;
using detail::Transfer;
using detail::transfer_error;

namespace {

constexpr const char* kThreadName = "hoist-aio";
constexpr std::size_t kTransferCount = 1024;  // at construction; a store keeps tens in flight
// Doubled at every attempt of a block: 8 tries are 25.5 ms, long enough for a starved request pool to recover.
constexpr Nanoseconds kRetryPause = std::chrono::microseconds(100);
constexpr unsigned kRetryDoublingsMax = 10;
// Beyond the drain time-out, for an I/O thread that is itself stuck (in a continuation, or in a driver).
constexpr Nanoseconds kStuckGrace = std::chrono::seconds(2);

Nanoseconds retry_pause(unsigned retries) { return kRetryPause * (1 << std::min(retries, kRetryDoublingsMax)); }

// Asked each time, because files grow. A file whose length is unknown counts as endless.
bool ends_at(const File& file, std::uint64_t offset_bytes) {
  struct stat info {};
  return ::fstat(file.descriptor(), &info) == 0 && static_cast<std::uint64_t>(info.st_size) <= offset_bytes;
}

std::exception_ptr unanswered(const Request& request) {
  return transfer_error(request.operation, *request.file, request.offset_bytes, request.length_bytes, ETIMEDOUT);
}

}  // namespace

DriveQueue::Impl::Impl(const DriveQueueOptions& options, std::unique_ptr<Backend> backend)
    : options_(options),
      description_(backend->description()),
      backend_(std::move(backend)),
      transfers_(kTransferCount),
      flights_(options.queue_depth),
      done_(options.queue_depth),
      silence_(options.answer_timeout),
      drain_(options.drain_timeout) {
  for (Transfer& transfer : transfers_) unused_.push(transfer);
  free_flights_.reserve(flights_.size());
  retrying_.reserve(flights_.size());
  for (Flight& flight : flights_) free_flights_.push_back(&flight);
  thread_ = start_thread(kThreadName, [this] { run(); });
}

DriveQueue::Impl::~Impl() = default;

Completion DriveQueue::Impl::enqueue(const Request& request, Priority priority) {
  Promise promise;
  Completion completion = promise.completion();
  bool wake = false;
  {
    const MutexLock lock(mutex_);
    if (abandoned_) {
      promise.fail(unanswered(request));
      return completion;
    }
    HOIST_ASSERT(!ended_, "a transfer was started on a queue that is being destroyed");
    if (unused_.empty()) unused_.push(transfers_.emplace_back());
    Transfer& transfer = unused_.pop();
    transfer.request = request;
    transfer.promise.emplace(std::move(promise));
    arrivals_[static_cast<std::size_t>(priority)].push(transfer);
    // A continuation runs on the I/O thread, which looks for arrivals before it waits.
    wake = std::exchange(waiting_, false) && std::this_thread::get_id() != io_thread_.load();
  }
  if (wake) backend_->wake_up();
  return completion;
}

DriveQueue::Stats DriveQueue::Impl::stats() const {
  return {.read_bytes = read_bytes_.load(std::memory_order_relaxed),
          .written_bytes = written_bytes_.load(std::memory_order_relaxed),
          .read_busy = busy_[static_cast<std::size_t>(Operation::read)].total(),
          .write_busy = busy_[static_cast<std::size_t>(Operation::write)].total(),
          .retries = retries_.load(std::memory_order_relaxed)};
}

bool DriveQueue::Impl::gave_up() const {
  const MutexLock lock(mutex_);
  return abandoned_;
}

bool DriveQueue::Impl::stop() noexcept {
  HOIST_ASSERT(std::this_thread::get_id() != thread_.get_id(), "a queue was destroyed by one of its continuations");
  MutexLock lock(mutex_);
  stopping_ = true;
  backend_->wake_up();  // under the lock: the I/O thread cannot see `stopping_` and destroy the backend meanwhile
  Deadline stuck(std::min<Nanoseconds>(options_.drain_timeout, Deadline::kLimitMax) + kStuckGrace);
  for (std::uint64_t seen = drain_progress_; !ended_ && !stuck.is_over();) {
    ended_changed_.wait_for(lock, stuck.next_look());
    if (std::exchange(seen, drain_progress_) != drain_progress_) stuck.restart();
  }
  const bool ended = ended_;
  if (!ended) note_given_up();
  const bool clean = ended && !abandoned_;
  const bool silence_said = silence_said_;
  lock.unlock();
  if (clean) {
    thread_.join();
  } else {
    thread_.detach();  // also after its work has ended: the kernel releases a thread only with its last transfer
  }
  if (!clean && !silence_said) {
    log_critical(
        "{}: the drive, or the I/O thread, has not answered for {} ms while the queue was ending; the memory of its "
        "transfers stays reserved and is never used again. Check the drive (dmesg, smartctl).",
        description_, std::chrono::duration_cast<std::chrono::milliseconds>(options_.drain_timeout).count());
  }
  return clean;
}

void DriveQueue::Impl::run() noexcept {
  detail::enter_io_thread(kThreadName, options_);
  io_thread_ = std::this_thread::get_id();
  for (;;) {
    const bool stopping = take_arrivals();
    fill();
    if (stopping) {
      if (idle()) break;
      if (drain_.is_over()) {
        abandon();
        break;
      }
    }
    if (is_silent()) {
      log_critical(
          "{}: the drive of {} has not answered for {:.3g} s and is given up; the memory of its transfers stays "
          "reserved and is never used again. Check the drive (dmesg, smartctl).",
          description_, path_in_flight(), to_seconds(options_.answer_timeout));
      {
        const MutexLock lock(mutex_);
        silence_said_ = true;
      }
      abandon();
      break;
    }
    if (!may_wait()) continue;
    const std::size_t count = backend_->reap(done_, wait_limit(stopping));
    for (std::size_t i = 0; i < count; ++i) finish_block(static_cast<Flight&>(*done_[i]));
  }
  std::unique_ptr<Backend> finished;
  {
    const MutexLock lock(mutex_);
    if (!abandoned_) finished = std::move(backend_);
  }
  finished.reset();  // here, because a ring lets only the thread that used it undo its registrations
  const MutexLock lock(mutex_);
  ended_ = true;
  ended_changed_.notify_all();
}

bool DriveQueue::Impl::take_arrivals() {
  const MutexLock lock(mutex_);
  for (std::size_t i = 0; i < kPriorityCount; ++i) queues_[i].append(arrivals_[i]);
  unused_.append(retired_);
  waiting_ = false;
  if (stopping_ && !std::exchange(draining_, true)) progressed_ = true;
  if (stopping_ && std::exchange(progressed_, false)) {
    ++drain_progress_;
    drain_.restart();
  }
  return stopping_;
}

void DriveQueue::Impl::fill() {
  if (!retrying_.empty()) resubmit_due();
  while (!free_flights_.empty()) {
    Transfer* transfer = next_to_cut();
    if (transfer == nullptr) return;
    cut_block(*transfer);
  }
}

void DriveQueue::Impl::resubmit_due() {
  const TimePoint now = Clock::now();
  const auto waiting = std::partition(retrying_.begin(), retrying_.end(), [&](Flight* f) { return f->due > now; });
  for (auto due = waiting; due != retrying_.end(); ++due) submit(**due);
  retrying_.erase(waiting, retrying_.end());
}

Transfer* DriveQueue::Impl::next_to_cut() {
  for (auto& queue : queues_) {  // foreground first
    if (!queue.empty()) return &queue.front();
  }
  return nullptr;
}

void DriveQueue::Impl::cut_block(Transfer& transfer) {
  const Request& request = transfer.request;
  Flight& flight = *free_flights_.back();
  free_flights_.pop_back();
  flight.operation = request.operation;
  flight.file = request.file;
  flight.offset_bytes = request.offset_bytes + transfer.cut_bytes;
  const auto memory = request.memory_at(transfer.cut_bytes);
  flight.data = memory.data();
  flight.length_bytes = std::min<std::uint64_t>(options_.block_bytes, memory.size());
  flight.transfer = &transfer;
  flight.retries = 0;
  transfer.cut_bytes += flight.length_bytes;
  ++transfer.blocks_open;
  if (transfer.cut_bytes == request.length_bytes) end_cutting(transfer);
  submit(flight);
}

void DriveQueue::Impl::submit(Flight& flight) {
  busy_[static_cast<std::size_t>(flight.operation)].begin();
  if (in_flight_++ == 0) silence_.restart();
  backend_->submit(flight);
}

// Removes a transfer from its queue; only the first of a queue is ever cut into blocks.
void DriveQueue::Impl::end_cutting(Transfer& transfer) {
  transfer.fully_cut = true;
  for (auto& queue : queues_) {
    if (queue.empty() || &queue.front() != &transfer) continue;
    queue.pop();
    return;
  }
}

// False if there is work to do at once. If every block is in flight, the thread could not submit anyway, so it needs no
// wake-up; the next finished block wakes it.
bool DriveQueue::Impl::may_wait() {
  if (free_flights_.empty()) return true;
  const MutexLock lock(mutex_);
  for (const auto& queue : arrivals_) {
    if (!queue.empty()) return false;
  }
  waiting_ = true;
  return true;
}

Nanoseconds DriveQueue::Impl::wait_limit(bool stopping) const {
  Nanoseconds limit = Backend::kForever;
  if (in_flight_ > 0) limit = std::min(limit, silence_.next_look());
  if (stopping) limit = std::min(limit, drain_.next_look());
  if (retrying_.empty()) return limit;
  const TimePoint now = Clock::now();
  for (const Flight* flight : retrying_) limit = std::clamp(Nanoseconds(flight->due - now), Nanoseconds::zero(), limit);
  return limit;
}

bool DriveQueue::Impl::is_silent() { return in_flight_ > 0 && silence_.is_over(); }

// Pre: a block is in flight.
const std::string& DriveQueue::Impl::path_in_flight() const {
  const auto open = [](const Flight& flight) { return flight.transfer != nullptr; };
  return std::ranges::find_if(flights_, open)->file->path();
}

void DriveQueue::Impl::finish_block(Flight& flight) {
  --in_flight_;
  silence_.restart();
  progressed_ = true;
  busy_[static_cast<std::size_t>(flight.operation)].end();
  const std::int64_t result = flight.result;
  if (result >= 0) {
    const auto moved_bytes = static_cast<std::uint64_t>(result);
    HOIST_ASSERT(moved_bytes <= flight.length_bytes, "{} of {} bytes reported {}", operation_name(flight.operation),
                 flight.length_bytes, moved_bytes);
    if (moved_bytes < flight.length_bytes) return finish_short(flight, moved_bytes);
    count(flight, moved_bytes);
    return close_block(flight);
  }
  const int code = static_cast<int>(-result);
  const bool transient = code == EINTR || code == EAGAIN;
  if (transient && flight.operation != Operation::sync && try_again(flight, retry_pause(flight.retries))) return;
  fail(flight, code);
}

// Direct transfers can continue only at an aligned offset; bytes beyond it are moved again.
void DriveQueue::Impl::finish_short(Flight& flight, std::uint64_t moved_bytes) {
  if (flight.operation == Operation::read && ends_at(*flight.file, flight.offset_bytes + moved_bytes))
    return finish_at_end(flight, moved_bytes);
  const std::uint64_t kept_bytes = round_down(moved_bytes, File::kAlignment);
  const Nanoseconds pause = kept_bytes > 0 ? Nanoseconds::zero() : retry_pause(flight.retries);
  if (!try_again(flight, pause)) return fail(flight, 0);
  count(flight, kept_bytes);
  flight.offset_bytes += kept_bytes;
  flight.data += kept_bytes;
  flight.length_bytes -= kept_bytes;
}

// The read reached the end of its file; a retry would not find more.
void DriveQueue::Impl::finish_at_end(Flight& flight, std::uint64_t moved_bytes) {
  const Request& request = flight.transfer->request;
  const std::uint64_t needed_end = request.offset_bytes + request.length_bytes - request.optional_bytes;
  if (flight.offset_bytes + moved_bytes < std::min(needed_end, flight.offset_bytes + flight.length_bytes))
    return fail(flight, 0);
  std::fill(flight.data + moved_bytes, flight.data + flight.length_bytes, std::byte{0});
  count(flight, moved_bytes);
  close_block(flight);
}

bool DriveQueue::Impl::try_again(Flight& flight, Nanoseconds pause) {
  if (flight.transfer->error || flight.retries >= options_.retries_max) return false;
  ++flight.retries;
  retries_.fetch_add(1, std::memory_order_relaxed);
  flight.due = Clock::now() + pause;
  retrying_.push_back(&flight);
  return true;
}

void DriveQueue::Impl::count(const Flight& flight, std::uint64_t moved_bytes) {
  (flight.operation == Operation::read ? read_bytes_ : written_bytes_)
      .fetch_add(moved_bytes, std::memory_order_relaxed);
}

void DriveQueue::Impl::fail(Flight& flight, int code) {
  Transfer& transfer = *flight.transfer;
  if (!transfer.error)
    transfer.error = transfer_error(flight.operation, *flight.file, flight.offset_bytes, flight.length_bytes, code);
  if (!transfer.fully_cut) end_cutting(transfer);  // the rest of it is not started
  close_block(flight);
}

void DriveQueue::Impl::close_block(Flight& flight) {
  Transfer& transfer = *std::exchange(flight.transfer, nullptr);
  free_flights_.push_back(&flight);
  if (--transfer.blocks_open == 0 && transfer.fully_cut) retire(transfer);
}

void DriveQueue::Impl::retire(Transfer& transfer) {
  Promise promise = std::move(*transfer.promise);
  std::exception_ptr error = std::move(transfer.error);
  transfer.promise.reset();
  transfer.error = nullptr;
  transfer.fully_cut = false;
  transfer.cut_bytes = 0;
  retired_.push(transfer);
  promise.settle(std::move(error));
}

// The drive has stopped answering. Every waiting transfer fails. The blocks in flight keep their transfers, because the
// backend may still report to them.
void DriveQueue::Impl::abandon() {
  note_given_up();  // before a caller learns of the failure and releases its memory
  Queues queues;
  {
    const MutexLock lock(mutex_);
    abandoned_ = true;
    for (std::size_t i = 0; i < kPriorityCount; ++i) queues_[i].append(arrivals_[i]);
  }
  std::swap(queues, queues_);
  const auto give_up = [this](Transfer& transfer) {
    if (!transfer.promise) return;
    // The caller must see ETIMEDOUT: the drive may still write to its memory.
    if (transfer.error) log_error("{}: before the drive stopped answering: {}", description_, text_of(transfer.error));
    Promise promise = std::move(*transfer.promise);
    transfer.promise.reset();
    promise.fail(unanswered(transfer.request));
  };
  for (Flight& flight : flights_) {
    if (flight.transfer != nullptr) give_up(*flight.transfer);
  }
  for (auto& queue : queues) {
    while (!queue.empty()) give_up(queue.pop());
  }
}

bool DriveQueue::Impl::idle() const {
  return free_flights_.size() == flights_.size() &&
         std::all_of(queues_.begin(), queues_.end(), [](const auto& queue) { return queue.empty(); });
}

}  // namespace hoist::aio
