// SPDX-License-Identifier: Apache-2.0
// The conformance suite on MPI: every process of the launch runs it. Also what only this transport does.
#include <cstdio>
#include <cstdlib>

#include <hoist/comm/detail/mpi_transport.hpp>
#include <hoist/comm/launch.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

#include "job.hpp"
#include "reference.hpp"

namespace hoist::comm::conformance {

namespace {

int launch_size() { return std::max(1, mpi_size_of_launch()); }

void run_mpi(int, const JobOptions& options, const Body& body) {
  const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");  // seeds the chaos; other launchers share one seed
  run_rank(rank != nullptr ? std::atoi(rank) : 0, options, make_mpi, body);
}

// Rank 0 reports in full; the others only speak up when something is wrong.
class FailuresOnly : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "%s:%d: %s\n", result.file_name() != nullptr ? result.file_name() : "?", result.line_number(),
                 result.message());
  }
};

}  // namespace

INSTANTIATE_TEST_SUITE_P(Mpi, Conformance, ::testing::Values(Backend{"mpi", launch_size(), run_mpi}),
                         backend_test_name);

// The transport cuts messages: into 1 MiB, so that the time-out sees progress, and where a count would not fit an int.
// A small message_bytes_max tests the second without gigabytes.
struct Cut {
  std::uint64_t message_bytes_max;
  std::vector<std::uint64_t> bytes;
};

class MpiTransportTest : public ::testing::TestWithParam<Cut> {};

TEST_P(MpiTransportTest, CutsLargeMessages) {
  detail::MpiTransportOptions options;
  options.timeout = std::chrono::seconds(60);
  options.message_bytes_max = GetParam().message_bytes_max;
  const auto transport = detail::make_mpi_transport(options);
  const int rank = transport->rank();
  const auto size = static_cast<std::uint64_t>(transport->size());
  for (const std::uint64_t bytes : GetParam().bytes) {
    std::vector<std::byte> gathered(size * bytes);
    for (std::uint64_t i = 0; i < bytes; ++i) {
      gathered[static_cast<std::uint64_t>(rank) * bytes + i] = byte_at({bytes, rank, 0}, i);
    }
    const GatherPiece piece{gathered.data(), bytes};
    transport->all_gather({&piece, 1});
    for (std::uint64_t i = 0; i < gathered.size(); ++i) {
      ASSERT_EQ(gathered[i], byte_at({bytes, static_cast<int>(i / bytes), 0}, i % bytes)) << bytes << " " << i;
    }

    // Shards of 3 * bytes, of which the middle third moves.
    std::vector<std::byte> source(size * 3 * bytes);
    for (std::uint64_t i = 0; i < source.size(); ++i) source[i] = byte_at({bytes, rank, 1}, i);
    std::vector<std::byte> received(size * bytes);
    const ShardExchange part{source.data() + bytes, 3 * bytes, bytes, received.data()};
    transport->exchange_shards({&part, 1});
    for (std::uint64_t i = 0; i < received.size(); ++i) {
      const std::uint64_t at = static_cast<std::uint64_t>(rank) * 3 * bytes + bytes + i % bytes;
      ASSERT_EQ(received[i], byte_at({bytes, static_cast<int>(i / bytes), 1}, at)) << bytes << " " << i;
    }

    std::vector<std::byte> sent(bytes);
    for (std::uint64_t i = 0; i < bytes; ++i) sent[i] = byte_at({bytes, rank, 2}, i);
    transport->broadcast(sent, transport->size() - 1);
    for (std::uint64_t i = 0; i < bytes; ++i) ASSERT_EQ(sent[i], byte_at({bytes, transport->size() - 1, 2}, i));
  }
}

INSTANTIATE_TEST_SUITE_P(Cuts, MpiTransportTest,
                         ::testing::Values(Cut{100, {1, 99, 100, 101, 200, 1234}},
                                           Cut{detail::MpiTransportOptions().message_bytes_max,
                                               {1, 1023, 1024, 1025, kMiB + 1024, 2 * kMiB + 1025}}),
                         [](const auto& cut) { return cut.index == 0 ? "small" : "usual"; });

}  // namespace hoist::comm::conformance

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const auto communicator = hoist::comm::make_mpi();
  if (communicator->rank() != 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new hoist::comm::conformance::FailuresOnly);
  }
  const int result = RUN_ALL_TESTS();
  communicator->barrier();  // a rank that failed ends the job; the others are done with their tests by then
  return result;
}
