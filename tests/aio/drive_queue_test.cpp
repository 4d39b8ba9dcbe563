// SPDX-License-Identifier: Apache-2.0
// The queue's own rules, over backends that do what the test says: order, depth, results, retries.
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/busy_clock.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio::drive_queue_test {
namespace {

using test::Fault;
using test::Faults;

constexpr std::uint64_t kBlock = 64 * kKiB;

class GatedQueue : public testing::Test {
 protected:
  static constexpr unsigned kDepth = 4;

  GatedQueue()
      : file_(directory_ / "file", {.mode = OpenMode::create, .reserve_bytes = 64 * kBlock}), memory_(64 * kBlock) {}

  DriveQueue make_queue(unsigned retries_max = 8) {
    return DriveQueue({.block_bytes = kBlock, .queue_depth = kDepth, .retries_max = retries_max},
                      std::make_unique<GateBackend>(gate_));
  }
  Completion write(DriveQueue& queue, std::uint64_t first_block, std::uint64_t blocks, Priority priority) {
    return queue.write(file_, first_block * kBlock, memory_.part(0, blocks * kBlock), priority);
  }
  Completion read(DriveQueue& queue, std::uint64_t first_block, std::uint64_t blocks, Priority priority) {
    return queue.read(file_, first_block * kBlock, memory_.part(0, blocks * kBlock), priority);
  }
  static std::vector<std::uint64_t> block_numbers(const std::vector<Gate::Seen>& seen) {
    std::vector<std::uint64_t> numbers;
    for (const auto& block : seen) numbers.push_back(block.offset_bytes / kBlock);
    return numbers;
  }

  test::TempDirectory directory_;
  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  File file_;
  AlignedBuffer memory_;
};

TEST_F(GatedQueue, AForegroundBlockOvertakesEveryQueuedBackgroundBlock) {
  DriveQueue queue = make_queue();
  const Completion background = write(queue, 0, 12, Priority::background);
  gate_->wait_for_blocks(kDepth);
  const Completion foreground = read(queue, 40, 3, Priority::foreground);
  const Completion background_later = write(queue, 20, 2, Priority::background);
  // Everything that was in flight ends; what takes its place is the foreground transfer, then the rest in order.
  for (std::size_t i = 0; i < kDepth; ++i) gate_->finish_oldest();
  gate_->wait_for_blocks(2 * kDepth);
  gate_->open();
  when_all(std::vector{background, foreground, background_later}).wait();
  EXPECT_THAT(block_numbers(gate_->wait_for_blocks(17)),
              testing::ElementsAre(0, 1, 2, 3, 40, 41, 42, 4, 5, 6, 7, 8, 9, 10, 11, 20, 21));
}

TEST_F(GatedQueue, TransfersOfOnePriorityAreInOrder) {
  DriveQueue queue = make_queue();
  std::vector<Completion> all;
  for (std::uint64_t i = 0; i < 10; ++i) all.push_back(read(queue, 2 * i, 2, Priority::foreground));
  gate_->open();
  when_all(all).wait();
  std::vector<std::uint64_t> expected(20);
  for (std::uint64_t i = 0; i < 20; ++i) expected[i] = i;
  EXPECT_EQ(block_numbers(gate_->wait_for_blocks(20)), expected);
}

TEST_F(GatedQueue, TheQueueIsNeverDeeperThanAsked) {
  DriveQueue queue = make_queue();
  const Completion big = write(queue, 0, 40, Priority::background);
  for (std::size_t ended = 0; ended < 40; ++ended) {
    gate_->wait_for_blocks(std::min<std::size_t>(40, kDepth + ended));
    gate_->finish_oldest();
  }
  big.wait();
  EXPECT_EQ(gate_->held_count_max(), kDepth);
}

TEST_F(GatedQueue, TheLastBlockOfATransferMayBeShorter) {
  DriveQueue queue = make_queue();
  const Completion odd = queue.read(file_, kBlock, memory_.part(0, 2 * kBlock + 4 * kKiB), Priority::foreground);
  const auto seen = gate_->wait_for_blocks(3);
  EXPECT_EQ(seen[0].length_bytes, kBlock);
  EXPECT_EQ(seen[2].length_bytes, 4 * kKiB);
  EXPECT_EQ(seen[2].offset_bytes, 3 * kBlock);
  EXPECT_FALSE(odd.done());
  gate_->open();
  odd.wait();
}

TEST_F(GatedQueue, AFailedTransferEndsWhenItsBlocksInFlightHaveAndStartsNoMore) {
  DriveQueue queue = make_queue();
  const Completion doomed = write(queue, 0, 10, Priority::background);
  gate_->wait_for_blocks(kDepth);
  gate_->finish_oldest(-EIO);
  const Completion next = read(queue, 50, 1, Priority::background);
  EXPECT_EQ(block_numbers(gate_->wait_for_blocks(kDepth + 1)).back(), 50u);  // not the fifth block of the first
  EXPECT_FALSE(doomed.done()) << "three blocks still use its memory";
  gate_->finish_oldest();
  gate_->finish_oldest(-ENOSPC);
  EXPECT_FALSE(doomed.wait_for(std::chrono::milliseconds(20)));
  gate_->open();
  const auto error = io_error_of(doomed);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, EIO) << "the first error counts";
  EXPECT_EQ(error->offset_bytes, 0u);
  next.wait();
  EXPECT_EQ(gate_->seen_count(), kDepth + 1);
}

TEST_F(GatedQueue, AShortBlockGoesOnWhereItStopped) {
  DriveQueue queue = make_queue();
  const Completion transfer = read(queue, 3, 1, Priority::foreground);
  gate_->wait_for_blocks(1);
  gate_->finish_oldest(static_cast<std::int64_t>(20 * kKiB + 512));  // 512 bytes are read again
  const auto seen = gate_->wait_for_blocks(2);
  EXPECT_EQ(seen[1].offset_bytes, 3 * kBlock + 20 * kKiB);
  EXPECT_EQ(seen[1].length_bytes, kBlock - 20 * kKiB);
  gate_->finish_oldest();
  transfer.wait();
  EXPECT_EQ(queue.stats().retries, 1u);
  EXPECT_EQ(queue.stats().read_bytes, kBlock);
}

TEST_F(GatedQueue, AWriteThatMovesNothingIsTriedAgainWithinTheBound) {
  DriveQueue queue = make_queue(2);
  const Completion transfer = write(queue, 0, 1, Priority::foreground);
  for (std::size_t i = 1; i <= 3; ++i) {
    gate_->wait_for_blocks(i);
    gate_->finish_oldest(0);
  }
  const auto error = io_error_of(transfer);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, 0);
  EXPECT_EQ(queue.stats().retries, 2u);
  EXPECT_EQ(gate_->seen_count(), 3u);
}

