// SPDX-License-Identifier: Apache-2.0
// core/blocked_signals.hpp - keeps the program's signals from the threads that this one starts.
#pragma once

#include <csignal>

namespace hoist {

// A thread begins with the signals blocked that its creator has blocked: while one lives, all but those of a thread's
// own faults, and a profiler's. Cost: two system calls.
class OtherSignalsBlocked {
 public:
  OtherSignalsBlocked();
  ~OtherSignalsBlocked();
  OtherSignalsBlocked(const OtherSignalsBlocked&) = delete;
  OtherSignalsBlocked& operator=(const OtherSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace hoist
