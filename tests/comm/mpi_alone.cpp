// SPDX-License-Identifier: Apache-2.0
// Started without mpirun, in the environment of a launcher that announced four ranks: MPI sees this process alone, and
// saying nothing would mean four trainings.
#include <cstdio>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>

int main() {
  try {
    const auto communicator = hoist::comm::make_mpi();
    std::printf("rank %d of %d: not refused\n", communicator->rank(), communicator->size());
    return 1;
  } catch (const hoist::CommError& error) {
    std::printf("as expected: %s\n", error.what());
  }
}
