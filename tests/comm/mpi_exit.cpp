// SPDX-License-Identifier: Apache-2.0
// A process ends, without an error, while one of its threads waits in MPI: the log says why MPI is not finalised. Its
// own program, since the launcher then ends the job.
//   mpirun -np 2 mpi_exit
#include <chrono>
#include <cstdlib>
#include <thread>

#include <hoist/comm/communicator.hpp>

using namespace hoist;

int main() {
  const auto communicator = comm::make_mpi({.timeout = std::chrono::minutes(10)});
  if (communicator->rank() == 1) std::this_thread::sleep_for(std::chrono::minutes(1));  // the launcher ends this
  std::thread([&] { communicator->barrier(); }).detach();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::exit(0);
}
