// SPDX-License-Identifier: Apache-2.0
// Transfers of any length, offset and address: the plan exhaustively, the bytes over every backend and over stripes.
#include <filesystem>
#include <fstream>
#include <thread>

#include <gtest/gtest.h>

#include <hoist/aio/detail/unaligned_plan.hpp>
#include <hoist/aio/unaligned.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"
#include "ways.hpp"

namespace hoist::aio::unaligned_test {
namespace {

using detail::plan_unaligned;

// With sectors of 8 bytes every case there is can be tried.
TEST(UnalignedPlan, EveryLengthOffsetAddressAndBounceIsCutWithoutGap) {
  constexpr std::uint64_t kSector = 8;
  for (std::uint64_t length = 1; length <= 5 * kSector; ++length) {
    for (std::uint64_t offset = 0; offset < 2 * kSector; ++offset) {
      for (std::uint64_t address = 0; address < kSector; ++address) {
        for (const std::uint64_t bounce : {kSector, 2 * kSector, 8 * kSector}) {
          SCOPED_TRACE(testing::Message()
                       << length << " at " << offset << ", address " << address << ", bounce " << bounce);
          std::uint64_t at = offset;
          std::uint64_t bounced_sectors_end = 0;
          for (const auto& piece : plan_unaligned({offset, length, address}, kSector, bounce)) {
            ASSERT_EQ(piece.offset_bytes, at);
            ASSERT_GT(piece.length_bytes, 0u);
            if (piece.direct) {
              ASSERT_EQ(piece.offset_bytes % kSector, 0u);
              ASSERT_EQ(piece.length_bytes % kSector, 0u);
              ASSERT_EQ((address + piece.offset_bytes - offset) % kSector, 0u);
            } else {
              ASSERT_LE(piece.cover_end(kSector) - piece.cover_begin(kSector), bounce);
              ASSERT_GE(piece.cover_begin(kSector), bounced_sectors_end) << "two pieces of one write share a sector";
              bounced_sectors_end = piece.cover_end(kSector);
            }
            at = piece.end_bytes();
          }
          ASSERT_EQ(at, offset + length);
        }
      }
    }
  }
}

TEST(UnalignedPlan, WhatIsAlignedIsNeverBounced) {
  const auto pieces = plan_unaligned({8, 64, 16}, 8, 8);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_TRUE(pieces[0].direct);
  const auto with_ends = plan_unaligned({5, 30, 13}, 8, 8);  // 5..8, 8..32, 32..35
  ASSERT_EQ(with_ends.size(), 3u);
  EXPECT_TRUE(with_ends[1].direct);
  EXPECT_EQ(with_ends[1].length_bytes, 24u);
}

constexpr std::uint64_t kBlock = 4 * kKiB;  // the smallest there is

class UnalignedTransfers : public testing::TestWithParam<Way> {
 protected:
  UnalignedTransfers() : memory_(kMemoryBytes) {}
  void SetUp() override {
    if (const auto reason = unavailable(GetParam())) GTEST_SKIP() << *reason;
    DriveQueueOptions options = queue_options(GetParam(), memory_);
    options.block_bytes = kBlock;
    queues_ = make_queues(2, GetParam(), options);
  }

  std::unique_ptr<StripedFile> make_file(const StripeLayout& layout, std::uint64_t bytes) const {
    return make_striped_file(directory_, queues_, layout, bytes);
  }
  std::vector<std::byte> contents(StripedFile& file, std::uint64_t bytes) const {
    const AlignedBuffer whole(bytes);
    file.read(0, whole.span(), Priority::foreground).wait();
    return {whole.span().begin(), whole.span().end()};
  }

