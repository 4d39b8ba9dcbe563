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

// The failure after which MPI must not be called any more, if there was one.
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

// Why MPI must not be called any more; empty if it may be. Before initialize_mpi() it must not be asked.
std::string reason_not_to_call_mpi();
inline bool may_call_mpi() { return reason_not_to_call_mpi().empty(); }
std::string mpi_error_text(int code);

// While one lives, MPI is not finalised. A thread makes one, then asks may_call_mpi(), then calls MPI.
class MpiCall {
 public:
  MpiCall();
  ~MpiCall();
  MpiCall(const MpiCall&) = delete;
  MpiCall& operator=(const MpiCall&) = delete;
};
// While one lives, threads of hoist may begin calls of MPI.
class MpiUser {
 public:
  MpiUser();
  ~MpiUser();
  MpiUser(const MpiUser&) = delete;
  MpiUser& operator=(const MpiUser&) = delete;
};

// Initialises MPI with MPI_THREAD_MULTIPLE unless the program has. In that case the end of the process also finalises
// it, after the destructors of the program's globals. Nothing will destroy a user that is alive even then: MPI is
// finalised when no call has run for a moment, and later calls are refused. If calls never stop for that long, the log
// says so, MPI is left as it is, and the launcher reports a failure.
void initialize_mpi();
// Refuses a process that is alone in its MPI although a launcher announced several ranks. The others are alone as well,
// and each would train its own model. This happens with srun without PMI, with torchrun, and with the mpirun of another
// MPI than the program was built with.
void require_announced_size();

}  // namespace hoist::comm::detail
