// SPDX-License-Identifier: Apache-2.0
// How hoist calls NCCL, tested with a fake NCCL that needs no GPU and checks the rules for non-blocking communicators.
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <thread>

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/error.hpp>
#include <hoist/platform/device.hpp>

#include "../platform/fake_cuda_runtime.hpp"
#include "fake_nccl.hpp"

namespace hoist::comm::nccl_fake_test {
namespace {

namespace cuda = test::fake_cuda;
namespace nccl = test::fake_nccl;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class NcclFake : public testing::Test {
 protected:
  NcclFake() {
    cuda::reset();
    nccl::reset();
  }

  struct Rank {
    Communicator& communicator;
    platform::Stream& stream;
    std::byte* memory;  // 64 KiB of the device's
  };
  // Threads of one process, each with a GPU.
  static void run(int size, const std::function<void(const Rank&)>& body,
                  milliseconds timeout = CommunicatorOptions().timeout) {
    ThreadGroup control(size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto device = platform::Device::create(
            {.kind = platform::DeviceKind::cuda, .memory_bytes = 1 << 16, .ordinal = rank + 1});
        const auto stream = device->create_stream("comm");
        const auto communicator = make_nccl_over(control.join(rank), {.timeout = timeout, .device_ordinal = rank + 1});
        body({*communicator, *stream, device->memory().data()});
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

TEST_F(NcclFake, EveryCallWaitsForTheOneBefore) {
  run(1, [](const Rank& rank) {
    const std::array gathered{GatherPiece{rank.memory, 4096}, GatherPiece{rank.memory, 0},
                              GatherPiece{rank.memory + 4096, 512}};
    rank.communicator.all_gather(gathered, rank.stream);
    const std::array reduced{ReducePiece{rank.memory, DType::bf16, 256, 1.0f / 3.0f},
                             ReducePiece{rank.memory + 4096, DType::fp32, 16, 1.0f}};
    rank.communicator.reduce_scatter(reduced, rank.stream);
    rank.communicator.all_gather({}, rank.stream);
  });
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_THAT(nccl::operations(), ElementsAre("all_gather of 4096", "all_gather of 512", "factor 0.5",
                                              "reduce_scatter of 512", "reduce_scatter of 64"));
  EXPECT_EQ(nccl::counts().operators, 0);
}

void use_all_kinds(Communicator& communicator, platform::Stream& stream, std::byte* memory, int in_group) {
  const auto copy = communicator.duplicate();
  const auto part = communicator.split(in_group);
  EXPECT_EQ(part->size(), in_group);
  const GatherPiece piece{memory, 4096};
  for (Communicator* each : {&communicator, part.get()}) each->all_gather({&piece, 1}, stream);
  EXPECT_THROW(copy->all_gather({&piece, 1}, stream), UsageError);
  copy->barrier();
}

TEST_F(NcclFake, CommunicatorsEndInOrder) {
  run(1, [](const Rank& rank) { use_all_kinds(rank.communicator, rank.stream, rank.memory, 1); });
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_EQ(nccl::counts().made, 2);  // a duplicate needs none
  EXPECT_EQ(nccl::counts().destroyed, 2);
}

TEST_F(NcclFake, EachRankUsesItsOwnGpu) {
  run(4, [](const Rank& rank) { use_all_kinds(rank.communicator, rank.stream, rank.memory, 2); });
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_EQ(nccl::counts().made, 8);
  // The rank that ends last may find that the others have ended; it then aborts.
  EXPECT_EQ(nccl::counts().destroyed + nccl::counts().aborted, 8);
  EXPECT_FALSE(cuda::contexts().contains(0));
}

TEST_F(NcclFake, ARankThatGivesUpEndsACallThatWaits) {
  run(2, [](const Rank& rank) {
    rank.communicator.barrier();
    if (rank.communicator.rank() == 1) {
      nccl::stall();
      rank.communicator.barrier();
      std::this_thread::sleep_for(milliseconds(20));
      rank.communicator.abort("its drive is full");
      return;
    }
    rank.communicator.barrier();
    const GatherPiece piece{rank.memory, 4096};
    try {
      rank.communicator.all_gather({&piece, 1}, rank.stream);
      ADD_FAILURE() << "gathered with a rank that was not there";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("its drive is full"));
    }
    EXPECT_THROW(rank.communicator.all_gather({&piece, 1}, rank.stream), CommError);
  });
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_EQ(nccl::counts().aborted, 2);
}

// A failed call that only one rank sees: the others, whose kernels wait for that rank, learn of it.
TEST_F(NcclFake, AnErrorOfOneRankReachesTheOthers) {
  nccl::fail(1);
  run(2, [](const Rank& rank) {
    const GatherPiece piece{rank.memory, 4096};
    const auto gather = [&] { rank.communicator.all_gather({&piece, 1}, rank.stream); };
    if (rank.communicator.rank() == 0) {
      const TimePoint end = Clock::now() + std::chrono::seconds(20);
      try {
        for (; Clock::now() < end; std::this_thread::sleep_for(milliseconds(1))) gather();
        ADD_FAILURE() << "rank 0 was not told";
      } catch (const CommError& error) {
        EXPECT_THAT(error.what(), HasSubstr("rank 1 failed: nccl: all_gather on rank 1 of 2"));
      }
    }
    EXPECT_THROW(gather(), CommError);
  });
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_EQ(nccl::counts().aborted, 2);
}

// A killed rank tells nobody. The host waits for the GPU, and makes no call that would notice.
TEST_F(NcclFake, AKernelThatWaitsForARankThatIsGoneIsEndedByTheTimeOut) {
  cuda::hold();
  std::atomic<bool> is_over = false;
  run(
      2,
      [&](const Rank& rank) {
        const GatherPiece piece{rank.memory, 4096};
        const auto gather = [&] { rank.communicator.all_gather({&piece, 1}, rank.stream); };
        if (rank.communicator.rank() == 1) {
          is_over.wait(false);
        } else {
          gather();
          const TimePoint end = Clock::now() + std::chrono::seconds(20);
          while (nccl::counts().aborted < 2 && Clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
          cuda::let_go();  // as an aborted kernel does
          is_over = true;
          is_over.notify_all();
        }
        try {
          gather();
          ADD_FAILURE() << "gathered after the end";
        } catch (const CommError& error) {
          EXPECT_THAT(error.what(),
                      HasSubstr("all_gather on rank 0 of 2 failed: not all ranks took part within 40 ms"));
        }
        EXPECT_THROW(rank.communicator.barrier(), CommError) << "the others are told";
      },
      milliseconds(40));
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_EQ(nccl::counts().aborted, 2);
}

// NCCL knows of a connection that broke before any call is made again.
TEST_F(NcclFake, AnErrorOfTheNetworkEndsTheKernelsThatWait) {
  run(2, [](const Rank& rank) {
    const GatherPiece piece{rank.memory, 4096};
    rank.communicator.all_gather({&piece, 1}, rank.stream);
    rank.communicator.barrier();
    if (rank.communicator.rank() == 0) nccl::lose_connection();
    const TimePoint end = Clock::now() + std::chrono::seconds(20);
    while (nccl::counts().aborted < 2 && Clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_THROW(rank.communicator.barrier(), CommError);
  });
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_EQ(nccl::counts().aborted, 2);
}

// A rank that nobody hears of stays away while others end: over NCCL alone only the time-out tells.
TEST_F(NcclFake, AnEndThatNeverComesIsGivenUp) {
  {
    const auto communicator = make_nccl_at("127.0.0.1:29513", 0, 1, {.timeout = milliseconds(50), .device_ordinal = 1});
    nccl::stall();
  }
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_EQ(nccl::counts().aborted, 2);  // its control plane's, too
}

// The communicator that NCCL makes meanwhile is not left behind.
TEST_F(NcclFake, ASplitThatNeverComesIsGivenUp) {
  {
    const auto communicator = make_nccl_at("127.0.0.1:29513", 0, 1, {.timeout = milliseconds(50), .device_ordinal = 1});
    nccl::stall();
    EXPECT_THROW(communicator->duplicate(), CommError);
    EXPECT_THROW(communicator->barrier(), CommError);
  }
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_EQ(nccl::counts().made, nccl::counts().destroyed + nccl::counts().aborted);
}

TEST_F(NcclFake, TheControlPlaneWorksOnAnyThread) {
  const auto communicator =
      make_nccl_at("127.0.0.1:29513", 0, 1, {.timeout = std::chrono::minutes(1), .device_ordinal = 1});
  const auto copy = communicator->duplicate();
  const auto part = communicator->split(1);
  cuda::hold();  // kernels take their time
  std::thread late([] {
    std::this_thread::sleep_for(milliseconds(20));
    cuda::let_go();
  });
  std::thread([&] {
    std::uint64_t mine = 7, all = 0;
    copy->exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(&all, 1)));
    EXPECT_EQ(all, 7u);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "\"not ready\" was left behind";
    part->barrier();
  }).join();
  late.join();
  EXPECT_THAT(nccl::violations(), IsEmpty());
  EXPECT_FALSE(cuda::contexts().contains(0));
}

TEST_F(NcclFake, WithoutAnOrdinalItIsTheGpuOfTheThreadThatMadeIt) {
  std::unique_ptr<Communicator> communicator;
  std::thread([&] {
    ASSERT_EQ(cudaSetDevice(3), cudaSuccess);
    communicator = make_nccl_at("127.0.0.1:29513", 0, 1);
  }).join();
  std::thread([&] { communicator->duplicate()->barrier(); }).join();
  EXPECT_THAT(cuda::contexts(), ElementsAre(3));
}

}  // namespace
}  // namespace hoist::comm::nccl_fake_test
