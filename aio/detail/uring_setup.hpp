// SPDX-License-Identifier: Apache-2.0
// aio/detail/uring_setup.hpp - makes a ring with the best flags that this kernel accepts, and explains a refusal.
#pragma once

#include <array>
#include <string>

#include <liburing.h>

#include <hoist/aio/detail/backends.hpp>

namespace hoist::aio::detail {

// The remedy for a refusal of io_uring with this errno.
Unavailable io_uring_unavailable(int code);

// Sets of setup flags, best first. The last works wherever io_uring does.
//   SINGLE_ISSUER | DEFER_TASKRUN  requests are finished on our thread, when we ask for them (Linux 6.1)
//   COOP_TASKRUN                   requests are finished when our thread next enters the kernel, without interrupting
//                                  it (5.19)
// R_DISABLED comes with the first: the thread that enables the ring, not the one that makes it, is the single issuer.
inline constexpr std::array<unsigned, 3> kRingFlagChoices{
    IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_R_DISABLED, IORING_SETUP_COOP_TASKRUN, 0};

// An errno, or 0 and the flags that were taken.
int set_up_ring(io_uring& ring, unsigned entries, unsigned& flags);

// Lets a ring that was made with R_DISABLED run; this thread becomes its only user. An errno, or 0.
int enable_ring(io_uring& ring);

// A small ring that has finished a request. A seccomp filter may allow the making of rings and forbid their use.
class TrialRing {
 public:
  TrialRing();
  ~TrialRing();
  TrialRing(const TrialRing&) = delete;
  TrialRing& operator=(const TrialRing&) = delete;

  // 0: this thread may use io_uring, and the kernel has every operation and feature that the backend uses.
  int code() const { return code_; }
  unsigned flags() const { return flags_; }
  io_uring& ring() { return ring_; }  // if code() is 0

 private:
  io_uring ring_{};
  unsigned flags_ = 0;
  bool made_ = false;
  int code_ = 0;
};

}  // namespace hoist::aio::detail
