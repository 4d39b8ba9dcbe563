// SPDX-License-Identifier: Apache-2.0
// The conformance suite on `self` and `threads`, and what happens when a thread stays away, leaves or differs.
#include <atomic>
#include <thread>

#include <gmock/gmock.h>

#include <hoist/core/error.hpp>

#include "job.hpp"

namespace hoist::comm::conformance {

using ::testing::AllOf;
using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Self, Conformance, ::testing::Values(Backend{"self", 1, run_self}), backend_test_name);
INSTANTIATE_TEST_SUITE_P(Threads, Conformance,
                         ::testing::Values(Backend{"threads", 1, run_threads}, Backend{"threads", 2, run_threads},
                                           Backend{"threads", 3, run_threads}, Backend{"threads", 4, run_threads}),
                         backend_test_name);

namespace {

// What `call` throws; fails the test when it throws nothing, or no CommError.
template <typename Call>
std::string comm_error_of(const Call& call) {
  try {
    call();
  } catch (const CommError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no CommError was thrown";
  return {};
}

JobOptions impatient() {
  JobOptions options;
  options.timeout = std::chrono::milliseconds(900);  // also for joining, on a busy machine
  options.chaos_seed = 0;
  return options;
}

}  // namespace

TEST(ThreadGroupTest, TimesOutOnTheControlPlaneNamingTheAbsent) {
  std::atomic<int> done{0};
  run_threads(4, impatient(), [&](Rank& rank) {
    if (rank.rank() == 2) {
      while (done < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    const std::string text = comm_error_of([&] { rank.communicator.barrier(); });
    EXPECT_THAT(text, AllOf(HasSubstr("barrier"), HasSubstr("rank 2 did not come"), HasSubstr("900 ms")));
    ++done;
  });
}

TEST(ThreadGroupTest, TimesOutOnTheDataPlaneThroughTheStream) {
  std::atomic<int> done{0};
  run_threads(3, impatient(), [&](Rank& rank) {
    const auto memory = rank.allocate(300);
    const GatherPiece piece{memory.data(), 100};
    if (rank.rank() == 0) {
      while (done < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    rank.communicator.all_gather({&piece, 1}, rank.stream);
    EXPECT_THAT(comm_error_of([&] { rank.stream.synchronize(); }), HasSubstr("rank 0 did not come"));
    ++done;
  });
}

TEST(ThreadGroupTest, AbortWakesEveryoneWithTheReason) {
  ThreadGroup group(3);
  std::vector<std::jthread> threads;
  std::atomic<int> waiting{0};
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      run_rank(
          r, {},
          [&](const CommunicatorOptions& o) {
            ++waiting;
            EXPECT_THAT(comm_error_of([&] { group.join(r, o); }), HasSubstr("no such luck"));
            return make_self();
          },
          [](Rank&) {});
    });
  }
  while (waiting < 2) std::this_thread::yield();
  group.abort("no such luck");
  threads.clear();
  EXPECT_THAT(comm_error_of([&] { group.join(2); }), HasSubstr("no such luck"));  // who comes later hears it too
}

TEST(ThreadGroupTest, AbortReachesDuplicatesAndBothPlanes) {
  ThreadGroup group(2);
  std::atomic<int> ready{0};
  const auto member = [&](int r) {
    run_rank(
        r, {}, [&](const CommunicatorOptions& o) { return group.join(r, o); },
        [&](Rank& rank) {
          const auto copy = rank.communicator.duplicate();
          ++ready;
          if (rank.rank() == 1) {
            while (ready < 3) std::this_thread::yield();
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            group.abort("rank 1 gave up");
          } else {
            const auto memory = rank.allocate(200);
            const GatherPiece piece{memory.data(), 100};
            rank.communicator.all_gather({&piece, 1}, rank.stream);
            ++ready;
            EXPECT_THAT(comm_error_of([&] { copy->barrier(); }), HasSubstr("rank 1 gave up"));
            EXPECT_THAT(comm_error_of([&] { rank.stream.synchronize(); }), HasSubstr("rank 1 gave up"));
          }
          EXPECT_THROW(rank.communicator.barrier(), CommError);
          EXPECT_THROW(rank.communicator.duplicate(), CommError);
        });
  };
  std::jthread first(member, 0);
  std::jthread second(member, 1);
}

// As the group's abort, by a rank, in its own name.
TEST(ThreadGroupTest, ARankThatAbortsIsNamedWithItsReason) {
  for (const int size : {2, 3, 4}) {
    const TimePoint start = Clock::now();
    std::atomic<int> waiting{0}, left{0};
    run_threads(size, {.timeout = std::chrono::minutes(10)}, [&](Rank& rank) {
      const auto copy = rank.communicator.duplicate();
      EXPECT_EQ(rank.communicator.broken(), std::nullopt);
      if (rank.rank() == 1) {
        while (waiting < size - 1) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        rank.communicator.abort("read of unit 'h.3' failed");
        rank.communicator.abort("a second reason");
      } else {
        const auto memory = rank.allocate(100 * static_cast<std::uint64_t>(size));
        const GatherPiece piece{memory.data(), 100, "h.4"};
        rank.communicator.all_gather({&piece, 1}, rank.stream);
        ++waiting;
        EXPECT_THAT(comm_error_of([&] { copy->barrier(); }), HasSubstr("rank 1 failed: read of unit 'h.3' failed"));
        EXPECT_THAT(comm_error_of([&] { rank.stream.synchronize(); }),
                    AllOf(HasSubstr("all_gather of 'h.4'"), HasSubstr("rank 1 failed: read of unit 'h.3' failed")));
      }
      EXPECT_THAT(comm_error_of([&] { rank.communicator.barrier(); }), HasSubstr("rank 1 failed: read of unit 'h.3'"));
      EXPECT_THAT(rank.communicator.broken().value_or(""), HasSubstr("rank 1 failed"));
      ++left;
      while (left < size) std::this_thread::yield();  // nobody hears of one that left instead
    });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
  }
}

// A rank that unwinds takes its communicator with it: the others learn at once, not after the time-out.
TEST(ThreadGroupTest, NoticesThatARankHasLeft) {
  const TimePoint start = Clock::now();
  ThreadGroup group(2);
  std::jthread leaver([&] { group.join(1); });
  const auto communicator = group.join(0);
  EXPECT_THAT(comm_error_of([&] { communicator->barrier(); }), HasSubstr("rank 1 has left"));
  EXPECT_LT(Clock::now() - start, std::chrono::minutes(1));
}

TEST(ThreadGroupTest, NamesRanksThatCallDifferentOperations) {
  run_threads(3, {}, [&](Rank& rank) {
    const std::string text = comm_error_of([&] {
      if (rank.rank() == 1) {
        std::array<std::byte, 16> bytes{};
        rank.communicator.broadcast_host(bytes, 1);
      } else {
        rank.communicator.barrier();
      }
    });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 called broadcast of 16 bytes"), HasSubstr("rank 0 called barrier")));
  });
}

TEST(ThreadGroupTest, NamesRanksWhosePiecesDiffer) {
  run_threads(2, {}, [&](Rank& rank) {
    const auto memory = rank.allocate(1000);
    const GatherPiece piece{memory.data(), rank.rank() == 0 ? 100u : 101u};
    rank.communicator.all_gather({&piece, 1}, rank.stream);
    EXPECT_THAT(
        comm_error_of([&] { rank.stream.synchronize(); }),
        AllOf(HasSubstr("rank 1 called all_gather of 101 bytes"), HasSubstr("rank 0 called all_gather of 100")));
    EXPECT_THROW(
        {
          const auto stream = rank.device.create_stream("after");
          rank.communicator.all_gather({&piece, 1}, *stream);
          stream->synchronize();
        },
        CommError);               // a plane that failed stays failed
    rank.communicator.barrier();  // the other plane is whole; both ranks stay until both have looked
  });
}

// If the units had equal sizes, each rank would get half of another layer.
TEST(ThreadGroupTest, NamesRanksThatGatherDifferentUnits) {
  run_threads(2, {}, [&](Rank& rank) {
    const auto memory = rank.allocate(200);
    const GatherPiece piece{memory.data(), 100, rank.rank() == 0 ? "layer.1" : "layer.2"};
    rank.communicator.all_gather({&piece, 1}, rank.stream);
    EXPECT_THAT(comm_error_of([&] { rank.stream.synchronize(); }),
                AllOf(HasSubstr("the ranks have diverged: rank 1 called all_gather of 'layer.2'"),
                      HasSubstr("rank 0 called all_gather of 'layer.1'")));
    rank.communicator.barrier();  // both ranks stay until both have looked
  });
}

TEST(ThreadGroupTest, JoinWaitsForAllAndNoLonger) {
  ThreadGroup group(2);
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(50);
  EXPECT_THAT(comm_error_of([&] { group.join(0, options); }), AllOf(HasSubstr("join"), HasSubstr("rank 1")));
}

TEST(ThreadGroupTest, RefusesWrongRanksSizesAndScratch) {
  EXPECT_THROW(ThreadGroup(0), UsageError);
  ThreadGroup group(1);
  EXPECT_THROW(group.join(1), UsageError);
  EXPECT_THROW(group.join(-1), UsageError);
  const auto one = group.join(0);
  EXPECT_THROW(group.join(0), UsageError);

  ThreadGroup pair(2);
  std::vector<std::byte> scratch(64 * kKiB - 1);
  CommunicatorOptions options;
  options.scratch = scratch;
  EXPECT_THROW(pair.join(0, options), UsageError);
}

// Work that is still queued keeps its channel: destroying the communicator first is harmless.
TEST(ThreadGroupTest, QueuedWorkOutlivesItsCommunicator) {
  ThreadGroup group(2);
  const auto member = [&](int r) {
    platform::DeviceOptions options;
    options.memory_bytes = 1 * kMiB;
    options.host.chaos_seed = 77 + static_cast<std::uint64_t>(r);
    const auto device = platform::Device::create(options);
    const auto stream = device->create_stream("orphan");
    auto communicator = group.join(r);
    const std::span<std::byte> memory = device->memory().first(2000);
    std::fill_n(memory.begin() + r * 1000, 1000, static_cast<std::byte>(r + 1));
    const GatherPiece piece{memory.data(), 1000};
    communicator->all_gather({&piece, 1}, *stream);
    communicator.reset();
    stream->synchronize();
    EXPECT_EQ(memory[999], std::byte{1});
    EXPECT_EQ(memory[1000], std::byte{2});
  };
  std::jthread first(member, 0);
  std::jthread second(member, 1);
}

}  // namespace hoist::comm::conformance
