// SPDX-License-Identifier: Apache-2.0
// core/clock.hpp - the only source of time.
#pragma once

#include <chrono>
#include <ctime>

namespace hoist {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Nanoseconds = std::chrono::nanoseconds;

inline double to_seconds(Nanoseconds duration) { return std::chrono::duration<double>(duration).count(); }

template <typename Work>
double seconds_of(const Work& work) {
  const TimePoint begin = Clock::now();
  work();
  return to_seconds(Clock::now() - begin);
}

// Processor time that the calling thread (CLOCK_THREAD_CPUTIME_ID) or all of the process's threads
// (CLOCK_PROCESS_CPUTIME_ID) have used.
inline double processor_seconds(clockid_t whose) {
  timespec used{};
  ::clock_gettime(whose, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace hoist
