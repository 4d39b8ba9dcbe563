// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <cstddef>
#include <fstream>

#include <sys/syscall.h>
#include <unistd.h>

#include <hoist/aio/detail/uring_setup.hpp>
#include <hoist/core/error.hpp>

namespace hoist::aio::detail {

namespace {

bool disabled_by_sysctl() {
  int value = 0;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> value;
  return value > 0;
}

// An errno, or 0: the kernel has every operation and feature that the backend uses.
int find_operations(io_uring& ring) {
  constexpr unsigned kOperationsMax = 256;
  alignas(io_uring_probe) std::array<std::byte, sizeof(io_uring_probe) + kOperationsMax * sizeof(io_uring_probe_op)>
      memory{};
  auto* const probe = reinterpret_cast<io_uring_probe*>(memory.data());
  if (const int code = -io_uring_register_probe(&ring, probe, kOperationsMax); code != 0) return code;
  for (const int operation : {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED,
                              IORING_OP_FSYNC, IORING_OP_POLL_ADD}) {
    if (io_uring_opcode_supported(probe, operation) == 0) return ENOSYS;
  }
  const bool has_features = (ring.features & IORING_FEAT_EXT_ARG) != 0 && (ring.features & IORING_FEAT_NODROP) != 0;
  return has_features ? 0 : ENOSYS;
}

// An errno, or 0.
int finish_a_request(io_uring& ring) {
  io_uring_prep_nop(io_uring_get_sqe(&ring));
  const int result = io_uring_submit_and_wait(&ring, 1);
  return result < 0 ? -result : 0;
}

}  // namespace

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

int enable_ring(io_uring& ring) {
  // liburing 2.3 declares io_uring_enable_rings but does not export it.
  const long result = ::syscall(__NR_io_uring_register, ring.ring_fd, IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
  return result == 0 ? 0 : errno;
}

TrialRing::TrialRing() {
  code_ = set_up_ring(ring_, 8, flags_);
  made_ = code_ == 0;
  if (code_ == 0) code_ = find_operations(ring_);
  if (code_ == 0 && (flags_ & IORING_SETUP_R_DISABLED) != 0) code_ = enable_ring(ring_);
  if (code_ == 0) code_ = finish_a_request(ring_);
}

TrialRing::~TrialRing() {
  if (made_) io_uring_queue_exit(&ring_);
}

}  // namespace hoist::aio::detail
