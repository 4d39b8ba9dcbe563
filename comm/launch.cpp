// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include <hoist/comm/launch.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

namespace hoist::comm {

namespace {

std::optional<int> number(const char* text) {
  const auto value = text == nullptr ? std::nullopt : parse_number<int>(text);
  return value && *value >= 0 ? value : std::nullopt;
}

// A launcher's variable names.
struct Names {
  Launcher launcher;
  const char *size, *rank, *local_rank, *local_size;
};
constexpr Names kMpi[] = {{Launcher::mpi, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                           "OMPI_COMM_WORLD_LOCAL_SIZE"},
                          {Launcher::mpi, "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
                          {Launcher::mpi, "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK",
                           "MV2_COMM_WORLD_LOCAL_SIZE"}};

// A number, or srun's list of numbers: "4(x2),3" are two machines with 4 processes each and one with 3. It does
// not say which of them this machine is, so the largest number counts. Without an announced number, all ranks are here.
int local_size(const char* announced, int size) {
  if (announced == nullptr) return size;
  int most = 0;
  const std::string_view list(announced);
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string count(list.substr(begin, std::min(list.find('(', begin), end) - begin));
    most = std::max(most, number(count.c_str()).value_or(size));
    begin = end + 1;
  }
  return most >= 1 && most <= size ? most : size;
}

std::optional<Launch> by_names(const Environment& environment, const Names& names) {
  const int size = number(environment(names.size)).value_or(0);
  if (size < 1) return std::nullopt;
  return Launch{.launcher = names.launcher,
                .rank = number(environment(names.rank)).value_or(0),
                .size = size,
                .local_rank = number(environment(names.local_rank)).value_or(-1),
                .local_size = local_size(environment(names.local_size), size),
                .master_address = {}};
}

// Slurm sets SLURM_NTASKS for a whole allocation; only srun starts a step of tasks, and tells each its rank.
std::optional<Launch> by_slurm(const Environment& environment) {
  if (environment("SLURM_STEP_ID") == nullptr || environment("SLURM_PROCID") == nullptr) return std::nullopt;
  for (const char* size : {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}) {
    if (auto launch = by_names(environment,
                               {Launcher::slurm, size, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"}))
      return launch;
  }
  return std::nullopt;
}

std::optional<Launch> by_torchrun(const Environment& environment) {
  const char* const rank_text = environment("RANK");
  const char* const size_text = environment("WORLD_SIZE");
  if (rank_text == nullptr || size_text == nullptr) return std::nullopt;
  const auto rank = number(rank_text);
  const auto size = number(size_text);
  if (!rank || !size || *rank >= *size) {
    throw CommError(
        fmt::format("RANK is '{}' and WORLD_SIZE is '{}' in the environment: a rank is a number from 0 to WORLD_SIZE - "
                    "1; start with "
                    "torchrun, or unset both",
                    rank_text, size_text));
  }
  const char* const torchruns_local_size = environment("LOCAL_WORLD_SIZE");
  const char* const deepspeeds_local_size = environment("LOCAL_SIZE");
  Launch launch{
      .launcher = Launcher::torchrun,
      .rank = *rank,
      .size = *size,
      .local_rank = number(environment("LOCAL_RANK")).value_or(-1),
      .local_size = local_size(torchruns_local_size == nullptr ? deepspeeds_local_size : torchruns_local_size, *size),
      .master_address = {}};
  if (const char* const address = environment("MASTER_ADDR")) launch.master_address = address;
  // Kubernetes gives MASTER_PORT another meaning where a service is called "master": only a process that
  // joins needs a port.
  constexpr int kPortMax = 65535;
  if (const char* const port = environment("MASTER_PORT"))
    launch.master_port = number(port).value_or(0) <= kPortMax ? number(port).value_or(0) : 0;
  return launch;
}

// srun's PMI-2 names the rank as MPI does, and where it is on its machine only as Slurm does.
void complete_from_slurm(const Environment& environment, Launch& launch) {
  if (launch.local_rank >= 0) return;
  const auto slurm = by_slurm(environment);
  if (!slurm || slurm->rank != launch.rank || slurm->size != launch.size) return;
  launch.local_rank = slurm->local_rank;
  launch.local_size = slurm->local_size;
}

}  // namespace

Launch read_launch(const Environment& environment) {
  const bool elastic = environment("TORCHELASTIC_RUN_ID") != nullptr;
  if (elastic) {
    if (auto launch = by_torchrun(environment)) return *launch;
  }
  for (const Names& names : kMpi) {
    auto launch = by_names(environment, names);
    if (!launch) continue;
    complete_from_slurm(environment, *launch);
    return *launch;
  }
  if (auto launch = by_torchrun(environment)) return *launch;
  return by_slurm(environment).value_or(Launch{});
}

Launch launch_of_process() {
  return read_launch([](const char* name) { return std::getenv(name); });
}

int mpi_size_of_launch() {
  const Launch launch = launch_of_process();
  return launch.launcher == Launcher::mpi || launch.launcher == Launcher::slurm ? launch.size : 0;
}

std::string mpirun_line(int size) { return fmt::format("mpirun -np {} PROGRAM ARGUMENTS", size); }

}  // namespace hoist::comm
