// SPDX-License-Identifier: Apache-2.0
// Single calls beyond 2 GiB and beyond 4 GiB, where a 32-bit length or offset anywhere would show. Needs as much free
// memory and disk; with several registered slices, over two drives, and at odd places.
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include <hoist/aio/unaligned.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "aio_test_support.hpp"
#include "ways.hpp"

namespace hoist::aio::large_transfer_test {
namespace {

constexpr std::uint64_t kBytes = 4 * kGiB + 3 * kMiB + 12 * kKiB;
constexpr std::uint64_t kSlice = 1000 * kMiB;  // no power of two: some blocks straddle slices

std::uint64_t available_memory() {
  std::ifstream info("/proc/meminfo");
  for (std::string word; info >> word;) {
    std::uint64_t kib = 0;
    if (word == "MemAvailable:" && info >> kib) return kib * kKiB;
  }
  return 0;
}

// Word i of the file is a function of i alone.
constexpr std::uint64_t word(std::uint64_t index) { return index * 0x9E3779B97F4A7C15ull + 1; }

void fill_words(std::span<std::byte> bytes) {
  for (std::uint64_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t value = word(at / 8);
    std::memcpy(bytes.data() + at, &value, 8);
  }
}

// The first byte that differs from the file's own; the length when none does. `first` is a multiple of 8.
std::uint64_t first_difference(std::span<const std::byte> bytes, std::uint64_t first) {
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
    if (available_memory() < kBytes + 2 * kGiB) GTEST_SKIP() << "less than 6 GiB of memory are free";
    if (std::filesystem::space(directory_.path()).available < 2 * kBytes)
      GTEST_SKIP() << "less than 9 GiB of disk are free";
    memory_ = std::make_unique<AlignedBuffer>(kBytes);
    DriveQueueOptions options = queue_options(GetParam(), AlignedBuffer(File::kAlignment));
    options.registered_memory.clear();
    for (std::uint64_t at = 0; GetParam().registered && at < kBytes; at += kSlice)
      options.registered_memory.push_back(memory_->part(at, std::min(kSlice, kBytes - at)));
    for (int drive = 0; drive < 2; ++drive)
      queues_.push_back(std::unique_ptr<DriveQueue>(new DriveQueue(make_queue(GetParam(), options))));
  }
  StripedFile make(const StripeLayout& layout) {
    std::vector<StripeDrive> drives;
    for (unsigned d = 0; d < layout.drive_count(); ++d)
      drives.push_back(
          {queues_[d].get(), File(directory_ / std::to_string(d),
                                  {.mode = OpenMode::create, .reserve_bytes = layout.drive_bytes(d, kBytes)})});
    return StripedFile(layout, std::move(drives));
  }
  void wipe() { std::fill(memory_->span().begin(), memory_->span().end(), std::byte{0}); }

  test::TempDirectory directory_;
  std::unique_ptr<AlignedBuffer> memory_;
  std::vector<std::unique_ptr<DriveQueue>> queues_;
};

TEST_P(LargeTransfers, AreByteExactInOneCall) {
  for (const StripeLayout& layout : {StripeLayout::one_drive(), StripeLayout(3 * kMiB, {2, 1})}) {
    SCOPED_TRACE(layout.encode());
    StripedFile file = make(layout);
    fill_words(memory_->span());
    file.write(0, memory_->span(), Priority::background).wait();
    wipe();
    file.read(0, memory_->span(), Priority::foreground).wait();
    ASSERT_EQ(first_difference(memory_->span(), 0), kBytes);

    wipe();
    const auto half = memory_->part(8 * kKiB, 2 * kGiB + 4 * kKiB);
    file.read(2 * kGiB, half, Priority::foreground).wait();
    ASSERT_EQ(first_difference(half, 2 * kGiB), half.size());

    wipe();
    Unaligned door;
    const auto odd = memory_->part(1224, 4 * kGiB + 77);  // aligned to the file, so that nearly all of it is direct
    door.read(file, 1224, odd, Priority::foreground).wait();
    ASSERT_EQ(first_difference(odd, 1224), odd.size());
    for (const std::string& path : file.data_paths()) std::filesystem::remove(path);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, LargeTransfers,
                         testing::Values(kWays[0], kWays[1], Way{.name = "threads", .backend = BackendKind::threads}),
                         name_of_way);

}  // namespace
}  // namespace hoist::aio::large_transfer_test
