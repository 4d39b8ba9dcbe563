// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <type_traits>
#include <utility>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/platform/detail/guard.hpp>
#include <hoist/platform/detail/host_stream.hpp>
#include <hoist/platform/update_arrays.hpp>

namespace hoist::platform::detail {

HostStream::HostStream(HostStreamOptions options) : options_(std::move(options)) {
  if (options_.chaos_seed != 0) chaos_.emplace(options_.chaos_seed);
  worker_->thread = start_thread(options_.name, [this] { run(); });
  options_.alive->fetch_add(1);
}

HostStream::~HostStream() {
  if (!worker_.is_usable()) return;
  {
    MutexLock lock(mutex_);
    closing_ = true;
  }
  worker_->changed.notify_one();
  worker_->thread.join();
  if (error_ && !error_delivered_) {
    log_error("stream {} was destroyed after an error that was never reported: {}", options_.name, text_of(error_));
  }
  options_.alive->fetch_sub(1);
}

StreamEvent HostStream::record() {
  Promise passed;
  StreamEvent event(passed.completion());
  enqueue(Record{std::move(passed)});
  return event;
}

void HostStream::wait(const StreamEvent& event, WaitCause cause) {
  if (event.reached() && !event.completion().error()) return;
  enqueue(Wait{event, cause});
}

void HostStream::copy(std::byte* target, const std::byte* source, std::uint64_t bytes, CopyKind kind) {
  if (bytes > 0) enqueue(Copy{target, source, bytes, kind});
}

void HostStream::fill(std::byte* target, std::uint8_t value, std::uint64_t bytes) {
  if (bytes > 0) enqueue(Fill{target, value, bytes});
}

void HostStream::scale_into(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
                            std::uint64_t count, float scale, Combine combine) {
  if (count == 0) return;
  const ScaleArguments arguments{target, target_dtype, source, source_dtype, count, scale, combine == Combine::add};
  check_arguments(arguments);
  enqueue(arguments);
}

void HostStream::sums_of_squares(double* partial, const std::byte* source, DType dtype, std::uint64_t count) {
  if (count == 0) return;
  const NormArguments arguments{partial, source, dtype, count};
  check_arguments(arguments);
  enqueue(arguments);
}

void HostStream::update(const UpdateFactors& factors, const UpdateArrays& arrays) {
  if (arrays.count == 0) return;
  const UpdateArguments arguments{factors, arrays};
  check_arguments(arguments);
  enqueue(arguments);
}

void HostStream::launch(std::string_view what, std::function<void()> work) {
  HOIST_ASSERT(work != nullptr, "launch of {} without work", what);
  enqueue(Launch{std::move(work)});
}

void HostStream::synchronize() {
  HOIST_ASSERT(std::this_thread::get_id() != worker_->thread.get_id(), "stream {} waits for itself", options_.name);
  record().wait();
}

std::function<void(Stream::CountIdle)> HostStream::watch_idle() {
  return [this, before = idle_time()](const CountIdle& count) { count(idle_time() - before); };
}

Nanoseconds HostStream::idle_time() const {
  MutexLock lock(mutex_);
  return idle_total_ + (idle_ ? Clock::now() - idle_since_ : Nanoseconds{0});
}

void HostStream::enqueue(Operation operation) {
  Worker& worker = *worker_;  // refuses calls of a forked process
  bool asleep = false;
  {
    MutexLock lock(mutex_);
    queue_.push_back(std::move(operation));
    asleep = std::exchange(idle_, false);
    if (asleep) idle_total_ += Clock::now() - idle_since_;
  }
  if (asleep) worker.changed.notify_one();
}

void HostStream::run() {
  std::optional<GuardedAccess> access;
  if (options_.guarded) access.emplace();
  MutexLock lock(mutex_);
  for (;;) {
    if (queue_.empty() && !closing_) {
      idle_ = true;
      idle_since_ = Clock::now();
      worker_->changed.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return !queue_.empty() || closing_; });
    }
    if (queue_.empty()) return;
    batch_.swap(queue_);
    lock.unlock();
    for (Operation& operation : batch_) {
      execute(operation);
      operation = std::monostate{};  // releases what it kept alive now, not when the batch ends
    }
    batch_.clear();
    lock.lock();
  }
}

void HostStream::execute(Operation& operation) {
  if (auto* record = std::get_if<Record>(&operation)) {
    error_delivered_ = error_ != nullptr;
    if (error_) {
      record->passed.fail(error_);
    } else {
      record->passed.complete();
    }
    return;
  }
  if (error_) return;
  try {
    std::visit(
        [this](const auto& work) {
          using Work = std::remove_cvref_t<decltype(work)>;
          if constexpr (!std::is_same_v<Work, Record> && !std::is_same_v<Work, std::monostate>) {
            if constexpr (!std::is_same_v<Work, Wait>) delay();
            perform(work);
          }
        },
        operation);
  } catch (...) {
    error_ = current_failure();
  }
}

void HostStream::perform(const Wait& wait) {
  if (wait.event.reached()) return wait.event.wait();  // only rethrows
  const TimePoint start = Clock::now();
  const auto count_wait = [&] {
    if (options_.ledger != nullptr) options_.ledger->waited(wait.cause, Clock::now() - start);
  };
  try {
    wait.event.wait();
  } catch (...) {
    count_wait();
    throw;
  }
  count_wait();
}

void HostStream::perform(const Copy& copy) {
  const TimePoint start = Clock::now();
  std::memmove(copy.target, copy.source, copy.bytes);
  if (copy.kind == CopyKind::local) return;
  await_link(start, copy.bytes);
  if (options_.ledger == nullptr) return;
  const Link link = copy.kind == CopyKind::host_to_device ? Link::host_to_device : Link::device_to_host;
  options_.ledger->count(link, copy.bytes, Clock::now() - start);
}

void HostStream::perform(const Fill& fill) { std::memset(fill.target, fill.value, fill.bytes); }

// A sleep that ends late does not slow the link: a copy that follows at once begins when the one before should have
// ended.
void HostStream::await_link(TimePoint start, std::uint64_t bytes) {
  if (options_.link_bytes_per_second == 0) return;
  constexpr auto kLate = std::chrono::milliseconds(1);
  if (start > link_free_at_ + kLate) link_free_at_ = start;
  link_free_at_ += std::chrono::duration_cast<Nanoseconds>(
      std::chrono::duration<double>(static_cast<double>(bytes) / static_cast<double>(options_.link_bytes_per_second)));
  std::this_thread::sleep_until(link_free_at_);
}

// One operation in four is prompt, most are late by up to 2 ms, one in 32 by up to 10 ms.
void HostStream::delay() {
  if (!chaos_) return;
  const std::uint64_t draw = chaos_->below(32);
  const double u = chaos_->uniform();
  if (draw < 8) return;
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(draw == 31 ? 10 * u : 2 * u * u));
}

}  // namespace hoist::platform::detail
