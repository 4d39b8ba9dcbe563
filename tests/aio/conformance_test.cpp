// SPDX-License-Identifier: Apache-2.0
// The requirements on every backend that moves data, run over each of them, with registered memory and without.
#include <atomic>
#include <filesystem>
#include <thread>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/tests/support/full_table.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"
#include "ways.hpp"

namespace hoist::aio::conformance_test {
namespace {

constexpr std::uint64_t kMaster = 20260;  // seed of every random choice here

class Conformance : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (const auto reason = unavailable(GetParam())) GTEST_SKIP() << *reason;
  }

  DriveQueueOptions options(const AlignedBuffer& memory) const { return queue_options(GetParam(), memory); }
  DriveQueue make_queue(const DriveQueueOptions& options) const { return aio::make_queue(GetParam(), options); }

  File make_file(const std::string& name, std::uint64_t bytes) const {
    return File(directory_ / name, {.mode = OpenMode::create, .reserve_bytes = bytes});
  }

  // The file as another process would read it.
  static std::vector<std::byte> contents(const std::string& path) {
    std::vector<std::byte> bytes(std::filesystem::file_size(path));
    const int descriptor = ::open(path.c_str(), O_RDONLY);
    EXPECT_EQ(::pread(descriptor, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    ::close(descriptor);
    return bytes;
  }

  test::TempDirectory directory_;
};

TEST_P(Conformance, BlocksInFlightNeedNoDescriptorEach) {
  const AlignedBuffer memory(kMiB);
  const File file = make_file("deep", kMiB);
  DriveQueueOptions deep = options(memory);
  deep.block_bytes = 4 * kKiB;
  deep.queue_depth = 256;
  DriveQueue queue = make_queue(deep);
  const test::FullTable few(4);
  EXPECT_NO_THROW(queue.write(file, 0, memory.part(0, kMiB), Priority::foreground).wait());
}

TEST_P(Conformance, EveryLengthOffsetBlockAndDepthIsByteExact) {
  constexpr std::uint64_t kFileBytes = 8 * kMiB;
  const AlignedBuffer memory(2 * kFileBytes);
  const auto source = memory.part(0, kFileBytes);
  const auto target = memory.part(kFileBytes, kFileBytes);
  const File file = make_file("matrix", kFileBytes);
  fill_pattern(source, kMaster);
  make_queue(options(memory)).write(file, 0, source, Priority::foreground).wait();
  std::vector<std::byte> expected(source.begin(), source.end());

  std::uint64_t round = 0;
  for (const std::uint64_t block_bytes : {4 * kKiB, 60 * kKiB, kMiB}) {
    for (const unsigned queue_depth : {1u, 3u, 32u}) {
      DriveQueueOptions changed = options(memory);
      changed.block_bytes = block_bytes;
      changed.queue_depth = queue_depth;
      DriveQueue queue = make_queue(changed);
      for (const std::uint64_t length :
           {4 * kKiB, 8 * kKiB, 64 * kKiB, 68 * kKiB, kMiB - 4 * kKiB, kMiB, kMiB + 4 * kKiB, 3 * kMiB + 12 * kKiB}) {
        for (const std::uint64_t offset : {std::uint64_t{0}, 4 * kKiB, kMiB + 8 * kKiB}) {
          SCOPED_TRACE(testing::Message() << "block " << block_bytes << " depth " << queue_depth << " length " << length
                                          << " offset " << offset);
          fill_pattern(source.first(length), kMaster + ++round);
          queue.write(file, offset, source.first(length), Priority::background).wait();
          std::copy_n(source.begin(), length, expected.begin() + static_cast<std::ptrdiff_t>(offset));
          queue.read(file, offset, target.first(length), Priority::foreground).wait();
          ASSERT_TRUE(same_bytes(target.first(length), source.first(length)));
        }
      }
      ASSERT_EQ(queue.stats().retries > 0, GetParam().faulty);
    }
  }
  EXPECT_TRUE(same_bytes(contents(file.path()), expected)) << "bytes outside of the transfers changed";
}

TEST_P(Conformance, ManyTransfersOfSeveralThreadsAtOnce) {
  constexpr unsigned kThreads = 4;
  constexpr std::uint64_t kRegionBytes = 2 * kMiB;
  constexpr int kRounds = 60;
  const AlignedBuffer memory(2 * kThreads * kRegionBytes);
  const File file = make_file("threads", kThreads * kRegionBytes);
  DriveQueueOptions changed = options(memory);
  changed.block_bytes = 64 * kKiB;
  changed.queue_depth = 8;
  DriveQueue queue = make_queue(changed);
  std::atomic<int> wrong{0};

  // Each thread owns a region of the file, and a shadow of it; writes and reads of disjoint halves overlap in time.
  const auto work = [&](unsigned index) {
    const auto region = memory.part(index * kRegionBytes, kRegionBytes);
    const auto scratch = memory.part((kThreads + index) * kRegionBytes, kRegionBytes);
    const std::uint64_t base = index * kRegionBytes;
    Rng rng(random_bits(kMaster, index));
    fill_pattern(region, rng.bits());
    queue.write(file, base, region, Priority::background).wait();
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Completion> pending;
      const std::uint64_t half = rng.below(2) * (kRegionBytes / 2);
      const std::uint64_t other = kRegionBytes / 2 - half;
      for (std::uint64_t at = 0; at < kRegionBytes / 2;) {
        const std::uint64_t bytes = std::min(kRegionBytes / 2 - at, (1 + rng.below(100)) * File::kAlignment);
        fill_pattern(region.subspan(half + at, bytes), rng.bits());
        const auto priority = static_cast<Priority>(rng.below(kPriorityCount));
        pending.push_back(queue.write(file, base + half + at, region.subspan(half + at, bytes), priority));
        pending.push_back(queue.read(file, base + other + at, scratch.subspan(other + at, bytes), priority));
        at += bytes;
      }
      when_all(pending).wait();
      if (!same_bytes(region.subspan(other, kRegionBytes / 2), scratch.subspan(other, kRegionBytes / 2))) ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0) << "seed " << kMaster;
  EXPECT_TRUE(same_bytes(contents(file.path()), memory.part(0, kThreads * kRegionBytes))) << "seed " << kMaster;
}

TEST_P(Conformance, ThousandsOfTransfersInFlightAtOnce) {
  constexpr std::uint64_t kTransfers = 2000;
  const AlignedBuffer memory(2 * 16 * kMiB);
  const File file = make_file("thousands", 16 * kMiB);
  DriveQueueOptions changed = options(memory);
  changed.block_bytes = 8 * kKiB;
  changed.queue_depth = 64;
  DriveQueue queue = make_queue(changed);
  Rng rng(kMaster);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;  // 4 to 12 KiB: one block or two
  for (std::uint64_t at = 0; ranges.size() < kTransfers;) {
    ranges.emplace_back(at, (1 + rng.below(3)) * 4 * kKiB);
    at += ranges.back().second;
    if (at > 16 * kMiB - 12 * kKiB) break;
  }
  ASSERT_GE(ranges.size(), 1000u);
  fill_pattern(memory.part(0, 16 * kMiB), kMaster);
  std::vector<Completion> pending;
  for (const auto& [offset, length] : ranges)
    pending.push_back(
        queue.write(file, offset, memory.part(offset, length), static_cast<Priority>(rng.below(kPriorityCount))));
  when_all(pending).wait();
  pending.clear();
  for (const auto& [offset, length] : ranges)
    pending.push_back(queue.read(file, offset, memory.part(16 * kMiB + offset, length),
                                 static_cast<Priority>(rng.below(kPriorityCount))));
  when_all(pending).wait();
  const std::uint64_t bytes = ranges.back().first + ranges.back().second;
  EXPECT_TRUE(same_bytes(memory.part(0, bytes), memory.part(16 * kMiB, bytes)));
  const auto on_drive = contents(file.path());
  EXPECT_TRUE(same_bytes(std::span(on_drive).first(bytes), memory.part(0, bytes)));
}

TEST_P(Conformance, MemoryThatIsNotRegisteredAndBlocksAcrossTwoSlicesWork) {
  const AlignedBuffer memory(2 * kMiB);
  const AlignedBuffer outside(2 * kMiB);
  DriveQueueOptions changed = options(memory);
  changed.block_bytes = 512 * kKiB;
  if (GetParam().registered)
    changed.registered_memory = {memory.part(0, 700 * kKiB), memory.part(700 * kKiB, 1348 * kKiB)};
  DriveQueue queue = make_queue(changed);
  const File file = make_file("slices", 2 * kMiB);
  fill_pattern(memory.span(), kMaster);
  queue.write(file, 0, memory.span(), Priority::foreground).wait();
  queue.read(file, 0, outside.span(), Priority::foreground).wait();
  EXPECT_TRUE(same_bytes(memory.span(), outside.span()));
  EXPECT_TRUE(same_bytes(memory.span(), contents(file.path())));
}

TEST_P(Conformance, ReadingBeyondTheEndFailsAndSaysWhere) {
  const AlignedBuffer memory(kMiB);
  DriveQueueOptions changed = options(memory);
  changed.block_bytes = 64 * kKiB;
  DriveQueue queue = make_queue(changed);
  const File file = make_file("short", 256 * kKiB);
  queue.write(file, 0, memory.part(0, 256 * kKiB), Priority::foreground).wait();

  const auto beyond = io_error_of(queue.read(file, 256 * kKiB, memory.part(0, 4 * kKiB), Priority::foreground));
  ASSERT_TRUE(beyond);
  EXPECT_EQ(beyond->code, 0);
  EXPECT_EQ(beyond->operation, "read");
  EXPECT_EQ(beyond->path, file.path());
  EXPECT_EQ(beyond->offset_bytes, 256 * kKiB);

  const auto across = io_error_of(queue.read(file, 192 * kKiB, memory.part(0, 128 * kKiB), Priority::foreground));
  ASSERT_TRUE(across);
  EXPECT_EQ(across->code, 0);
  EXPECT_EQ(across->offset_bytes, 256 * kKiB);

  // An end that is not aligned: the last sector can never be read whole.
  ASSERT_EQ(::truncate(file.path().c_str(), 100 * 1000), 0);
  const auto within = io_error_of(queue.read(file, 96 * kKiB, memory.part(0, 4 * kKiB), Priority::foreground));
  ASSERT_TRUE(within);
  EXPECT_EQ(within->code, 0);
}

TEST_P(Conformance, AnErrorCarriesOperationPathOffsetAndErrno) {
  const AlignedBuffer memory(kMiB);
  DriveQueue queue = make_queue(options(memory));
  static_cast<void>(make_file("read_only", kMiB));
  const File file(directory_ / "read_only", {.mode = OpenMode::read_only});
  const auto error = io_error_of(queue.write(file, 64 * kKiB, memory.part(0, 8 * kKiB), Priority::background));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->operation, "write");
  EXPECT_EQ(error->path, file.path());
  EXPECT_EQ(error->offset_bytes, 64 * kKiB);
  EXPECT_EQ(error->length_bytes, 8 * kKiB);
  EXPECT_EQ(error->code, EBADF);
  EXPECT_EQ(queue.stats().written_bytes, 0u);
}

TEST_P(Conformance, SyncAndAnEmptyTransferSucceed) {
  const AlignedBuffer memory(kMiB);
  DriveQueue queue = make_queue(options(memory));
  const File file = make_file("sync", kMiB);
  queue.sync(file).wait();
  queue.write(file, 0, memory.part(0, kMiB), Priority::background).wait();
  queue.sync(file).wait();
  EXPECT_TRUE(queue.read(file, 0, {}, Priority::foreground).done());
  EXPECT_TRUE(queue.write(file, 0, std::span<const std::byte>{}, Priority::foreground).done());
}

TEST_P(Conformance, CountsBytesAndBusyTime) {
  const AlignedBuffer memory(4 * kMiB);
  DriveQueue queue = make_queue(options(memory));
  const File file = make_file("stats", 4 * kMiB);
  const TimePoint start = Clock::now();
  queue.write(file, 0, memory.span(), Priority::background).wait();
  queue.read(file, 0, memory.part(0, kMiB), Priority::foreground).wait();
  const Nanoseconds wall = Clock::now() - start;
  const DriveQueue::Stats stats = queue.stats();
  EXPECT_EQ(stats.written_bytes, 4 * kMiB);
  EXPECT_EQ(stats.read_bytes, kMiB);
  EXPECT_GT(stats.write_busy, Nanoseconds::zero());
  EXPECT_GT(stats.read_busy, Nanoseconds::zero());
  EXPECT_LE(stats.write_busy + stats.read_busy, wall);  // they did not overlap
}

TEST_P(Conformance, AContinuationMayStartTheNextTransfer) {
  const AlignedBuffer memory(64 * kKiB);
  DriveQueue queue = make_queue(options(memory));
  const File file = make_file("chain", 64 * kKiB);
  Promise all;
  const Completion finished = all.completion();
  int links = 0;
  std::function<void(std::exception_ptr)> next = [&](std::exception_ptr error) {
    if (error) return all.fail(error);
    if (++links == 50) return all.complete();
    queue.write(file, 0, memory.span(), Priority::foreground).then(next);
  };
  queue.write(file, 0, memory.span(), Priority::foreground).then(next);
  finished.wait();
  EXPECT_EQ(links, 50);
}

TEST_P(Conformance, DestructionFinishesEverythingThatWasStarted) {
  const AlignedBuffer memory(16 * kMiB);
  const File file = make_file("drain", 16 * kMiB);
  fill_pattern(memory.span(), kMaster);
  std::vector<Completion> pending;
  {
    DriveQueueOptions changed = options(memory);
    changed.block_bytes = 64 * kKiB;
    changed.queue_depth = 2;
    DriveQueue queue = make_queue(changed);
    for (std::uint64_t at = 0; at < 16 * kMiB; at += kMiB)
      pending.push_back(queue.write(file, at, memory.part(at, kMiB), Priority::background));
  }
  for (const Completion& completion : pending) {
    EXPECT_TRUE(completion.done());
    EXPECT_EQ(completion.error(), nullptr);
  }
  EXPECT_TRUE(same_bytes(contents(file.path()), memory.span()));
}

// The kernel drops its last reference moments after the close (Linux 6.1: a second); a queue that kept one would hold
// the lock until it goes itself.
TEST_P(Conformance, AClosedFileIsLetGoOfSoon) {
  const AlignedBuffer memory(64 * kKiB);
  DriveQueue queue = make_queue(options(memory));
  for (int round = 0; round < 20; ++round) {
    {
      File file(directory_ / "locked",
                round == 0 ? FileOptions{.mode = OpenMode::create, .reserve_bytes = 64 * kKiB} : FileOptions{});
      ASSERT_TRUE(file.lock(std::chrono::seconds(3))) << "round " << round;
      queue.write(file, 0, memory.span(), Priority::foreground).wait();
      queue.sync(file).wait();
    }
  }
}

TEST_P(Conformance, MoreFilesThanTheRingRegisters) {
  constexpr std::uint64_t kFiles = 100;
  const AlignedBuffer memory(2 * kFiles * 4 * kKiB);
  fill_pattern(memory.part(0, kFiles * 4 * kKiB), kMaster);
  DriveQueue queue = make_queue(options(memory));
  std::vector<File> files;
  for (std::uint64_t i = 0; i < kFiles; ++i) files.push_back(make_file(std::to_string(i), 4 * kKiB));
  std::vector<Completion> pending;
  for (std::uint64_t i = 0; i < kFiles; ++i)
    pending.push_back(queue.write(files[i], 0, memory.part(i * 4 * kKiB, 4 * kKiB), Priority::background));
  when_all(pending).wait();
  for (std::uint64_t i = 0; i < kFiles; ++i)
    pending.push_back(queue.read(files[i], 0, memory.part((kFiles + i) * 4 * kKiB, 4 * kKiB), Priority::foreground));
  when_all(pending).wait();
  EXPECT_TRUE(same_bytes(memory.part(0, kFiles * 4 * kKiB), memory.part(kFiles * 4 * kKiB, kFiles * 4 * kKiB)));
}

TEST_P(Conformance, FilesOutliveQueuesAndQueuesOutliveFiles) {
  const AlignedBuffer memory(64 * kKiB);
  DriveQueue outer = make_queue(options(memory));
  const File file = make_file("outlives", 64 * kKiB);
  for (int i = 0; i < 10; ++i) {
    DriveQueue inner = make_queue(options(memory));
    inner.write(file, 0, memory.span(), Priority::foreground).wait();
    outer.write(file, 0, memory.span(), Priority::foreground).wait();
  }
  EXPECT_EQ(outer.stats().written_bytes, 640 * kKiB);
}

std::size_t descriptor_count() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

TEST_P(Conformance, NoDescriptorIsLeaked) {
  const AlignedBuffer memory(64 * kKiB);
  const auto use = [&](int round) {
    DriveQueue queue = make_queue(options(memory));
    const File file = make_file("descriptors" + std::to_string(round), 64 * kKiB);
    queue.write(file, 0, memory.span(), Priority::foreground).wait();
  };
  use(0);
  const std::size_t before = descriptor_count();
  for (int round = 1; round < 20; ++round) use(round);
  EXPECT_EQ(descriptor_count(), before);
}

TEST_P(Conformance, MemoryFileSystemsWork) {
  std::error_code ignored;
  if (!std::filesystem::is_directory("/dev/shm", ignored)) GTEST_SKIP() << "there is no /dev/shm";
  const test::TempDirectory directory("/dev/shm");
  const AlignedBuffer memory(2 * kMiB);
  DriveQueue queue = make_queue(options(memory));
  const File file(directory / "memory", {.mode = OpenMode::create, .reserve_bytes = kMiB});
  fill_pattern(memory.part(0, kMiB), kMaster);
  queue.write(file, 0, memory.part(0, kMiB), Priority::background).wait();
  queue.sync(file).wait();
  queue.read(file, 0, memory.part(kMiB, kMiB), Priority::foreground).wait();
  EXPECT_TRUE(same_bytes(memory.part(0, kMiB), memory.part(kMiB, kMiB)));
}

TEST_P(Conformance, WorksWithoutDirectTransfersToo) {
  const AlignedBuffer memory(2 * kMiB);
  DriveQueue queue = make_queue(options(memory));
  const File file(directory_ / "buffered", {.mode = OpenMode::create, .reserve_bytes = kMiB, .direct = false});
  EXPECT_FALSE(file.is_direct());
  fill_pattern(memory.part(0, kMiB), kMaster);
  queue.write(file, 0, memory.part(0, kMiB), Priority::background).wait();
  queue.read(file, 0, memory.part(kMiB, kMiB), Priority::foreground).wait();
  EXPECT_TRUE(same_bytes(memory.part(0, kMiB), memory.part(kMiB, kMiB)));
}

INSTANTIATE_TEST_SUITE_P(Backends, Conformance, testing::ValuesIn(kWays), name_of_way);

// The null backend moves nothing, but its transfers are counted, end, and drain like any other.
TEST(NullBackend, CompletesEverythingAndTouchesNothing) {
  const test::TempDirectory directory;
  const File file(directory / "null", {.mode = OpenMode::create, .reserve_bytes = kMiB});
  const AlignedBuffer memory(kMiB);
  fill_pattern(memory.span(), kMaster);
  const std::vector<std::byte> before(memory.span().begin(), memory.span().end());
  std::vector<Completion> pending;
  {
    DriveQueue queue({.backend = BackendKind::null, .block_bytes = 4 * kKiB});
    for (int i = 0; i < 20; ++i) {
      pending.push_back(queue.read(file, 0, memory.span(), Priority::foreground));
      pending.push_back(queue.write(file, 0, memory.span(), Priority::background));
    }
    queue.sync(file).wait();
    when_all(pending).wait();
    EXPECT_EQ(queue.stats().read_bytes, 20 * kMiB);
    EXPECT_EQ(queue.stats().written_bytes, 20 * kMiB);
  }
  EXPECT_TRUE(same_bytes(before, memory.span()));
}

}  // namespace
}  // namespace hoist::aio::conformance_test
