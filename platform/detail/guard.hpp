// SPDX-License-Identifier: Apache-2.0
// platform/detail/guard.hpp - memory that only threads with explicit access can touch, by a protection key (pkeys(7))
// if the processor and the kernel have them; otherwise without effect.
//
// Threading  Threads begin without access, and pass their access on to threads that they start.
#pragma once

#include <cstddef>
#include <span>

namespace hoist::platform::detail {

// Whether memory can be guarded here. One key serves every device: a process has fifteen, and collectives on the host
// device reach from one device's memory into another's.
bool can_guard();
void guard(std::span<std::byte> pages);  // and ends this thread's access

// This thread may touch guarded memory while such an object is alive. They nest.
class GuardedAccess {
 public:
  GuardedAccess();
  ~GuardedAccess();
  GuardedAccess(const GuardedAccess&) = delete;
  GuardedAccess& operator=(const GuardedAccess&) = delete;

 private:
  int before_ = 0;
};

}  // namespace hoist::platform::detail
