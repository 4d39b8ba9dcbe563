// SPDX-License-Identifier: Apache-2.0
// core/pace.hpp - work that keeps to a number of bytes a second.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include <hoist/core/clock.hpp>

namespace hoist {

// Not before when so many bytes are to have been moved. `bytes_per_second`: 0 for no limit.
inline TimePoint paced_time(TimePoint begun, std::uint64_t bytes, std::uint64_t bytes_per_second) {
  if (bytes_per_second == 0) return begun;
  const std::chrono::duration<double> seconds(static_cast<double>(bytes) / static_cast<double>(bytes_per_second));
  return begun + std::chrono::duration_cast<Nanoseconds>(seconds);
}

// Sleeps until then. Calls `look`, which may throw to end the wait, ten times a second.
template <typename Look>
void sleep_paced(TimePoint until, const Look& look) {
  constexpr std::chrono::milliseconds kBetweenLooks{100};
  for (TimePoint now = Clock::now(); now < until; now = Clock::now()) {
    std::this_thread::sleep_until(std::min(until, now + kBetweenLooks));
    look();
  }
}

}  // namespace hoist
