// SPDX-License-Identifier: Apache-2.0
// A rank stays away: the others get a CommError after the time-out, on the plane given, and so does every later call.
// It names that rank, and not the other one that waits. Its own program, since MPI is beyond use afterwards and the
// process ends without MPI_Finalize.
//   mpirun -np 3 mpi_absent_rank control|data
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/device.hpp>
#include <hoist/tests/support/meeting.hpp>
#include <hoist/tests/support/message_of.hpp>

using namespace hoist;

namespace {

std::string wait_in_vain(comm::Communicator& communicator, bool data_plane) {
  if (!data_plane) return test::message_of<CommError>([&] { communicator.barrier(); });
  platform::DeviceOptions options;
  options.memory_bytes = 1 * kMiB;
  const auto device = platform::Device::create(options);
  const auto stream = device->create_stream("absent");
  const comm::GatherPiece piece{device->memory().data(), 100000};
  communicator.all_gather({&piece, 1}, *stream);
  return test::message_of<CommError>([&] { stream->synchronize(); });
}

}  // namespace

int main(int argc, char** argv) {
  comm::CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(900);
  const auto communicator = comm::make_mpi(options);
  if (communicator->rank() == 1) {
    test::meet("absent-rank", 1, 3);  // absent from MPI, until the others have given up on it
    // Without MPI_Finalize, which it would start while the others end: PMIx 4.2's launcher then hangs, 1 time in 30.
    std::_Exit(0);
  }
  const std::string first = wait_in_vain(*communicator, argc > 1 && std::strcmp(argv[1], "data") == 0);
  const std::string later = test::message_of<CommError>([&] { communicator->barrier(); });
  const bool right = first.find("rank 1 did not come within 900 ms and does not answer") != std::string::npos &&
                     later.find("refused") != std::string::npos;
  fmt::print("{}: {} | {}\n", right ? "as expected" : "WRONG", first, later);
  std::fflush(stdout);
  test::meet("absent-rank", communicator->rank(), 3);
  return right ? 0 : 1;
}
