// SPDX-License-Identifier: Apache-2.0
// measure/interruption.hpp - how a long measurement is told to stop, and what it throws then.
//
// A signal handler sets the flag; whoever measures looks at it between blocks and throws, so that every destructor on
// the way (the one that removes scratch files above all) runs.
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