  static constexpr std::uint64_t kMemoryBytes = 2 * kMiB;
  test::TempDirectory directory_;
  AlignedBuffer memory_;
  DriveQueues queues_;
};

const StripeLayout& two_drives() {
  static const StripeLayout layout(kBlock, {2, 1});  // every third block is on the other drive
  return layout;
}

// Lengths from 1 byte to 3 blocks: every length on the threads backend, every 11th on the others, which do not depend
// on alignment. Offsets and addresses run through all residues. Each transfer has 20 KiB of file and of memory to
// itself, so that many can be in flight at once.
TEST_P(UnalignedTransfers, EveryLengthAtEveryAlignmentAcrossStripes) {
  constexpr std::uint64_t kRoom = 5 * kBlock;
  constexpr std::uint64_t kAtOnce = 96;
  constexpr std::uint64_t kLengths = 3 * kBlock;
  const std::uint64_t stride = GetParam().backend == BackendKind::threads && !GetParam().faulty ? 1 : 11;
  const auto file = make_file(two_drives(), kAtOnce * kRoom);
  const AlignedBuffer sources(kAtOnce * kRoom);
  const AlignedBuffer targets(kAtOnce * kRoom);
  fill_pattern(sources.span(), 4);
  file->write(0, sources.span(), Priority::background).wait();
  std::vector<std::byte> expected = contents(*file, kAtOnce * kRoom);
  Unaligned unaligned({.bounce_bytes = kMiB, .piece_bytes = 2 * kBlock});

  for (std::uint64_t first = 1; first <= kLengths; first += kAtOnce * stride) {
    std::vector<Completion> pending;
    const auto for_each = [&](auto act) {
      for (std::uint64_t index = 0; index < kAtOnce && first + index * stride <= kLengths; ++index) {
        const std::uint64_t length = first + index * stride;
        const std::uint64_t room = index * kRoom;
        // Odd factors run through all residues of 4096; every third transfer has memory aligned to the file.
        const std::uint64_t offset = length * 2741 % kBlock;
        const std::uint64_t address = length % 3 == 0 ? offset : length * 1637 % kBlock;
        act(room + offset, room + address, length);
      }
    };
    fill_pattern(sources.span(), first);
    for_each([&](std::uint64_t offset, std::uint64_t address, std::uint64_t length) {
      pending.push_back(unaligned.write(*file, offset, sources.part(address, length), Priority::background));
      std::copy_n(sources.data() + address, length, expected.begin() + static_cast<std::ptrdiff_t>(offset));
    });
    when_all(pending).wait();
    pending.clear();
    std::fill(targets.span().begin(), targets.span().end(), std::byte{0xEE});
    for_each([&](std::uint64_t offset, std::uint64_t address, std::uint64_t length) {
      pending.push_back(unaligned.read(*file, offset, targets.part(address, length), Priority::foreground));
    });
    when_all(pending).wait();
    for_each([&](std::uint64_t offset, std::uint64_t address, std::uint64_t length) {
      const std::span target = targets.part(address, length);
      ASSERT_TRUE(same_bytes(target, sources.part(address, length))) << length << " bytes at " << offset;
      std::fill(target.begin(), target.end(), std::byte{0xEE});
    });
    ASSERT_TRUE(std::all_of(targets.span().begin(), targets.span().end(), [](std::byte b) {
      return b == std::byte{0xEE};
    })) << "a read wrote beside its target";
    ASSERT_TRUE(same_bytes(contents(*file, kAtOnce * kRoom), expected)) << "a write changed its neighbours";
  }
}

// Neighbours that share sectors, all in flight together: what each keeps of a sector must not undo another's part.
TEST_P(UnalignedTransfers, AThousandWritesThatShareSectorsKeepEachOthersBytes) {
  constexpr std::uint64_t kBytes = 512 * kKiB;
  const auto file = make_file(two_drives(), kBytes);
  const AlignedBuffer source(kBytes);
  const AlignedBuffer target(kBytes);
  fill_pattern(source.span(), 12);
  Unaligned unaligned({.bounce_bytes = 256 * kKiB, .piece_bytes = 2 * kBlock});
  Rng rng(8);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;
  for (std::uint64_t at = 0; at < kBytes;) {
    const std::uint64_t length = std::min(1 + rng.below(900), kBytes - at);
    ranges.emplace_back(at, length);
    at += length;
  }
  ASSERT_GE(ranges.size(), 1000u);
  for (std::size_t i = ranges.size(); i-- > 1;) std::swap(ranges[i], ranges[rng.below(i + 1)]);

  std::vector<Completion> pending(ranges.size());
  const auto start_quarter = [&](std::size_t thread) {
    for (std::size_t i = thread; i < ranges.size(); i += 4)
      pending[i] = unaligned.write(*file, ranges[i].first, source.part(ranges[i].first, ranges[i].second),
                                   static_cast<Priority>(i / 4 % 2));
  };
  std::vector<std::jthread> threads;
  for (std::size_t thread = 0; thread < 4; ++thread) threads.emplace_back(start_quarter, thread);
  threads.clear();
  when_all(pending).wait();
  EXPECT_TRUE(same_bytes(contents(*file, kBytes), source.span())) << "seed 8";

  for (std::size_t i = 0; i < ranges.size(); ++i)
    pending[i] =
        unaligned.read(*file, ranges[i].first, target.part(ranges[i].first, ranges[i].second), Priority::foreground);
  when_all(pending).wait();
  EXPECT_TRUE(same_bytes(target.span(), source.span()));
}

TEST_P(UnalignedTransfers, OneBounceBufferIsEnough) {
  const auto file = make_file(StripeLayout::one_drive(), 64 * kBlock);
  Unaligned unaligned({.bounce_bytes = kBlock, .piece_bytes = kBlock});
  const auto source = memory_.part(7, 40 * kBlock + 11);
  const auto target = memory_.part(100 * kBlock + 3, source.size());
  std::generate(source.begin(), source.end(), [i = 0]() mutable { return static_cast<std::byte>(++i * 7); });
  std::vector<Completion> pending;
  for (std::uint64_t i = 0; i < 3; ++i) pending.push_back(unaligned.write(*file, 5, source, Priority::background));
  when_all(pending).wait();
  unaligned.read(*file, 5, target, Priority::foreground).wait();
  EXPECT_TRUE(same_bytes(source, target));
}

TEST_P(UnalignedTransfers, AFileOfAnyLengthIsReadToItsLastByteAndNotBeyond) {
  std::string text(10007, ' ');
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i % 23);
  std::ofstream(directory_ / "odd") << text;
  StripedFile file(*queues_[0], File(directory_ / "odd", {}));
  Unaligned unaligned;
  std::string back(text.size(), '?');
  unaligned.read(file, 0, std::as_writable_bytes(std::span(back)), Priority::foreground).wait();
  EXPECT_EQ(back, text);
  const auto last = std::as_writable_bytes(std::span(back)).first(2);
  unaligned.read(file, 10005, last, Priority::foreground).wait();
  EXPECT_EQ(back.substr(0, 2), text.substr(10005));
  const auto beyond = io_error_of(unaligned.read(file, 10006, last, Priority::foreground));
  ASSERT_TRUE(beyond);
  EXPECT_EQ(beyond->code, 0);
  EXPECT_TRUE(io_error_of(unaligned.read(file, 1 << 20, last, Priority::foreground)));

