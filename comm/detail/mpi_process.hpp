// SPDX-License-Identifier: Apache-2.0
// comm/detail/mpi_process.hpp - the MPI state of this process: initialised once, and unusable after a failure.
//
// An operation that was given up may still be pending, and progress inside another call could write into memory that
// has been freed since: so after a failure MPI is not called again, by no communicator of the process.
//
// Threading  Any thread.
// Errors     CommError.
#pragma once

#include <atomic>
#include <string>

#include <hoist/core/mutex.hpp>

namespace hoist::comm::detail {

// Why MPI must not be called any more; empty if it may be.
class Breakage {
 public:
  void report(const std::string& reason);  // the first one counts
  bool there() const { return there_; }
  std::string reason() const;

 private:
  std::atomic<bool> there_{false};
  mutable Mutex mutex_;
  std::string reason_ HOIST_GUARDED_BY(mutex_);
};
Breakage& breakage();

bool may_call_mpi();
std::string mpi_error_text(int code);

// Initialises MPI with MPI_THREAD_MULTIPLE unless the program has; in that case also finalises it when the process
// exits.
void initialize_mpi();
// Refuses a process that is alone in its MPI although a launcher announced several ranks. The others are alone as well,
// and each would train its own model. This happens with srun without PMI, with torchrun, and with the mpirun of another
// MPI than the program was built with.
void require_announced_size();

}  // namespace hoist::comm::detail
