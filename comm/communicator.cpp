// SPDX-License-Identifier: Apache-2.0
// comm/communicator.cpp - the compiled-in backends, the launcher's announcement, and refusals of missing backends.
#include <hoist/comm/communicator.hpp>
#include <hoist/comm/launch.hpp>
#include <hoist/core/error.hpp>

namespace hoist::comm {

int mpi_size_of_launch() {
  const Launch launch = launch_of_process();
  return launch.launcher == Launcher::mpi || launch.launcher == Launcher::slurm ? launch.size : 0;
}

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

std::vector<std::byte> nccl_unique_id() { refuse_nccl(); }

std::unique_ptr<Communicator> make_nccl(std::span<const std::byte>, int, int, std::unique_ptr<Communicator>,
                                        const CommunicatorOptions&) {
  refuse_nccl();
}

std::unique_ptr<Communicator> make_nccl_at(const std::string&, int, int, const CommunicatorOptions&) { refuse_nccl(); }
#endif

std::unique_ptr<Communicator> make_nccl_over(std::unique_ptr<Communicator> control,
                                             const CommunicatorOptions& options) {
  std::vector<std::byte> id(128);
  try {
    if (control->rank() == 0) id = nccl_unique_id();
  } catch (const std::exception& error) {  // the others wait for the id
    control->abort(error.what());
    throw;
  }
  control->broadcast_host(id, 0);
  const int rank = control->rank(), size = control->size();
  return make_nccl(id, rank, size, std::move(control), options);
}

}  // namespace hoist::comm