  // A write past the end: what was between reads as zeros, and the file ends at a whole sector.
  unaligned.write(file, 20001, std::as_bytes(std::span(text)).first(3), Priority::background).wait();
  EXPECT_EQ(std::filesystem::file_size(directory_ / "odd"), 20480u);
  std::string tail(20, '?');
  unaligned.read(file, 19990, std::as_writable_bytes(std::span(tail)), Priority::foreground).wait();
  EXPECT_EQ(tail, std::string(11, '\0') + "abc" + std::string(6, '\0'));
}

TEST_P(UnalignedTransfers, AnEmptyTransferSucceeds) {
  const auto file = make_file(StripeLayout::one_drive(), kBlock);
  Unaligned unaligned;
  EXPECT_TRUE(unaligned.read(*file, 77, {}, Priority::foreground).done());
  EXPECT_TRUE(unaligned.write(*file, 77, {}, Priority::foreground).done());
}

TEST_P(UnalignedTransfers, TransfersOutliveIt) {
  const auto file = make_file(StripeLayout::one_drive(), 64 * kBlock);
  Completion pending;
  fill_pattern(memory_.span(), 3);
  {
    Unaligned unaligned({.bounce_bytes = kBlock, .piece_bytes = kBlock});
    pending = unaligned.write(*file, 1, memory_.part(3, 30 * kBlock), Priority::background);
  }
  pending.wait();
  const auto bytes = contents(*file, 64 * kBlock);
  EXPECT_TRUE(same_bytes(std::span(bytes).subspan(1, 30 * kBlock), memory_.part(3, 30 * kBlock)));
}

INSTANTIATE_TEST_SUITE_P(Backends, UnalignedTransfers, testing::ValuesIn(kWays), name_of_way);

TEST(Unaligned, AFailureIsDeliveredOnceAndTheRestIsNotStarted) {
  const test::TempDirectory directory;
  const DriveQueueOptions options{.backend = BackendKind::threads, .block_bytes = kBlock, .queue_depth = 1};
  const auto faults = std::make_shared<test::Faults>(1);
  DriveQueue queue(options, test::make_faulty_backend(options, faults));
  StripedFile file(queue, File(directory / "file", {.mode = OpenMode::create, .reserve_bytes = 64 * kBlock}));
  const AlignedBuffer memory(64 * kBlock);
  Unaligned unaligned({.bounce_bytes = kBlock, .piece_bytes = kBlock});
  faults->add({.kind = test::Fault::Kind::error, .operation = Operation::write, .first = 2, .code = ENOSPC});
  const auto error = io_error_of(unaligned.write(file, 0, memory.part(1, 30 * kBlock), Priority::background));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, ENOSPC);
  EXPECT_EQ(error->offset_bytes, 2 * kBlock);
  EXPECT_EQ(faults->blocks(Operation::write), 3u);
  unaligned.write(file, 0, memory.part(1, 30 * kBlock), Priority::background).wait();  // nothing is left claimed
}

TEST(Unaligned, ImpossibleOptionsAreRefused) {
  EXPECT_THROW(Unaligned({.bounce_bytes = 4096, .piece_bytes = 8192}), UsageError);
  EXPECT_THROW(Unaligned({.piece_bytes = 1000}), UsageError);
  EXPECT_THROW(Unaligned({.piece_bytes = 0}), UsageError);
}

}  // namespace
}  // namespace hoist::aio::unaligned_test
