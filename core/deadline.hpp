// SPDX-License-Identifier: Apache-2.0
// core/deadline.hpp - a time-out that counts only the time in which this process ran.
//
// A process that was stopped (Ctrl-Z, a suspended batch job, a frozen container, a debugger) finds the clock far ahead
// when it continues. The rank or drive that it waits for may have answered long ago, or was stopped with it. The
// waiting thread therefore checks again before next_look() has passed, and no check counts for more than that.
//
// Threading  One thread at a time.
#pragma once

#include <algorithm>

#include <hoist/core/clock.hpp>

namespace hoist {

class Deadline {
 public:
  // Beyond this a limit is none, and sums of times would overflow.
  static constexpr std::chrono::milliseconds kLimitMax = std::chrono::hours(24 * 365);

  // Counts from now on. A negative limit is 0.
  explicit Deadline(Nanoseconds limit)
      : limit_(std::clamp<Nanoseconds>(limit, Nanoseconds(0), kLimitMax)),
        step_max_(std::clamp<Nanoseconds>(limit_ / kLooksMin, Nanoseconds(1), kStepMax)) {}

  // Starts counting again, after an answer.
  void restart() {
    waited_ = Nanoseconds(0);
    looked_ = Clock::now();
  }
  // The time counted so far. A call is a check.
  Nanoseconds waited() {
    const TimePoint now = Clock::now();
    waited_ += std::min<Nanoseconds>(now - looked_, step_max_);
    looked_ = now;
    return waited_;
  }
  bool is_over() { return waited() >= limit_; }
  // The longest time to wait before the next check.
  Nanoseconds next_look() const { return std::clamp<Nanoseconds>(limit_ - waited_, Nanoseconds(0), step_max_); }

 private:
  static constexpr int kLooksMin = 4;  // before the limit is over, however short it is
  static constexpr Nanoseconds kStepMax = std::chrono::seconds(1);

  Nanoseconds limit_;
  Nanoseconds step_max_;
  Nanoseconds waited_{0};
  TimePoint looked_ = Clock::now();
};

}  // namespace hoist
