// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cstdlib>
#include <memory>

#include <sys/uio.h>

#include <hoist/aio/detail/uring_setup.hpp>
#include <hoist/aio/io_uring_probe.hpp>
#include <hoist/core/units.hpp>

namespace hoist::aio {

namespace {

struct RingExit {
  void operator()(io_uring* ring) const { io_uring_queue_exit(ring); }
};

int try_registered_buffers(io_uring& ring) {
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(kBlockAlignment, 2 * kMiB), std::free);
  if (!memory) return ENOMEM;
  const iovec buffer{memory.get(), 2 * kMiB};
  const int result = io_uring_register_buffers(&ring, &buffer, 1);
  if (result == 0) io_uring_unregister_buffers(&ring);
  return -result;
}

}  // namespace

IoUringSupport probe_io_uring() {
  IoUringSupport support;
  io_uring ring{};
  unsigned flags = 0;
  int code = detail::set_up_ring(ring, 8, flags);
  const std::unique_ptr<io_uring, RingExit> exit(code == 0 ? &ring : nullptr);
  if (code == 0 && !detail::has_operations(ring)) code = EOPNOTSUPP;
  if (code != 0) {
    detail::Unavailable why = detail::io_uring_unavailable(code);
    support.reason = std::move(why.reason);
    support.remedy = std::move(why.remedy);
    return support;
  }
  support.available = true;
  if ((flags & IORING_SETUP_R_DISABLED) != 0) detail::enable_ring(ring);
  support.deferred_tasks = (flags & IORING_SETUP_DEFER_TASKRUN) != 0 ? 0 : EINVAL;
  const int empty_slot = -1;
  support.registered_files = -io_uring_register_files(&ring, &empty_slot, 1);
  support.registered_buffers = try_registered_buffers(ring);
  return support;
}

}  // namespace hoist::aio
