// SPDX-License-Identifier: Apache-2.0
// core/busy_clock.hpp - measures the time during which at least one of many overlapping operations was in progress.
//
// Threading  begin and end on one thread at a time; total on any.
#pragma once

#include <hoist/core/clock.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist {

class BusyClock {
 public:
  void begin() {
    if (under_way_++ > 0) return;
    const MutexLock lock(mutex_);
    open_ = true;
    since_ = Clock::now();
  }

  void end() {
    if (--under_way_ > 0) return;
    const MutexLock lock(mutex_);
    open_ = false;
    closed_ += Clock::now() - since_;
  }

  Nanoseconds total() const {
    const MutexLock lock(mutex_);
    return open_ ? closed_ + (Clock::now() - since_) : closed_;
  }

  // One operation, as long as this object lives.
  class Span {
   public:
    explicit Span(BusyClock& clock) : clock_(clock) { clock_.begin(); }
    ~Span() { clock_.end(); }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    BusyClock& clock_;
  };

 private:
  unsigned under_way_ = 0;  // of the thread that begins and ends
  mutable Mutex mutex_;
  bool open_ HOIST_GUARDED_BY(mutex_) = false;
  TimePoint since_ HOIST_GUARDED_BY(mutex_){};
  Nanoseconds closed_ HOIST_GUARDED_BY(mutex_){0};
};

}  // namespace hoist
