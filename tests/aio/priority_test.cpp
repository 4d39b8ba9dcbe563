// SPDX-License-Identifier: Apache-2.0
// The rule of the priorities: a transfer never waits behind more than one queue depth of less urgent ones. Each time
// the same traffic at one priority is the control: there it waits behind all of them.
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio::priority_test {
namespace {

// How many blocks of writes end between the start of a read and its end, on a drive that answers in order, one block at
// a time.
std::size_t blocks_waited_for(unsigned queue_depth, std::uint64_t blocks, Priority of_writes, Priority of_read) {
  constexpr std::uint64_t kBlock = 4 * kKiB;
  const test::TempDirectory directory;
  const File file(directory / "file", {.mode = OpenMode::create});
  const AlignedBuffer memory(blocks * kBlock);
  const auto gate = std::make_shared<Gate>();
  DriveQueue queue({.block_bytes = kBlock, .queue_depth = queue_depth}, std::make_unique<GateBackend>(gate));
  std::vector<Completion> writes;
  for (std::uint64_t i = 0; i < blocks; ++i)
    writes.push_back(queue.write(file, i * kBlock, memory.part(i * kBlock, kBlock), of_writes));
  gate->wait_for_blocks(std::min<std::size_t>(queue_depth, blocks));
  const Completion read = queue.read(file, 0, memory.part(0, kBlock), of_read);
  std::size_t ended = 0;
  for (; gate->held_is_write(); ++ended) {  // until the read is the oldest the drive has
    gate->finish_oldest();
    gate->wait_for_blocks(std::min<std::size_t>(queue_depth + ended + 1, blocks + 1));
  }
  gate->open();
  read.wait();
  when_all(writes).wait();
  return ended;
}

TEST(Priority, AnUrgentReadWaitsForOneQueueDepthAtMost) {
  for (const unsigned queue_depth : {1u, 2u, 7u, 16u, 64u}) {
    for (const std::uint64_t blocks : {1u, 5u, 40u, 200u}) {
      SCOPED_TRACE(testing::Message() << "depth " << queue_depth << ", blocks of writes " << blocks);
      const std::uint64_t least = std::min<std::uint64_t>(queue_depth, blocks);
      using enum Priority;
      EXPECT_EQ(blocks_waited_for(queue_depth, blocks, background, foreground), least);
      EXPECT_EQ(blocks_waited_for(queue_depth, blocks, commit, foreground), least);
      EXPECT_EQ(blocks_waited_for(queue_depth, blocks, commit, background), least);
      EXPECT_EQ(blocks_waited_for(queue_depth, blocks, background, background), blocks);
      EXPECT_EQ(blocks_waited_for(queue_depth, blocks, commit, commit), blocks);
      EXPECT_EQ(blocks_waited_for(queue_depth, blocks, background, commit), blocks);
    }
  }
}

// The queue's own backend, which tells in what order blocks were handed to the kernel.
class SubmissionOrder final : public Backend {
 public:
  SubmissionOrder(std::unique_ptr<Backend> real, std::atomic<std::size_t>& writes_before_reads)
      : real_(std::move(real)), writes_before_reads_(writes_before_reads) {}

  std::string description() const override { return real_->description(); }
  void submit(Block& block) override {
    if (block.operation == Operation::write) ++writes_;
    if (block.operation == Operation::read) writes_before_reads_ = writes_;
    real_->submit(block);
  }
  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override { return real_->reap(done, timeout); }
  void wake_up() override { real_->wake_up(); }

 private:
  const std::unique_ptr<Backend> real_;
  std::atomic<std::size_t>& writes_before_reads_;
  std::size_t writes_ = 0;
};

constexpr std::uint64_t kWriteBlock = 256 * kKiB;
constexpr std::uint64_t kWriteBytes = 32 * kMiB;  // of each of the two writes that are under way
constexpr unsigned kQueueDepth = 8;

// For each of several reads, how many blocks of waiting writes the queue hands to a real drive before the read. The
// drive may then change the order; that is not counted.
std::vector<std::size_t> blocks_submitted_before_reads(Priority of_reads) {
  const test::TempDirectory directory;
  const File file(directory / "file", {.mode = OpenMode::create, .reserve_bytes = 2 * kWriteBytes + kMiB});
  const AlignedBuffer memory(2 * kWriteBytes + kMiB);
  fill_pattern(memory.span(), 1);
  const DriveQueueOptions options{.block_bytes = kWriteBlock, .queue_depth = kQueueDepth};
  std::atomic<std::size_t> before = 0;
  DriveQueue queue(options, std::make_unique<SubmissionOrder>(make_backend(options), before));
  queue.write(file, 0, memory.span(), Priority::background).wait();

  std::vector<std::size_t> blocks;
  std::size_t written = memory.span().size() / kWriteBlock;
  Completion writes[2];
  for (int i = 0; i < 15; ++i) {
    // Nothing is in flight. Two writes start; ahead of the read are only blocks that the drive has taken meanwhile.
    writes[0] = queue.write(file, 0, memory.part(0, kWriteBytes), Priority::background);
    writes[1] = queue.write(file, kWriteBytes, memory.part(kWriteBytes, kWriteBytes), Priority::background);
    const Completion read = queue.read(file, 2 * kWriteBytes, memory.part(2 * kWriteBytes, kWriteBlock), of_reads);
    read.wait();
    blocks.push_back(before - written);
    when_all(writes).wait();
    written += 2 * kWriteBytes / kWriteBlock;
  }
  return blocks;
}

TEST(Priority, OnARealDriveReadsAreHandedOverBeforeQueuedWrites) {
  constexpr std::size_t kAll = 2 * kWriteBytes / kWriteBlock;
  for (const std::size_t blocks : blocks_submitted_before_reads(Priority::background)) EXPECT_EQ(blocks, kAll);
  std::vector<std::size_t> ahead = blocks_submitted_before_reads(Priority::foreground);
  // Between the calls the drive may take blocks; ahead of most reads these are at most two queue depths.
  std::sort(ahead.begin(), ahead.end());
  EXPECT_LE(ahead[ahead.size() / 2], 2 * kQueueDepth);
}

}  // namespace
}  // namespace hoist::aio::priority_test
