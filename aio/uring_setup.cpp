// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <fstream>
#include <system_error>

#include <sys/syscall.h>
#include <unistd.h>

#include <hoist/aio/detail/uring_setup.hpp>
#include <hoist/core/assert.hpp>

namespace hoist::aio::detail {

namespace {

bool disabled_by_sysctl() {
  int value = 0;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> value;
  return value > 0;
}

}  // namespace

std::string errno_text(int code) { return std::generic_category().message(code); }

Unavailable io_uring_unavailable(int code) {
  switch (code) {
    case EPERM:
    case EACCES:
      if (disabled_by_sysctl()) return {errno_text(code), "set the sysctl kernel.io_uring_disabled to 0"};
      return {errno_text(code),
              "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile"};
    case ENOSYS:
      return {errno_text(code), "use Linux 5.11 or newer, with io_uring allowed by the container's seccomp profile"};
    case ENOMEM:
      return {errno_text(code), "raise the memlock limit (ulimit -l) or lower the queue depth"};
    case EMFILE:
    case ENFILE:
      return {errno_text(code), "raise the limit of open files (ulimit -n)"};
    default:
      return {errno_text(code), "use Linux 5.11 or newer"};
  }
}

int set_up_ring(io_uring& ring, unsigned entries, unsigned& flags) {
  int code = EINVAL;
  for (const unsigned choice : kRingFlagChoices) {
    io_uring_params params{};
    params.flags = choice;
    code = -io_uring_queue_init_params(entries, &ring, &params);
    flags = choice;
    if (code != EINVAL) break;
  }
  return code;
}

bool has_operations(io_uring& ring) {
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  if (probe == nullptr) return false;
  bool all = true;
  for (const int code : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED, IORING_OP_FSYNC,
                         IORING_OP_POLL_ADD})
    all = all && io_uring_opcode_supported(probe, code) != 0;
  io_uring_free_probe(probe);
  return all && (ring.features & IORING_FEAT_EXT_ARG) != 0 && (ring.features & IORING_FEAT_NODROP) != 0;
}

void enable_ring(io_uring& ring) {
  // liburing 2.3 declares io_uring_enable_rings but does not export it.
  const long result = ::syscall(__NR_io_uring_register, ring.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
  HOIST_ASSERT(result == 0, "enabling the ring: {}", errno_text(errno));
}

}  // namespace hoist::aio::detail
