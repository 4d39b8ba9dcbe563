// SPDX-License-Identifier: Apache-2.0
// The fault injector does what it promises, so that tests in other folders can rely on it.
#include <bit>
#include <set>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"

namespace hoist::aio::faulty_backend_test {
namespace {

using test::Fault;
using test::Faults;

constexpr std::uint64_t kFileBytes = kMiB;
constexpr std::uint64_t kSector = Faults::kSectorBytes;

class FaultInjection : public testing::Test {
 protected:
  FaultInjection()
      : file_(directory_ / "file", {.mode = OpenMode::create, .reserve_bytes = kFileBytes}), memory_(2 * kFileBytes) {
    fill_pattern(memory_.span(), 1);
    restart();
    write(0, kFileBytes);  // from the first half of memory_
    reset();
  }

  // A fresh queue with no faults, and none remembered.
  void reset(std::uint64_t seed = 1) {
    queue_.reset();
    faults_ = std::make_shared<Faults>(seed);
    restart();
  }
  void restart() {
    const DriveQueueOptions options{.backend = BackendKind::threads, .block_bytes = 64 * kKiB, .queue_depth = 4};
    queue_ = std::make_unique<DriveQueue>(options, test::make_faulty_backend(options, faults_));
  }
  void write(std::uint64_t offset, std::uint64_t bytes, std::uint64_t from = 0) {
    queue_->write(file_, offset, memory_.part(from + offset, bytes), Priority::foreground).wait();
  }
  std::vector<std::byte> contents() const {
    std::vector<std::byte> bytes(kFileBytes);
    const int descriptor = ::open(file_.path().c_str(), O_RDONLY);
    EXPECT_EQ(::pread(descriptor, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    ::close(descriptor);
    return bytes;
  }
  // Sectors of the file that are not what the first half of memory_ says.
  std::set<std::uint64_t> changed_sectors() const {
    const auto now = contents();
    std::set<std::uint64_t> changed;
    for (std::uint64_t at = 0; at < kFileBytes; at += kSector) {
      if (!same_bytes(std::span(now).subspan(at, kSector), memory_.part(at, kSector))) changed.insert(at / kSector);
    }
    return changed;
  }
  bool holds_new(std::uint64_t offset, std::uint64_t bytes) const {
    return same_bytes(std::span<const std::byte>(contents()).subspan(offset, bytes),
                      memory_.part(kFileBytes + offset, bytes));
  }

  test::TempDirectory directory_;
  File file_;
  AlignedBuffer memory_;  // first half: what is in the file; second half: something else
  std::shared_ptr<Faults> faults_ = std::make_shared<Faults>(1);
  std::unique_ptr<DriveQueue> queue_;
};

TEST_F(FaultInjection, WithoutFaultsNothingHappens) {
  EXPECT_TRUE(changed_sectors().empty());
  EXPECT_EQ(queue_->description(), "faulty (seed 1) over threads (4)");
}

TEST_F(FaultInjection, TheNthWriteFails) {
  faults_->add({.kind = Fault::Kind::error, .operation = Operation::write, .first = 2, .code = ENOSPC});
  write(0, 64 * kKiB);
  write(0, 64 * kKiB);
  const auto error =
      io_error_of(queue_->write(file_, 64 * kKiB, memory_.part(kFileBytes, 64 * kKiB), Priority::background));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ENOSPC);
  write(0, 64 * kKiB);
  EXPECT_EQ(faults_->hits(Fault::Kind::error), 1u);
  EXPECT_TRUE(changed_sectors().empty());
}

TEST_F(FaultInjection, PathsSelect) {
  faults_->add({.kind = Fault::Kind::error, .path_contains = "elsewhere", .count = Faults::kForever});
  write(0, 64 * kKiB);
  EXPECT_EQ(faults_->hits(Fault::Kind::error), 0u);
}

TEST_F(FaultInjection, TheSameSeedHitsTheSameBlocks) {
  const auto hits_of = [&](std::uint64_t seed) {
    reset(seed);
    write(0, kFileBytes);
    faults_->add({.kind = Fault::Kind::error, .count = Faults::kForever, .probability = 0.5});
    std::vector<bool> failed;
    for (int i = 0; i < 64; ++i)
      failed.push_back(
          io_error_of(queue_->read(file_, 0, memory_.part(0, 4 * kKiB), Priority::foreground)).has_value());
    return failed;
  };
  const auto first = hits_of(5);
  EXPECT_EQ(first, hits_of(5));
  EXPECT_NE(first, hits_of(6));
}

TEST_F(FaultInjection, AReadDeliversOneBitWrong) {
  faults_->add({.kind = Fault::Kind::bit_flip});
  const AlignedBuffer target(64 * kKiB);
  queue_->read(file_, 0, target.span(), Priority::foreground).wait();
  int bits = 0;
  for (std::size_t i = 0; i < 64 * kKiB; ++i)
    bits += std::popcount(static_cast<unsigned>(target.data()[i] ^ memory_.data()[i]));
  EXPECT_EQ(bits, 1);
  queue_->read(file_, 0, target.span(), Priority::foreground).wait();
  EXPECT_TRUE(same_bytes(target.span(), memory_.part(0, 64 * kKiB))) << "the medium is sound";
}

TEST_F(FaultInjection, ADroppedWriteChangesNothing) {
  faults_->add({.kind = Fault::Kind::dropped_write});
  write(0, 64 * kKiB, kFileBytes);
  EXPECT_TRUE(changed_sectors().empty());
  EXPECT_EQ(faults_->hits(Fault::Kind::dropped_write), 1u);
}

TEST_F(FaultInjection, ATornWriteStopsEarly) {
  bool wrote_a_part = false;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    reset(seed);
    write(0, kFileBytes);
    faults_->add({.kind = Fault::Kind::torn_write});
    write(128 * kKiB, 64 * kKiB, kFileBytes);
    EXPECT_EQ(faults_->hits(Fault::Kind::torn_write), 1u);
    const auto changed = changed_sectors();
    wrote_a_part = wrote_a_part || !changed.empty();
    EXPECT_LT(changed.size(), 16u);
    std::uint64_t expected = 32;
    for (const std::uint64_t sector : changed) EXPECT_EQ(sector, expected++) << "the first part, and only that";
    EXPECT_TRUE(holds_new(128 * kKiB, changed.size() * kSector));
  }
  EXPECT_TRUE(wrote_a_part);
}

TEST_F(FaultInjection, AMisdirectedWriteLandsElsewhere) {
  for (const std::uint64_t offset : {std::uint64_t{0}, 512 * kKiB, kFileBytes - 4 * kKiB}) {
    reset(offset + 1);
    write(0, kFileBytes);
    faults_->add({.kind = Fault::Kind::misdirected_write});
    write(offset, 4 * kKiB, kFileBytes);
    const auto changed = changed_sectors();
    ASSERT_EQ(changed.size(), 1u);
    EXPECT_NE(*changed.begin(), offset / kSector);
    EXPECT_TRUE(same_bytes(std::span<const std::byte>(contents()).subspan(*changed.begin() * kSector, kSector),
                           memory_.part(kFileBytes + offset, kSector)));
  }
}

TEST_F(FaultInjection, ADelayedBlockTakesThatLong) {
  faults_->add({.kind = Fault::Kind::delay, .delay = std::chrono::milliseconds(30)});
  const TimePoint start = Clock::now();
  write(0, 64 * kKiB);
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(30));
}

TEST_F(FaultInjection, APowerCutLosesOnlyWhatWasNotFlushed) {
  bool some_kept = false;
  bool some_lost = false;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    reset(seed);
    write(0, kFileBytes);
    write(0, kFileBytes);
    queue_->sync(file_).wait();
    faults_->track_unflushed();
    write(0, 256 * kKiB, kFileBytes);
    queue_->sync(file_).wait();
    EXPECT_EQ(faults_->unflushed_count(), 0u);
    write(512 * kKiB, 256 * kKiB, kFileBytes);  // four blocks, not flushed
    EXPECT_EQ(faults_->unflushed_count(), 4u);
    queue_.reset();
    const auto cut = faults_->power_cut(seed);
    EXPECT_EQ(cut.writes_kept + cut.writes_lost + cut.writes_torn, 4u);
    EXPECT_TRUE(holds_new(0, 256 * kKiB)) << "flushed";
    const auto now = contents();
    for (std::uint64_t at = 512 * kKiB; at < 768 * kKiB; at += kSector) {
      const auto sector = std::span(now).subspan(at, kSector);
      const bool kept = same_bytes(sector, memory_.part(kFileBytes + at, kSector));
      EXPECT_TRUE(kept || same_bytes(sector, memory_.part(at, kSector))) << "a sector is old or new";
      (kept ? some_kept : some_lost) = true;
    }
    for (const std::uint64_t sector : changed_sectors())
      EXPECT_TRUE(sector < 64 || (sector >= 128 && sector < 192)) << "untouched sectors stay";
  }
  EXPECT_TRUE(some_kept && some_lost);
}

