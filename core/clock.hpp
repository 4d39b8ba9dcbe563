// SPDX-License-Identifier: Apache-2.0
// core/clock.hpp - the only source of time.
#pragma once

#include <chrono>

namespace hoist {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Nanoseconds = std::chrono::nanoseconds;

inline double to_seconds(Nanoseconds duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace hoist
