// SPDX-License-Identifier: Apache-2.0
// The rule of the two priorities: a foreground read never waits behind more than one queue depth of background writes.
// Each time against the same traffic at one priority, which waits behind all of them.
#include <algorithm>
#include <thread>

#include <gtest/gtest.h>

#include <hoist/aio/engine.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio {
namespace {

// How many background blocks end between the start of a foreground read and its end, on a drive that answers in order,
// one block at a time.
std::size_t blocks_waited_for(unsigned queue_depth, std::uint64_t background_blocks, Priority of_read) {
  constexpr std::uint64_t kBlock = 4 * kKiB;
  const test::TempDirectory directory;
  const File file(directory / "file", {.mode = OpenMode::create});
  const AlignedBuffer memory(background_blocks * kBlock);
  const auto gate = std::make_shared<Gate>();
  Engine engine({.block_bytes = kBlock, .queue_depth = queue_depth}, std::make_unique<GateBackend>(gate));
  std::vector<Completion> writes;
  for (std::uint64_t i = 0; i < background_blocks; ++i)
    writes.push_back(engine.write(file, i * kBlock, memory.part(i * kBlock, kBlock), Priority::background));
  gate->wait_for_blocks(std::min<std::size_t>(queue_depth, background_blocks));
  const Completion read = engine.read(file, 0, memory.part(0, kBlock), of_read);
  std::size_t ended = 0;
  for (; gate->held_is_write(); ++ended) {  // until the read is the oldest the drive has
    gate->finish_oldest();
    gate->wait_for_blocks(std::min<std::size_t>(queue_depth + ended + 1, background_blocks + 1));
  }
  gate->open();
  read.wait();
  when_all(writes).wait();
  return ended;
}

TEST(Priority, AForegroundReadWaitsForOneQueueDepthAtMost) {
  for (const unsigned queue_depth : {1u, 2u, 7u, 16u, 64u}) {
    for (const std::uint64_t background : {1u, 5u, 40u, 200u}) {
      SCOPED_TRACE(testing::Message() << "depth " << queue_depth << ", background blocks " << background);
      EXPECT_EQ(blocks_waited_for(queue_depth, background, Priority::foreground),
                std::min<std::uint64_t>(queue_depth, background));
      EXPECT_EQ(blocks_waited_for(queue_depth, background, Priority::background), background);
    }
  }
}

// Median time of a read on a real drive while 64 MiB of writes are always under way.
Nanoseconds read_latency(Priority of_reads, const std::string& path) {
  constexpr std::uint64_t kWriteBytes = 64 * kMiB;
  constexpr int kReads = 15;
  const File file(path, {});
  const AlignedBuffer memory(kWriteBytes + kMiB);
  fill_pattern(memory.span(), 1);
  Engine engine({.block_bytes = 256 * kKiB, .queue_depth = 8});
  std::vector<Nanoseconds> latencies;
  Completion writes[2];
  for (int i = 0; i < kReads; ++i) {
    writes[i % 2].wait();  // the other half is queued: the drive always has work
    writes[i % 2] = engine.write(file, 0, memory.part(0, kWriteBytes / 2), Priority::background);
    const TimePoint start = Clock::now();
    engine.read(file, kWriteBytes, memory.part(kWriteBytes, 256 * kKiB), of_reads).wait();
    latencies.push_back(Clock::now() - start);
  }
  writes[0].wait();
  writes[1].wait();
  std::nth_element(latencies.begin(), latencies.begin() + kReads / 2, latencies.end());
  return latencies[kReads / 2];
}

TEST(Priority, OnARealDriveReadsUnderFullWriteLoadAreSeveralTimesFaster) {
  const test::TempDirectory directory;
  const std::string path = directory / "file";
  {
    const File file(path, {.mode = OpenMode::create, .reserve_bytes = 65 * kMiB});
    const AlignedBuffer memory(65 * kMiB);
    Engine({}).write(file, 0, memory.span(), Priority::background).wait();
  }
  // 8 blocks ahead of it instead of 128 or more; a factor of 2 leaves room for any drive's own order.
  const Nanoseconds with = read_latency(Priority::foreground, path);
  const Nanoseconds without = read_latency(Priority::background, path);
  RecordProperty("foreground_us", std::to_string(with.count() / 1000));
  RecordProperty("one_priority_us", std::to_string(without.count() / 1000));
  EXPECT_LT(with * 2, without) << "with: " << with.count() / 1000 << " us, without: " << without.count() / 1000
                               << " us";
}

}  // namespace
}  // namespace hoist::aio
