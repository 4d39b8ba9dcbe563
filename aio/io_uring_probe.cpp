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
  detail::TrialRing trial;
  if (trial.code() != 0) {
    detail::Unavailable why = detail::io_uring_unavailable(trial.code());
    support.reason = std::move(why.reason);
    support.remedy = std::move(why.remedy);
    return support;
  }
  support.available = true;
  support.deferred_tasks = (trial.flags() & IORING_SETUP_DEFER_TASKRUN) != 0 ? 0 : EINVAL;
  const int empty_slot = -1;
  support.registered_files = -io_uring_register_files(&trial.ring(), &empty_slot, 1);
  support.registered_buffers = try_registered_buffers(trial.ring());
  return support;
}

}  // namespace hoist::aio
