// SPDX-License-Identifier: Apache-2.0
// platform/detail/guard.hpp - memory that only threads which say so can touch: a protection key (pkeys(7)), where the
// processor and the kernel have them, else nothing.
//
// Threading  Threads begin without access, and give what they have to threads that they start.
#pragma once

#include <cstddef>
#include <span>

namespace hoist::platform::detail {

// Whether memory can be guarded here. One key serves every device: a process has fifteen, and collectives on the host
// device reach from one device's memory into another's.
bool can_guard();
void guard(std::span<std::byte> pages);  // and ends this thread's access

// This thread may touch guarded memory while one is alive. They nest.
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
