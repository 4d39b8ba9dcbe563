// SPDX-License-Identifier: Apache-2.0
// comm/detail/mpi_process.hpp - MPI as this process has it: there is one, initialised once, and beyond use after a
// failure.
//
// An operation that was given up may still be pending, and progress inside another call could write into memory that
// has been freed since: so after a failure MPI is not called again, by no communicator of the process.
//
// Threading  Any thread.
// Errors     CommError.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

namespace hoist::comm::detail {

// Why MPI must not be called any more; empty while all is well.
class Breakage {
 public:
  void report(const std::string& reason);  // the first one counts
  bool there() const { return there_; }
  std::string reason() const;

 private:
  std::atomic<bool> there_{false};
  mutable std::mutex mutex_;
  std::string reason_;
};
Breakage& breakage();

bool may_call_mpi();
std::string mpi_error_text(int code);

// Initialises MPI with MPI_THREAD_MULTIPLE unless somebody has; who does, also finalises it when the process exits.
void initialize_mpi();
// Refuses a process that is alone in its MPI although a launcher announced several ranks: so are the others, and each
// would train a model of its own. That is one started by srun without PMI, by torchrun, or by the mpirun of another MPI
// than it was built with.
void require_announced_size();

}  // namespace hoist::comm::detail
