// SPDX-License-Identifier: Apache-2.0
// tiers/detail/transfers.hpp - counts the transfers of one store that are in flight.
//
// Threading  Any thread.
// Memory     Must outlive every transfer: continuations hold a plain pointer, so that counting allocates nothing.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include <hoist/core/clock.hpp>
#include <hoist/core/completion.hpp>
#include <hoist/core/deadline.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/trace.hpp>

namespace hoist::tiers::detail {

// Draws the transfer in the trace when it ends; `trace` may be null. Copies the name: a transfer that a drive never
// answers ends after its store.
inline Completion drawn(Trace* trace, TraceRow row, const std::string& name, std::uint64_t bytes, Completion transfer) {
  if (trace == nullptr) return transfer;
  transfer.then([trace, row, name, bytes, begin = Clock::now()](const std::exception_ptr&) {
    trace->add(row, name, begin, Clock::now(), bytes);
  });
  return transfer;
}

class Transfers {
 public:
  // `submit` starts the transfer and returns its completion.
  template <typename Submit>
  Completion read(Submit&& submit) {
    return track(false, std::forward<Submit>(submit));
  }
  template <typename Submit>
  Completion write(Submit&& submit) {
    return track(true, std::forward<Submit>(submit));
  }

  // Waits until no write is in flight; throws the first error that any write ever had.
  void wait_for_writes() {
    MutexLock lock(mutex_);
    changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return writes_ == 0; });
    if (write_error_) std::rethrow_exception(write_error_);
  }

  // Waits until no transfer is in flight. False when none of them ends for so long. Pre: no more are started.
  [[nodiscard]] bool drain(Nanoseconds silence_max) {
    MutexLock lock(mutex_);
    Deadline deadline(silence_max);
    for (std::uint64_t seen = reads_ + writes_; reads_ + writes_ > 0 && !deadline.is_over();) {
      changed_.wait_for(lock, deadline.next_look());
      if (const std::uint64_t before = std::exchange(seen, reads_ + writes_); seen < before) deadline.restart();
    }
    return reads_ + writes_ == 0;
  }

 private:
  template <typename Submit>
  Completion track(bool is_write, Submit&& submit) {
    {
      const MutexLock lock(mutex_);
      ++(is_write ? writes_ : reads_);
    }
    Completion completion;
    try {
      completion = submit();
    } catch (...) {
      ended(is_write, std::current_exception());
      throw;
    }
    completion.then([this, is_write](std::exception_ptr error) { ended(is_write, std::move(error)); });
    return completion;
  }

  void ended(bool is_write, std::exception_ptr error) {
    const MutexLock lock(mutex_);
    if (is_write && error && !write_error_) write_error_ = std::move(error);
    if (--(is_write ? writes_ : reads_) == 0) changed_.notify_all();
  }

  Mutex mutex_;
  ConditionVariable changed_;
  std::uint64_t reads_ HOIST_GUARDED_BY(mutex_) = 0;
  std::uint64_t writes_ HOIST_GUARDED_BY(mutex_) = 0;
  std::exception_ptr write_error_ HOIST_GUARDED_BY(mutex_);
};

// For a destructor: waits for the transfers in flight, as patiently as an engine that ends. If the drive does not
// answer, says so and leaks them with `used`, the files that the kernel may still use; returns false then.
template <typename... Used>
bool drain_or_leak(std::unique_ptr<Transfers>& transfers, const std::string& path, std::unique_ptr<Used>&... used) {
  constexpr Nanoseconds kSilenceMax = std::chrono::seconds(30);
  if (transfers->drain(kSilenceMax)) return true;
  log_error("the drive of {} has finished none of its transfers for {:.0f} s; its files stay open and locked", path,
            to_seconds(kSilenceMax));
  const auto leak = [](auto& owner) { [[maybe_unused]] const auto* leaked = owner.release(); };
  leak(transfers);
  (leak(used), ...);
  return false;
}

}  // namespace hoist::tiers::detail
