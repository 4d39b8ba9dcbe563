// SPDX-License-Identifier: Apache-2.0
// One logical file over several drives: the same bytes as one file, one drive's trouble is that drive's alone.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/aio/striped_file.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio::striped_file_test {
namespace {

using test::Fault;
using test::Faults;

constexpr std::uint64_t kUnit = 64 * kKiB;

// Directories as drives, a queue each.
class Striped : public testing::Test {
 protected:
  std::string path(unsigned drive) const { return path_of_drive(directory_, drive); }

  void add_queue(DriveQueueOptions options = {.block_bytes = 48 * kKiB, .queue_depth = 4}) {
    queues_.push_back(std::make_unique<DriveQueue>(options));
  }
  std::shared_ptr<Faults> add_faulty_queue() {
    const DriveQueueOptions options{.block_bytes = 48 * kKiB, .queue_depth = 4};
    auto faults = std::make_shared<Faults>(5);
    queues_.push_back(std::make_unique<DriveQueue>(options, test::make_faulty_backend(options, faults)));
    return faults;
  }
  std::unique_ptr<StripedFile> make(const StripeLayout& layout, std::uint64_t bytes) {
    while (queues_.size() < layout.drive_count()) add_queue();
    return make_striped_file(directory_, queues_, layout, bytes);
  }
  std::unique_ptr<StripedFile> open(const StripeLayout& layout) {
    std::vector<StripeDrive> drives;
    for (unsigned d = 0; d < layout.drive_count(); ++d) drives.push_back({queues_[d].get(), File(path(d), {})});
    return std::make_unique<StripedFile>(layout, std::move(drives));
  }

  test::TempDirectory directory_;
  DriveQueues queues_;
};

TEST_F(Striped, EveryRangeIsByteExactWhateverTheWeights) {
  for (const std::vector<std::uint32_t>& weights :
       {std::vector<std::uint32_t>{1}, {1, 1}, {3, 1}, {2, 3, 1}, {5, 16}}) {
    SCOPED_TRACE(testing::PrintToString(weights));
    const StripeLayout layout(kUnit, weights);
    constexpr std::uint64_t kBytes = 40 * kUnit + 12 * kKiB;
    const auto file = make(layout, kBytes);
    EXPECT_EQ(file->data_paths().size(), weights.size());
    const AlignedBuffer memory(2 * kBytes);
    const auto source = memory.part(0, kBytes);
    const auto target = memory.part(kBytes, kBytes);
    fill_pattern(source, 1);
    file->write(0, source, Priority::background).wait();
    Rng rng(weights.size());
    for (int round = 0; round < 150; ++round) {
      const std::uint64_t offset = rng.below(kBytes / File::kAlignment) * File::kAlignment;
      const std::uint64_t length = (1 + rng.below((kBytes - offset) / File::kAlignment)) * File::kAlignment;
      if (round % 3 == 0) {
        fill_pattern(source.subspan(offset, length), rng.bits());
        file->write(offset, source.subspan(offset, length), Priority::background).wait();
      }
      file->read(offset, target.first(length), Priority::foreground).wait();
      ASSERT_TRUE(same_bytes(target.first(length), source.subspan(offset, length)))
          << "round " << round << ": " << length << " bytes at " << offset;
    }
    file->sync().wait();
    const auto again = open(layout);
    again->read(0, target, Priority::foreground).wait();
    EXPECT_TRUE(same_bytes(target, source));
    for (unsigned d = 0; d < weights.size(); ++d) std::filesystem::remove(path(d));
  }
}

TEST_F(Striped, EachByteIsOnTheDriveTheLayoutSays) {
  const StripeLayout layout(kUnit, {3, 2});
  constexpr std::uint64_t kBytes = 20 * kUnit;
  const auto file = make(layout, kBytes);
  const AlignedBuffer memory(kBytes);
  const AlignedBuffer one(File::kAlignment);
  fill_pattern(memory.span(), 9);
  file->write(0, memory.span(), Priority::background).wait();
  for (std::uint64_t logical = 0; logical < kBytes; logical += File::kAlignment) {
    const auto place = layout.place(logical);
    queues_[place.drive]->read(file->file(place.drive), place.offset_bytes, one.span(), Priority::foreground).wait();
    ASSERT_TRUE(same_bytes(one.span(), memory.part(logical, File::kAlignment))) << logical;
  }
}

TEST_F(Striped, NeighbouringUnitsOfADriveAreOneBlock) {
  const auto gate = std::make_shared<Gate>();
  gate->open();
  queues_.push_back(
      std::make_unique<DriveQueue>(DriveQueueOptions{.block_bytes = kMiB}, std::make_unique<GateBackend>(gate)));
  const StripeLayout layout(kUnit, {3, 1});  // 0 0 1 0 | 0 0 1 0 | ...
  const auto file = make(layout, 8 * kUnit);
  const AlignedBuffer memory(8 * kUnit);
  file->read(0, memory.span(), Priority::foreground).wait();
  std::vector<std::uint64_t> lengths;
  for (const auto& block : gate->wait_for_blocks(3)) lengths.push_back(block.length_bytes / kUnit);
  EXPECT_THAT(lengths, testing::ElementsAre(2, 3, 1));
}

TEST_F(Striped, AnErrorNamesTheDriveThatFailedAndThePlaceThere) {
  add_queue();
  const auto faults = add_faulty_queue();
  faults->add({.kind = Fault::Kind::error, .operation = Operation::write, .first = 2, .code = EIO});
  const StripeLayout layout(kUnit, {1, 1});
  const auto file = make(layout, 8 * kUnit);
  const AlignedBuffer memory(8 * kUnit);
  const auto error = io_error_of(file->write(0, memory.span(), Priority::background));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, EIO);
  EXPECT_EQ(error->path, path(1));
  EXPECT_EQ(error->offset_bytes, kUnit);  // its third block: the first of its second unit
  EXPECT_EQ(error->length_bytes, 48 * kKiB);
  EXPECT_EQ(queues_[0]->stats().written_bytes, 4 * kUnit) << "the other drive's part was finished";
}

