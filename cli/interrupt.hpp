// SPDX-License-Identifier: Apache-2.0
// cli/interrupt.hpp - Ctrl-C (SIGINT, SIGTERM, SIGHUP) as a flag that long work checks, so that it can clean up.
//
// Another signal half a second later or more ends the program at once, in case cleaning up hangs.
//
// Threading  One guard at a time.
#pragma once

#include <hoist/measure/interruption.hpp>

namespace hoist::cli {

class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

  const measure::StopFlag* flag() const;
  // Call after cleaning up: ends the process as the signal would have, so that a shell sees the reason.
  [[noreturn]] static void end_by_signal();
};

}  // namespace hoist::cli
