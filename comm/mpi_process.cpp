// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include <fmt/format.h>
#include <mpi.h>

#include <hoist/comm/detail/mpi_process.hpp>
#include <hoist/comm/launch.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
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

namespace {

std::atomic<int> users{0}, calls{0};
std::atomic<std::uint64_t> calls_begun{0};
std::atomic<bool> process_ends{false};

bool is_finalized() {
  int finalized = 0;
  return MPI_Finalized(&finalized) != MPI_SUCCESS || finalized != 0;
}

}  // namespace

MpiCall::MpiCall() {
  calls.fetch_add(1);
  calls_begun.fetch_add(1);
}
MpiCall::~MpiCall() { calls.fetch_sub(1); }
MpiUser::MpiUser() { users.fetch_add(1); }
MpiUser::~MpiUser() { users.fetch_sub(1); }

std::string reason_not_to_call_mpi() {
  if (breakage().there()) return breakage().reason();
  if (process_ends) return "the process ends";
  return is_finalized() ? "MPI has been finalised" : "";
}

std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return fmt::format("MPI error {}", code);
  return std::string(text, static_cast<std::size_t>(length));
}

namespace {

// From now on no thread begins a call of MPI; false if one is in a call.
bool close_mpi() {
  process_ends = true;
  return calls.load() == 0;
}

// A commit under way comes to its end first, unless it takes longer than `kQuiet` between two calls.
bool close_mpi_when_quiet() {
  constexpr std::chrono::milliseconds kQuiet{200};
  constexpr std::chrono::seconds kLongest{5};
  const TimePoint start = Clock::now();
  TimePoint quiet_since = start;
  for (std::uint64_t begun = calls_begun; Clock::now() - start < kLongest;) {
    if (const std::uint64_t now = calls_begun; calls.load() > 0 || now != begun) {
      begun = now;
      quiet_since = Clock::now();
    } else if (Clock::now() - quiet_since >= kQuiet) {
      return close_mpi();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

// MPI_Finalize waits for all ranks. A rank that ends with an error must not wait for ranks that wait for it, so it
// exits without MPI_Finalize, and the launcher ends the job.
class Finalizer {
 public:
  void exit_begins(int status) { wanted_ = status == 0; }
  ~Finalizer() {
    if (!wanted_ || !may_call_mpi()) return;
    if (users.load() == 0 ? close_mpi() : close_mpi_when_quiet()) {
      MPI_Finalize();
    } else {
      log_error(
          "mpi: MPI is not finalised, because an engine or a communicator still uses it while the process ends; "
          "destroy them before main returns or exit() is called");
    }
  }

 private:
  bool wanted_ = false;
};
// The first global of a program, and so the last to be destroyed: an engine in another one still calls MPI.
[[gnu::init_priority(101)]] Finalizer finalizer;

void register_finalize() {
#ifdef __GLIBC__
  on_exit([](int status, void*) { finalizer.exit_begins(status); }, nullptr);
#else
  finalizer.exit_begins(0);
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
