// SPDX-License-Identifier: Apache-2.0
// core/deadline.hpp - a time-out of which only that time counts in which this process ran.
//
// A process that was stopped (Ctrl-Z, a suspended batch job, a frozen container, a debugger) finds the clock far ahead
// when it goes on. Whom it waits for may have answered long ago, or was stopped with it: neither is to blame. So
// whoever waits looks again before next_look() has passed, and no look counts for more than that.
//
// Threading  As any object's.
#pragma once

#include <algorithm>

#include <hoist/core/clock.hpp>

namespace hoist {

class Deadline {
 public:
  // Counts from now on. Pre: limit >= 0.
  explicit Deadline(Nanoseconds limit)
      : limit_(limit), step_max_(std::clamp<Nanoseconds>(limit / kLooksMin, Nanoseconds(1), kStepMax)) {}

  // Counts anew: there was an answer.
  void restart() {
    waited_ = Nanoseconds(0);
    looked_ = Clock::now();
  }
  // What has counted so far. This is a look.
  Nanoseconds waited() {
    const TimePoint now = Clock::now();
    waited_ += std::min<Nanoseconds>(now - looked_, step_max_);
    looked_ = now;
    return waited_;
  }
  bool is_over() { return waited() >= limit_; }
  // How long to wait, at most, before the next look.
  Nanoseconds next_look() const { return std::clamp<Nanoseconds>(limit_ - waited_, Nanoseconds(0), step_max_); }

 private:
  static constexpr int kLooksMin = 4;  // before it is over, however short it is
  static constexpr Nanoseconds kStepMax = std::chrono::seconds(1);

  Nanoseconds limit_;
  Nanoseconds step_max_;
  Nanoseconds waited_{0};
  TimePoint looked_ = Clock::now();
};

}  // namespace hoist
