// SPDX-License-Identifier: Apache-2.0
// mpirun -np 4: the program has cut MPI_COMM_WORLD into two tensor-parallel slices of two ranks each, and hands both
// kinds of communicators over. State is partitioned in a slice's ranks; norm, skip and commits are those of all four.
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>

#include <mpi.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/mpi.hpp>
#include <hoist/core/error.hpp>

#include "sliced_model.hpp"
#include "toy_model.hpp"

using namespace hoist;
using namespace hoist::test;

namespace {

int failures = 0;

void expect(bool held, int rank, const char* what) {
  if (held) return;
  ++failures;
  std::fprintf(stderr, "rank %d: %s\n", rank, what);
}

// Trains `steps` steps beyond what the slices' stores in `directory` hold, and expects `found` there.
Digests train(int rank, const Runtime::Groups& groups, const std::string& directory, std::uint64_t found,
              std::uint64_t steps) {
  const int slice = rank % 2;
  const ToySetup setup = toy_setup(Placement::pinned, Placement::nvme, directory + "/slice-" + std::to_string(slice));
  ToyModel model(setup, groups, {.seed = static_cast<std::uint64_t>(1 + slice), .matrices = {3000, 5000}, .norm = 40});
  if (found == 0) {
    model.initialize();
  } else {
    expect(model.find_commit() == found, rank, "another step was found");
    expect(model.restore().step == found, rank, "another step came back");
  }
  model.train(found + 1, found + steps);
  model.engine().settle();
  expect(model.engine().committed_step() == found + steps, rank, "the last step is not durable");
  return state_digests(model);
}

// Stopped and resumed, the slices end in what they come to in one go.
void check_commits(int rank, const Runtime::Groups& groups) {
  std::optional<TempDirectory> scratch;
  std::array<char, 4096> path{};
  if (rank == 0) {
    scratch.emplace();
    scratch->path().string().copy(path.data(), path.size() - 1);
  }
  MPI_Bcast(path.data(), static_cast<int>(path.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
  const std::string directory = path.data();
  train(rank, groups, directory + "/stopped", 0, 2);
  const Digests resumed = train(rank, groups, directory + "/stopped", 2, 2);
  expect(resumed == train(rank, groups, directory + "/whole", 0, 4), rank, "a resumed slice ended elsewhere");
  MPI_Barrier(MPI_COMM_WORLD);  // the directory goes with rank 0's
}

void check(int rank, MPI_Comm slice_ranks) {
  const int slice = rank % 2;
  const Runtime::Groups groups{
      .sharding = [&](const comm::CommunicatorOptions& o) { return comm::make_mpi_over(slice_ranks, o); },
      .norm = [](const comm::CommunicatorOptions& o) { return comm::make_mpi_over(MPI_COMM_WORLD, o); }};
  {
    const auto sharding = groups.sharding({});
    expect(sharding->size() == 2 && sharding->rank() == rank / 2, rank, "the slice has two ranks");
  }
  const StepReport clipped = step_of_slice(groups, {.index = slice});
  const double norm = norm_of_slices(2);
  expect(clipped.applied, rank, "the step was skipped");
  expect(std::abs(clipped.gradient_norm - norm) < 1e-9 * norm, rank, "the norm is not that of both slices");
  expect(std::abs(clipped.clip_factor - 0.5 / (norm + 1e-6)) < 1e-9, rank, "clipped by another factor");
  expect(!step_of_slice(groups, {.index = slice, .poisoned = slice == 1}).applied, rank,
         "the step was applied though one slice is not finite");
  check_commits(rank, groups);
  try {
    comm::make_mpi_over(MPI_COMM_NULL);
    expect(false, rank, "MPI_COMM_NULL was taken");
  } catch (const UsageError&) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0, rank = 0, size = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size != 4) {
    std::fprintf(stderr, "needs 4 ranks, not %d\n", size);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Comm slice_ranks = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &slice_ranks);
  try {
    check(rank, slice_ranks);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  // Both are still the program's.
  int total = 0;
  MPI_Allreduce(&failures, &total, 1, MPI_INT, MPI_SUM, slice_ranks);
  MPI_Comm_free(&slice_ranks);
  MPI_Finalize();
  if (rank == 0 && total == 0) std::puts("2 x 2 ranks agree");
  return total == 0 ? 0 : 1;
}
