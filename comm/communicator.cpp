// SPDX-License-Identifier: Apache-2.0
// comm/communicator.cpp - the compiled-in backends, and refusals of missing ones.
#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>

namespace hoist::comm {

#ifdef HOIST_HAVE_MPI
bool have_mpi() { return true; }
#else
bool have_mpi() { return false; }

std::unique_ptr<Communicator> make_mpi(const CommunicatorOptions&) {
  throw CommError(
      "this build of hoist has no MPI; install an MPI (Debian: libopenmpi-dev) and configure with -DHOIST_WITH_MPI=ON, "
      "or run one rank without a launcher");
}
#endif

#ifdef HOIST_HAVE_NCCL
bool have_nccl() { return true; }
#else
bool have_nccl() { return false; }

namespace {
[[noreturn]] void refuse_nccl() {
  throw CommError(
      "this build of hoist has no NCCL; install CUDA and NCCL and configure with -DHOIST_WITH_NCCL=ON, or use the host "
      "device with MPI ranks");
}
}  // namespace

std::unique_ptr<Communicator> make_nccl_over(std::unique_ptr<Communicator>, const CommunicatorOptions&) {
  refuse_nccl();
}

std::unique_ptr<Communicator> make_nccl_at(const std::string&, int, int, const CommunicatorOptions&) { refuse_nccl(); }
#endif

}  // namespace hoist::comm
