// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include <fmt/format.h>
#include <mpi.h>

#include <hoist/comm/detail/mpi_process.hpp>
#include <hoist/comm/launch.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>

namespace hoist::comm::detail {

void Breakage::report(const std::string& reason) {
  const MutexLock lock(mutex_);
  if (reason_.empty()) reason_ = reason;
  there_ = true;
}

std::string Breakage::reason() const {
  const MutexLock lock(mutex_);
  return reason_;
}

// Never destroyed: used while exiting.
Breakage& breakage() {
  static auto* const instance = new Breakage;
  return *instance;
}

bool may_call_mpi() {
  int finalized = 0;
  return MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0 && !breakage().there();
}

std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return fmt::format("MPI error {}", code);
  return std::string(text, static_cast<std::size_t>(length));
}

namespace {

// MPI_Finalize waits for all ranks. A rank that ends with an error must not wait for ranks that wait for it, so it
// exits without MPI_Finalize, and the launcher ends the job.
void finalize_at_exit(int status, void*) {
  int finalized = 0;
  if (status != 0 || !breakage().reason().empty()) return;
  if (MPI_Finalized(&finalized) == MPI_SUCCESS && finalized == 0) MPI_Finalize();
}

void register_finalize() {
#ifdef __GLIBC__
  on_exit(&finalize_at_exit, nullptr);
#else
  std::atexit([] { finalize_at_exit(0, nullptr); });
#endif
}

}  // namespace

void initialize_mpi() {
  static Mutex mutex;
  const MutexLock lock(mutex);
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized != 0) throw CommError("mpi: MPI has been finalised in this process; make the communicator before that");
  int provided = MPI_THREAD_SINGLE;
  if (initialized != 0) {
    MPI_Query_thread(&provided);
  } else {
    if (const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided); code != MPI_SUCCESS) {
      throw CommError("mpi: MPI_Init_thread failed: " + mpi_error_text(code));
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    register_finalize();
  }
  if (provided < MPI_THREAD_MULTIPLE) {
    throw CommError(
        "mpi: several threads of hoist call MPI, but MPI_THREAD_MULTIPLE is not provided; let hoist initialise MPI, "
        "call MPI_Init_thread with MPI_THREAD_MULTIPLE before it, or use an MPI built with thread support");
  }
}

void require_announced_size() {
  const Launch launch = launch_of_process();
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size > 1 || launch.size == 1) return;
  std::string remedy;
  switch (launch.launcher) {
    case Launcher::slurm:
      remedy =
          "start with srun --mpi=pmix or --mpi=pmi2, whichever of them `srun --mpi=list` and this MPI both have, or "
          "with mpirun inside of the allocation";
      break;
    case Launcher::torchrun:
      remedy = "torchrun does not start MPI ranks; start with " + mpirun_line(launch.size);
      break;
    default:
      remedy = "start with the mpirun of the MPI this program was built with";
  }
  throw CommError(
      fmt::format("mpi: the launcher announced {} ranks, but MPI sees this process alone; {}", launch.size, remedy));
}

}  // namespace hoist::comm::detail
