// SPDX-License-Identifier: Apache-2.0
// Two ranks that make different calls at the same time: each gets one sentence about both, and no bytes of another
// unit. Its own program, since MPI is beyond use afterwards and the processes end without MPI_Finalize.
//   mpirun -np 2 mpi_diverging_ranks units|shorter|operations|control
#include <cstdio>
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

// What this rank is called to do, as errors name it.
struct Call {
  std::string what;
  std::uint64_t shard_bytes = 0;
  bool reduces = false;
  std::string text() const { return fmt::format("{} of '{}'", reduces ? "exchange" : "all_gather", what); }
};

Call call_of(const std::string& mode, int rank) {
  if (rank == 0) return {"layer.1", 100000};
  if (mode == "shorter") return {"layer.2", 500};
  if (mode == "operations") return {"layer.1", 100000, /*reduces=*/true};
  return {"layer.2", 100000};
}

std::string diverge_on_data(comm::Communicator& ranks, platform::Device& device, const Call& call) {
  const auto stream = device.create_stream("diverges");
  std::byte* const memory = device.memory().data() + 64 * kKiB;
  const comm::GatherPiece gathered{memory, call.shard_bytes, call.what};
  const comm::ReducePiece reduced{memory, DType::fp32, call.shard_bytes / 4, 1.0f, call.what};
  if (call.reduces)
    ranks.reduce_scatter({&reduced, 1}, *stream);
  else
    ranks.all_gather({&gathered, 1}, *stream);
  return test::message_of<CommError>([&] { stream->synchronize(); });
}

std::string diverge_on_control(comm::Communicator& ranks) {
  return test::message_of<CommError>([&] {
    if (ranks.rank() == 0)
      comm::values_of_all(ranks, std::uint64_t{1});
    else
      comm::values_of_all(ranks, std::byte{1});
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "units";
  platform::DeviceOptions options;
  options.memory_bytes = 1 * kMiB;
  const auto device = platform::Device::create(options);
  const auto ranks = comm::make_mpi({.scratch = device->memory().first(64 * kKiB)});
  const int rank = ranks->rank();
  const bool is_control = mode == "control";
  const std::string text =
      is_control ? diverge_on_control(*ranks) : diverge_on_data(*ranks, *device, call_of(mode, rank));
  bool right = text.find("the ranks have diverged: rank ") != std::string::npos;
  for (const int of : {0, 1}) {
    const std::string call =
        is_control ? fmt::format("exchange ({} bytes)", of == 0 ? 8 : 1) : call_of(mode, of).text();
    right = right && text.find(call, text.find("diverged")) != std::string::npos;
  }
  fmt::print("{} on rank {}: {}\n", right ? "as expected" : "WRONG", rank, text);
  std::fflush(stdout);
  test::meet("diverging-ranks-" + mode, rank, 2);
  return right ? 0 : 1;
}
