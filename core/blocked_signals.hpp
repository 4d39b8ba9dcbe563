// SPDX-License-Identifier: Apache-2.0
// core/blocked_signals.hpp - keeps the program's signals from the threads that this one starts.
#pragma once

#include <csignal>

namespace hoist {

// While one lives, this thread blocks every signal except those of its own faults and a profiler's (SIGPROF). Threads
// that it starts meanwhile inherit that, so the program's handlers do not run on them. Cost: two system calls.
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