TEST_F(GatedQueue, BusyTimeIsTheUnionOfWhatOverlaps) {
  DriveQueue queue = make_queue();
  const TimePoint start = Clock::now();
  const Completion transfer = read(queue, 0, 3, Priority::foreground);
  gate_->wait_for_blocks(3);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_GE(queue.stats().read_busy, std::chrono::milliseconds(20)) << "counted while it is under way";
  gate_->open();
  transfer.wait();
  const Nanoseconds wall = Clock::now() - start;
  EXPECT_LE(queue.stats().read_busy, wall) << "three blocks at once are not three times the time";
  EXPECT_EQ(queue.stats().write_busy, Nanoseconds::zero());
  const Nanoseconds settled = queue.stats().read_busy;
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(queue.stats().read_busy, settled);
}

TEST_F(GatedQueue, MoreTransfersThanTheQueueWasSizedFor) {
  DriveQueue queue = make_queue();
  std::vector<Completion> all;
  for (int i = 0; i < 5000; ++i) all.push_back(read(queue, 0, 1, Priority::background));
  gate_->open();
  when_all(all).wait();
  EXPECT_EQ(queue.stats().read_bytes, 5000 * kBlock);
}

using GatedQueueDeath = GatedQueue;

TEST_F(GatedQueueDeath, MisalignmentIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  directory_.hold_those_of_children();
  EXPECT_DEATH(static_cast<void>(make_queue().read(file_, 512, memory_.part(0, 4096), Priority::foreground)),
               "misaligned transfer: offset 512");
  EXPECT_DEATH(static_cast<void>(make_queue().read(file_, 0, memory_.part(0, 5000), Priority::foreground)),
               "misaligned transfer: offset 0, length 5000");
  EXPECT_DEATH(static_cast<void>(make_queue().write(file_, 0, memory_.part(64, 4096), Priority::foreground)),
               "misaligned transfer");
}

TEST_F(GatedQueueDeath, ABackendThatReportsMoreThanWasAskedIsABug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  directory_.hold_those_of_children();
  EXPECT_DEATH(
      {
        DriveQueue queue = make_queue();
        const Completion transfer = read(queue, 0, 1, Priority::foreground);
        gate_->wait_for_blocks(1);
        gate_->finish_oldest(static_cast<std::int64_t>(kBlock + 1));
        transfer.wait();
      },
      "reported 65537");
}

TEST(DriveQueueOptions, OutOfRangeIsRefused) {
  EXPECT_THROW(DriveQueue({.block_bytes = 0}), UsageError);
  EXPECT_THROW(DriveQueue({.block_bytes = 1000}), UsageError);
  EXPECT_THROW(DriveQueue({.block_bytes = 2 * kGiB}), UsageError);
  EXPECT_THROW(DriveQueue({.queue_depth = 0}), UsageError);
  EXPECT_THROW(DriveQueue({.queue_depth = 5000}), UsageError);
  EXPECT_THROW(DriveQueue({.thread_count = 0}), UsageError);
  EXPECT_THROW(DriveQueue({.registered_memory = {std::span<std::byte>{}}}), UsageError);
}

TEST(BusyClock, CountsOverlapOnce) {
  BusyClock clock;
  clock.begin();
  clock.begin();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  clock.end();
  const Nanoseconds open = clock.total();
  EXPECT_GE(open, std::chrono::milliseconds(2));
  clock.end();
  const Nanoseconds closed = clock.total();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(clock.total(), closed);
}

