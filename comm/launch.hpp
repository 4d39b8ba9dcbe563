// SPDX-License-Identifier: Apache-2.0
// comm/launch.hpp - detects from environment variables which launcher started this process, and as which rank.
//
// mpirun (Open MPI), mpiexec (MPICH, Intel MPI, MVAPICH), srun and torchrun each set variables of their own. torchrun's
// variables take precedence, because a torchrun that srun or mpirun started passes their variables on to all its
// processes; then mpirun's, then RANK and WORLD_SIZE without torchrun, then srun's.
//
// Threading  Pure, except for the given environment function.
// Errors     CommError for invalid RANK and WORLD_SIZE.
#pragma once

#include <functional>
#include <string>

namespace hoist::comm {

enum class Launcher : unsigned char {
  none,
  mpi,       // mpirun, mpiexec
  slurm,     // srun
  torchrun,  // or another program that sets RANK and WORLD_SIZE
};

struct Launch {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int size = 1;
  int local_rank = -1;  // among the processes of this machine; -1: not announced
  int local_size = 1;   // processes of this machine; where that is not announced, all of them
  // torchrun's meeting point: MASTER_ADDR, MASTER_PORT. Empty and 0 if not announced.
  std::string master_address;
  int master_port = 0;
};

// The value of a variable, or null.
using Environment = std::function<const char*(const char* name)>;
Launch read_launch(const Environment& environment);
// The launch of this process.
Launch launch_of_process();
// The world size that a launcher of MPI ranks (mpirun, mpiexec, srun) announced; 0 without one.
int mpi_size_of_launch();

// How to start the same program in a way that works, for messages: "mpirun -np 4 PROGRAM ...".
std::string mpirun_line(int size);

}  // namespace hoist::comm
