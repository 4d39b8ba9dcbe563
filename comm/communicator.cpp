// SPDX-License-Identifier: Apache-2.0
// comm/communicator.cpp - what was compiled in, what a launcher announced, and the refusals of what was left out.
#include <charconv>
#include <cstdlib>
#include <string_view>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>

namespace hoist::comm {

namespace {

// The positive integer an environment variable holds, else 0.
int positive_from_environment(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr) return 0;
  const std::string_view view(text);
  int value = 0;
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), value);
  return error == std::errc() && end == view.data() + view.size() && value > 0 ? value : 0;
}

}  // namespace

int mpi_size_of_launch() {
  // Open MPI, then the Hydra family (MPICH, Intel MPI), then MVAPICH.
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"}) {
    if (const int size = positive_from_environment(variable); size > 0) return size;
  }
  // Slurm sets SLURM_NTASKS for a whole allocation; only srun starts a step of tasks, and tells each its rank.
  if (std::getenv("SLURM_STEP_ID") == nullptr || std::getenv("SLURM_PROCID") == nullptr) return 0;
  const int step = positive_from_environment("SLURM_STEP_NUM_TASKS");
  return step > 0 ? step : positive_from_environment("SLURM_NTASKS");
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
#endif

}  // namespace hoist::comm
