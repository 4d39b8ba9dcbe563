// SPDX-License-Identifier: Apache-2.0
// A rank that fails for a reason of its own: all others stop at once with that reason, wherever they wait, and so do
// its own calls. Its own program, since MPI is beyond use afterwards and the processes end without MPI_Finalize.
//   mpirun -np 3 mpi_failing_rank control|data|duplicate
//   mpirun -np 4 mpi_failing_rank slices: two slices of two ranks, and a communicator over all four, all the program's
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include <fmt/format.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/comm/mpi.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/tests/support/meeting.hpp>
#include <hoist/tests/support/message_of.hpp>

using namespace hoist;

namespace {

constexpr int kFails = 1;  // in the world
constexpr const char* kReason = "read of /store failed: Input/output error";
constexpr std::chrono::minutes kTimeout{10};  // longer than ctest lets this run: whoever hears of it was told

struct Job {
  std::string mode;
  int rank = 0;
  std::unique_ptr<comm::Communicator> fails, waits;  // the one that is aborted, the one that others wait in
};

Job join(const std::string& mode) {
  Job job{.mode = mode};
  const comm::CommunicatorOptions options{.timeout = kTimeout};
  if (mode != "slices") {
    job.fails = comm::make_mpi(options);
    job.rank = job.fails->rank();
    if (mode == "duplicate") job.waits = job.fails->duplicate();
    return job;
  }
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &job.rank);
  MPI_Comm slice = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, job.rank % 2, job.rank, &slice);
  job.fails = comm::make_mpi_over(slice, options);
  job.waits = comm::make_mpi_over(MPI_COMM_WORLD, options);
  MPI_Comm_free(&slice);
  return job;
}

std::string wait_in_vain(Job& job) {
  comm::Communicator& communicator = job.waits ? *job.waits : *job.fails;
  if (job.mode != "data") return test::message_of<CommError>([&] { communicator.barrier(); });
  platform::DeviceOptions options;
  options.memory_bytes = 1 * kMiB;
  const auto device = platform::Device::create(options);
  const auto stream = device->create_stream("waits");
  const comm::GatherPiece piece{device->memory().data(), 100000, "layer 7"};
  communicator.all_gather({&piece, 1}, *stream);
  return test::message_of<CommError>([&] { stream->synchronize(); });
}

// In the slice of ranks 1 and 3 the rank that fails is rank 0, but is not called so.
bool names_it(const std::string& text) {
  return text.find(fmt::format("rank {} failed: {}", kFails, kReason)) != std::string::npos ||
         text.find(fmt::format("rank {} of MPI_COMM_WORLD failed: {}", kFails, kReason)) != std::string::npos;
}

}  // namespace

int main(int argc, char** argv) {
  Job job = join(argc > 1 ? argv[1] : "control");
  std::string first;
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (job.rank == kFails) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // so that the others wait already, most of the time
    job.fails->abort(kReason);
    job.fails->abort("a second reason");
    first = test::message_of<CommError>([&] { (job.waits ? *job.waits : *job.fails).barrier(); });
  } else {
    first = wait_in_vain(job);
  }
  const bool subject = job.mode != "data" || job.rank == kFails || first.find("'layer 7'") != std::string::npos;
  const std::string later = test::message_of<CommError>([&] { job.fails->barrier(); });
  const bool right = subject && names_it(first) && names_it(later) && job.fails->broken();
  fmt::print("{} on rank {}: {} | {}\n", right ? "as expected" : "WRONG", job.rank, first, later);
  std::fflush(stdout);
  test::meet("failing-rank", job.rank, ranks);
  return right ? 0 : 1;
}
