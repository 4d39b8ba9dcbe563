// SPDX-License-Identifier: Apache-2.0
// measure/interruption.hpp - a flag that stops a long measurement, and the exception it then throws.
//
// A signal handler sets the flag. The measurement checks it between blocks and throws, so that every destructor runs,
// above all the one that removes scratch files.
#pragma once

#include <atomic>

#include <hoist/core/error.hpp>

namespace hoist::measure {

using StopFlag = std::atomic<bool>;
static_assert(StopFlag::is_always_lock_free, "a signal handler may touch only lock-free atomics");

class Interrupted : public Error {
 public:
  Interrupted() : Error("interrupted") {}
};

// Null: cannot be interrupted.
inline void throw_if_stopped(const StopFlag* stop) {
  if (stop != nullptr && stop->load(std::memory_order_relaxed)) throw Interrupted();
}

}  // namespace hoist::measure