TEST_F(FaultInjection, APowerCutUnderAnOverwriteShowsOneOfThreeVersions) {
  const AlignedBuffer third(64 * kKiB);
  fill_pattern(third.span(), 99);
  std::set<int> versions;
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    reset(seed);
    write(0, kFileBytes);
    write(0, kFileBytes);
    queue_->sync(file_).wait();
    faults_->track_unflushed();
    write(0, 64 * kKiB, kFileBytes);
    queue_->write(file_, 0, third.span(), Priority::foreground).wait();
    queue_.reset();
    static_cast<void>(faults_->power_cut(seed));
    const auto now = contents();
    for (std::uint64_t at = 0; at < 64 * kKiB; at += kSector) {
      const auto sector = std::span(now).subspan(at, kSector);
      const int version = same_bytes(sector, memory_.part(at, kSector))                ? 0
                          : same_bytes(sector, memory_.part(kFileBytes + at, kSector)) ? 1
                          : same_bytes(sector, third.span().subspan(at, kSector))      ? 2
                                                                                       : 3;
      ASSERT_NE(version, 3) << "seed " << seed;
      versions.insert(version);
    }
  }
  EXPECT_EQ(versions.size(), 3u);
}

TEST_F(FaultInjection, AFailedFlushCoversNothingAndNorDoesTheNext) {
  faults_->track_unflushed();
  write(0, 64 * kKiB, kFileBytes);
  faults_->add({.kind = Fault::Kind::error, .operation = Operation::sync, .code = EIO});
  EXPECT_TRUE(io_error_of(queue_->sync(file_)));
  EXPECT_EQ(faults_->unflushed_count(), 1u);
  queue_->sync(file_).wait();
  EXPECT_EQ(faults_->unflushed_count(), 1u) << "the kernel may have dropped the pages that failed";
}

TEST_F(FaultInjection, AFlushCoversOnlyWritesThatHadEndedBeforeIt) {
  Faults faults(1);
  faults.track_unflushed();
  const Block block{.operation = Operation::write, .file = &file_, .offset_bytes = 0, .length_bytes = 4 * kKiB};
  const Block flush{.operation = Operation::sync, .file = &file_};
  const std::uint64_t early = faults.write_begins(block);
  faults.write_ended(early);
  const std::uint64_t late = faults.write_begins(block);
  const std::uint64_t sync = faults.sync_begins(flush);
  faults.write_ended(late);
  faults.sync_succeeded(sync);
  EXPECT_EQ(faults.unflushed_count(), 1u);
}

TEST_F(FaultInjection, AFlushDoesNotCoverAnotherFile) {
  const File other(directory_ / "other", {.mode = OpenMode::create, .reserve_bytes = kFileBytes});
  faults_->track_unflushed();
  write(0, 64 * kKiB, kFileBytes);
  queue_->sync(other).wait();
  EXPECT_EQ(faults_->unflushed_count(), 1u);
}

}  // namespace
}  // namespace hoist::aio::faulty_backend_test