TEST_F(Striped, AFailedFlushOfAnyDriveFailsTheFlush) {
  add_queue();
  add_queue();
  const auto faults = add_faulty_queue();
  faults->add({.kind = Fault::Kind::error, .operation = Operation::sync, .code = EIO});
  const auto file = make(StripeLayout(kUnit, {1, 1, 1}), 3 * kUnit);
  const auto error = io_error_of(file->sync());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->operation, "fdatasync");
  EXPECT_EQ(error->path, path(2));
  file->sync().wait();
}

TEST_F(Striped, ASlowDriveDoesNotStallTheOthersQueues) {
  constexpr int kTransfers = 6;
  const auto slow = std::make_shared<Gate>();  // does nothing until it is opened
  queues_.push_back(std::make_unique<DriveQueue>(DriveQueueOptions{.block_bytes = 48 * kKiB, .queue_depth = 4},
                                                 std::make_unique<GateBackend>(slow)));
  const StripeLayout layout(kUnit, {1, 1});
  const auto file = make(layout, 8 * kUnit * kTransfers);
  const AlignedBuffer memory(8 * kUnit * kTransfers);
  std::vector<Completion> pending;
  for (std::uint64_t i = 0; i < kTransfers; ++i)
    pending.push_back(file->write(8 * i * kUnit, memory.part(8 * i * kUnit, 8 * kUnit), Priority::background));
  const TimePoint deadline = Clock::now() + std::chrono::minutes(1);
  while (queues_[1]->stats().written_bytes < 4 * kUnit * kTransfers && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(queues_[1]->stats().written_bytes, 4 * kUnit * kTransfers) << "it waits for the slow drive";
  EXPECT_EQ(queues_[0]->stats().written_bytes, 0u);
  for (const Completion& transfer : pending) EXPECT_FALSE(transfer.done());
  slow->open();
  when_all(pending).wait();
}

TEST_F(Striped, EmptyTransfersSucceedAtOnce) {
  const auto file = make(StripeLayout(kUnit, {1, 1}), 4 * kUnit);
  EXPECT_TRUE(file->read(kUnit, {}, Priority::foreground).done());
  EXPECT_TRUE(file->write(kUnit, {}, Priority::foreground).done());
}

TEST_F(Striped, ManyTransfersOfSeveralThreadsAtOnce) {
  constexpr unsigned kThreads = 4;
  constexpr std::uint64_t kRegion = 32 * kUnit;
  const auto file = make(StripeLayout(kUnit, {2, 1, 3}), kThreads * kRegion);
  const AlignedBuffer memory(2 * kThreads * kRegion);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto region = memory.part(t * kRegion, kRegion);
      const auto back = memory.part((kThreads + t) * kRegion, kRegion);
      for (std::uint64_t round = 0; round < 8; ++round) {
        fill_pattern(region, random_bits(round, t));
        std::vector<Completion> writes;
        for (std::uint64_t at = 0; at < kRegion; at += 20 * kKiB)
          writes.push_back(file->write(t * kRegion + at, region.subspan(at, std::min(20 * kKiB, kRegion - at)),
                                       Priority::background));
        when_all(writes).wait();
        file->read(t * kRegion, back, Priority::foreground).wait();
        if (!same_bytes(region, back)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace hoist::aio::striped_file_test
