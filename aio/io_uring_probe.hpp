// SPDX-License-Identifier: Apache-2.0
// aio/io_uring_probe.hpp - which parts of io_uring this system grants the process; for people who want to know why a
// transfer is slower than it could be.
//
// Threading  Any thread.
// Errors     None: what cannot be had is the answer.
#pragma once

#include <string>

namespace hoist::aio {

struct IoUringSupport {
  // Rings can be made, and the kernel knows every operation the engine uses. When not: why, and what to do.
  bool available = false;
  std::string reason;
  std::string remedy;

  // Each is tried, not asked for; an errno, 0 where it works. All are 0 while `available` is false.
  int deferred_tasks = 0;  // SINGLE_ISSUER | DEFER_TASKRUN, Linux 6.1
  int registered_files = 0;
  int registered_buffers = 0;  // 2 MiB of them; ENOMEM when the memlock limit forbids it
};

IoUringSupport probe_io_uring();

}  // namespace hoist::aio