// Retries, over a backend that moves real bytes and fails some of them.
class FaultyQueue : public testing::Test {
 protected:
  FaultyQueue()
      : file_(directory_ / "file", {.mode = OpenMode::create, .reserve_bytes = 16 * kBlock}),
        memory_(32 * kBlock),
        source_(memory_.part(0, 16 * kBlock)),
        target_(memory_.part(16 * kBlock, 16 * kBlock)) {
    fill_pattern(source_, 7);
  }

  DriveQueue make_queue(unsigned retries_max = 8) {
    const DriveQueueOptions options{
        .backend = BackendKind::threads, .block_bytes = kBlock, .queue_depth = 4, .retries_max = retries_max};
    return DriveQueue(options, test::make_faulty_backend(options, faults_));
  }
  void expect_round_trip(DriveQueue& queue) {
    queue.write(file_, 0, source_, Priority::background).wait();
    queue.read(file_, 0, target_, Priority::foreground).wait();
    EXPECT_TRUE(same_bytes(source_, target_)) << "seed " << faults_->seed();
  }

  test::TempDirectory directory_;
  File file_;
  AlignedBuffer memory_;
  std::span<std::byte> source_;
  std::span<std::byte> target_;
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>(11);
};

TEST_F(FaultyQueue, BurstsOfEagainAndEintrAreRecoveredAndCounted) {
  faults_->add({.kind = Fault::Kind::error, .count = 5, .code = EAGAIN});
  faults_->add({.kind = Fault::Kind::error, .first = 20, .count = 3, .code = EINTR});
  DriveQueue queue = make_queue();
  expect_round_trip(queue);
  EXPECT_EQ(faults_->hits(Fault::Kind::error), 8u);
  EXPECT_EQ(queue.stats().retries, 8u);
}

TEST_F(FaultyQueue, ShortTransfersAreRecoveredAndCounted) {
  faults_->add({.kind = Fault::Kind::short_transfer, .count = Faults::kForever, .probability = 0.5});
  DriveQueue queue = make_queue(100);  // the order of blocks is the threads' own: nine short tries in a row do happen
  expect_round_trip(queue);
  EXPECT_GT(faults_->hits(Fault::Kind::short_transfer), 5u);
  EXPECT_EQ(queue.stats().retries, faults_->hits(Fault::Kind::short_transfer));
  EXPECT_EQ(queue.stats().read_bytes, 16 * kBlock);
}

TEST_F(FaultyQueue, TheRetryBoundIsReachedAndTheErrorDelivered) {
  faults_->add({.kind = Fault::Kind::error, .operation = Operation::read, .count = Faults::kForever, .code = EAGAIN});
  DriveQueue queue = make_queue(5);
  const TimePoint start = Clock::now();
  const auto error = io_error_of(queue.read(file_, 0, target_.first(kBlock), Priority::foreground));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, EAGAIN);
  EXPECT_EQ(queue.stats().retries, 5u);
  EXPECT_EQ(faults_->hits(Fault::Kind::error), 6u);
  // 100 + 200 + 400 + 800 + 1600 microseconds.
  EXPECT_GE(Clock::now() - start, std::chrono::microseconds(3100)) << "retries are spaced";
}

TEST_F(FaultyQueue, ShortTransfersWithoutEndReachTheBoundToo) {
  faults_->add({.kind = Fault::Kind::short_transfer, .operation = Operation::write, .count = Faults::kForever});
  DriveQueue queue = make_queue(3);
  const auto error = io_error_of(queue.write(file_, 0, source_.first(kBlock), Priority::foreground));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, 0);
  EXPECT_EQ(queue.stats().retries, 3u);
}

TEST_F(FaultyQueue, OtherErrorsAreNotRetried) {
  DriveQueue queue = make_queue();
  for (const int code : {EIO, ENOSPC, EINVAL}) {
    faults_->clear();
    faults_->add({.kind = Fault::Kind::error, .operation = Operation::write, .code = code});
    const auto error = io_error_of(queue.write(file_, kBlock, source_.first(kBlock), Priority::foreground));
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code, code);
    EXPECT_EQ(error->offset_bytes, kBlock);
  }
  EXPECT_EQ(queue.stats().retries, 0u);
}

TEST_F(FaultyQueue, AFlushIsNeverRetried) {
  DriveQueue queue = make_queue();
  for (const int code : {EIO, EAGAIN, EINTR}) {
    faults_->clear();
    faults_->add({.kind = Fault::Kind::error, .operation = Operation::sync, .code = code});
    const std::uint64_t before = faults_->blocks(Operation::sync);
    const auto error = io_error_of(queue.sync(file_));
    ASSERT_TRUE(error);
    EXPECT_EQ(error->operation, "fdatasync");
    EXPECT_EQ(error->code, code);
    EXPECT_EQ(faults_->blocks(Operation::sync), before + 1);
  }
  EXPECT_EQ(queue.stats().retries, 0u);
}

}  // namespace
}  // namespace hoist::aio::drive_queue_test
