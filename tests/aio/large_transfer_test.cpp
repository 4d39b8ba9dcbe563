// SPDX-License-Identifier: Apache-2.0
// Single calls beyond 2 GiB and beyond 4 GiB, where a 32-bit length or offset anywhere would show. With several
// registered slices, over two drives, and at odd places. Needs 6 GiB of free memory and 8 GiB of free disk.
#include <filesystem>

#include <gtest/gtest.h>

#include <hoist/aio/unaligned.hpp>
#include <hoist/core/kernel_files.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"
#include "ways.hpp"

namespace hoist::aio::large_transfer_test {
namespace {

constexpr std::uint64_t kBytes = 4 * kGiB + 3 * kMiB + 12 * kKiB;
constexpr std::uint64_t kSlice = 1000 * kMiB;  // no power of two: some blocks straddle slices

// Word i of the file is a function of i alone.
constexpr std::uint64_t word(std::uint64_t index) { return index * 0x9E3779B97F4A7C15ull + 1; }

void fill_words(std::span<std::byte> bytes) {
  for (std::uint64_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t value = word(at / 8);
    std::memcpy(bytes.data() + at, &value, 8);
  }
}

// The first byte that differs from the file's own; the length when none does. `first` is a multiple of 8.
std::uint64_t first_wrong_byte(std::span<const std::byte> bytes, std::uint64_t first) {
  for (std::uint64_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t value = word((first + at) / 8);
    if (std::memcmp(bytes.data() + at, &value, std::min<std::uint64_t>(8, bytes.size() - at)) != 0) return at;
  }
  return bytes.size();
}

class LargeTransfers : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (const auto reason = unavailable(GetParam())) GTEST_SKIP() << *reason;
    if (field_bytes("/proc/meminfo", "MemAvailable").value_or(0) < kBytes + 2 * kGiB)
      GTEST_SKIP() << "less than 6 GiB of memory are free";
    if (std::filesystem::space(directory_.path()).available < 2 * kBytes)
      GTEST_SKIP() << "less than 8 GiB of disk are free";
    memory_ = std::make_unique<AlignedBuffer>(kBytes);
    DriveQueueOptions options = queue_options(GetParam(), AlignedBuffer(File::kAlignment));
    options.registered_memory.clear();
    for (std::uint64_t at = 0; GetParam().registered && at < kBytes; at += kSlice)
      options.registered_memory.push_back(memory_->part(at, std::min(kSlice, kBytes - at)));
    queues_ = make_queues(2, GetParam(), options);
  }
  void wipe() { std::fill(memory_->span().begin(), memory_->span().end(), std::byte{0}); }

  test::TempDirectory directory_;
  std::unique_ptr<AlignedBuffer> memory_;
  DriveQueues queues_;
};

TEST_P(LargeTransfers, AreByteExactInOneCall) {
  for (const StripeLayout& layout : {StripeLayout::one_drive(), StripeLayout(3 * kMiB, {2, 1})}) {
    SCOPED_TRACE(layout.encode());
    const auto file = make_striped_file(directory_, queues_, layout, kBytes);
    fill_words(memory_->span());
    file->write(0, memory_->span(), Priority::background).wait();
    wipe();
    file->read(0, memory_->span(), Priority::foreground).wait();
    ASSERT_EQ(first_wrong_byte(memory_->span(), 0), kBytes);

    wipe();
    const auto half = memory_->part(8 * kKiB, 2 * kGiB + 4 * kKiB);
    file->read(2 * kGiB, half, Priority::foreground).wait();
    ASSERT_EQ(first_wrong_byte(half, 2 * kGiB), half.size());

    wipe();
    Unaligned unaligned;
    const auto odd = memory_->part(1224, 4 * kGiB + 77);  // aligned to the file, so that nearly all of it is direct
    unaligned.read(*file, 1224, odd, Priority::foreground).wait();
    ASSERT_EQ(first_wrong_byte(odd, 1224), odd.size());
    for (const std::string& path : file->data_paths()) std::filesystem::remove(path);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, LargeTransfers,
                         testing::Values(kWays[0], kWays[1], Way{.name = "threads", .backend = BackendKind::threads}),
                         name_of_way);

}  // namespace
}  // namespace hoist::aio::large_transfer_test
