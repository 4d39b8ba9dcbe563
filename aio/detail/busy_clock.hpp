// SPDX-License-Identifier: Apache-2.0
// aio/detail/busy_clock.hpp - measures the time during which at least one of many overlapping operations was in
// progress.
//
// Threading  begin and end on one thread; total on any.
#pragma once

#include <mutex>

#include <hoist/core/clock.hpp>

namespace hoist::aio::detail {

class BusyClock {
 public:
  void begin() {
    if (under_way_++ > 0) return;
    const std::lock_guard lock(mutex_);
    open_ = true;
    since_ = Clock::now();
  }

  void end() {
    if (--under_way_ > 0) return;
    const std::lock_guard lock(mutex_);
    open_ = false;
    closed_ += Clock::now() - since_;
  }

  Nanoseconds total() const {
    const std::lock_guard lock(mutex_);
    return open_ ? closed_ + (Clock::now() - since_) : closed_;
  }

 private:
  unsigned under_way_ = 0;  // owning thread only
  mutable std::mutex mutex_;
  bool open_ = false;
  TimePoint since_{};
  Nanoseconds closed_{0};
};

}  // namespace hoist::aio::detail
