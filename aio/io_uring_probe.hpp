// SPDX-License-Identifier: Apache-2.0
// aio/io_uring_probe.hpp - the parts of io_uring that this system grants the process, to explain slow transfers.
//
// Threading  Any thread.
// Errors     None: a missing part is a result.
#pragma once

#include <string>

namespace hoist::aio {

struct IoUringSupport {
  // Whether rings can be made and used, and the kernel has every operation that the queue uses. If not: why, and the
  // remedy.
  bool available = false;
  std::string reason;
  std::string remedy;

  // Each is tried; an errno, or 0 if it works. All are 0 while `available` is false.
  int deferred_tasks = 0;  // SINGLE_ISSUER | DEFER_TASKRUN, Linux 6.1
  int registered_files = 0;
  int registered_buffers = 0;  // 2 MiB of them; ENOMEM when the memlock limit forbids it
};

IoUringSupport probe_io_uring();

}  // namespace hoist::aio
