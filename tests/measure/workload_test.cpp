// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <hoist/core/units.hpp>
#include <hoist/measure/workload.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::measure::workload_test {
namespace {

constexpr std::uint64_t kFileBytes = 8 * kMiB;
constexpr std::uint64_t kBlockBytes = 64 * kKiB;

class WorkloadTest : public ::testing::TestWithParam<aio::BackendKind> {
 protected:
  WorkloadTest()
      : file_(directory_.path().string(), kFileBytes),
        buffers_(8 * kBlockBytes, -1),
        drive_(file_, buffers_, {.backend = GetParam(), .block_bytes = kBlockBytes, .queue_depth = 8}) {
    fill_files(files_, nullptr, {});
  }

  test::TempDirectory directory_;
  ScratchFile file_;
  BlockBuffers buffers_;
  Drive drive_;
  ScratchFile* files_[1] = {&file_};
  Drive* drives_[1] = {&drive_};
};

std::string backend_name(const ::testing::TestParamInfo<aio::BackendKind>& kind) {
  return kind.param == aio::BackendKind::threads ? "threads" : "io_uring";
}
INSTANTIATE_TEST_SUITE_P(Backends, WorkloadTest,
                         ::testing::Values(aio::BackendKind::automatic, aio::BackendKind::threads), backend_name);

TEST_P(WorkloadTest, MovesExactlyTheBytesAskedFor) {
  for (const Pattern pattern : {Pattern::read, Pattern::write, Pattern::mixed}) {
    const aio::DriveQueue::Stats before = drive_.queue().stats();
    const WorkloadResult result =
        run_workload(drives_, {.pattern = pattern, .region = {kMiB, 3 * kMiB}, .bytes_max = 10 * kMiB});
    const aio::DriveQueue::Stats after = drive_.queue().stats();
    const DriveResult& drive = result.drives.front();
    EXPECT_EQ(result.bytes(), 10 * kMiB);
    EXPECT_EQ(drive.latency.count(), 10 * kMiB / kBlockBytes);
    EXPECT_EQ(after.read_bytes - before.read_bytes, drive.read_bytes);
    EXPECT_EQ(after.written_bytes - before.written_bytes, drive.written_bytes);
    EXPECT_EQ(drive.read_bytes > 0, pattern != Pattern::write);
    EXPECT_EQ(drive.written_bytes > 0, pattern != Pattern::read);
    EXPECT_GT(result.seconds, 0);
    EXPECT_GE(drive.latency.max(), drive.latency.percentile(0.5));
    EXPECT_LE(to_seconds(drive.latency.max()), result.seconds);
  }
}

// Nothing is written outside of the region, before or after it.
TEST_P(WorkloadTest, StaysInItsRegion) {
  const auto contents = [&] {
    std::vector<char> bytes(kFileBytes);
    const int descriptor = ::open(file_.path().c_str(), O_RDONLY);
    EXPECT_EQ(::pread(descriptor, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(kFileBytes));
    ::close(descriptor);
    return bytes;
  };
  const std::vector<char> before = contents();
  run_workload(drives_, {.pattern = Pattern::write, .region = {kMiB, 2 * kMiB + 100}, .bytes_max = 4 * kMiB});
  const std::vector<char> after = contents();
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + kMiB, after.begin()));
  EXPECT_FALSE(std::equal(before.begin() + kMiB, before.begin() + 3 * kMiB, after.begin() + kMiB));
  EXPECT_TRUE(std::equal(before.begin() + 3 * kMiB, before.end(), after.begin() + 3 * kMiB));
}

TEST_P(WorkloadTest, ATimeLimitEndsIt) {
  const WorkloadResult result =
      run_workload(drives_, {.region = {0, kFileBytes}, .duration = std::chrono::milliseconds(50)});
  EXPECT_GE(result.seconds, 0.05);
  EXPECT_LT(result.seconds, 60) << "over the file again and again would take for ever";
  EXPECT_GT(result.bytes(), 0u);
}

TEST_P(WorkloadTest, StopsWhenTold) {
  StopFlag stop{false};
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stop = true;
  });
  EXPECT_THROW(run_workload(drives_, {.region = {0, kFileBytes}, .duration = std::chrono::hours(1), .stop = &stop}),
               Interrupted);
  later.join();
}

TEST_P(WorkloadTest, AFailedTransferIsReportedAndNothingIsLeftInFlight) {
  ASSERT_EQ(::truncate(file_.path().c_str(), kMiB), 0);
  EXPECT_THROW(run_workload(drives_, {.region = {0, kFileBytes}, .bytes_max = kFileBytes}), IoError);
}

TEST(Initializer, ContentDoesNotRepeat) {
  std::vector<std::byte> memory(kMiB);
  fill_random(memory, 1);
  std::vector<std::string> pages;
  for (std::size_t at = 0; at < memory.size(); at += 4096)
    pages.emplace_back(reinterpret_cast<const char*>(memory.data() + at), 4096);
  std::sort(pages.begin(), pages.end());
  EXPECT_EQ(std::adjacent_find(pages.begin(), pages.end()), pages.end());
  std::array<int, 256> counts{};
  for (const std::byte b : memory) ++counts[static_cast<std::size_t>(b)];
  for (const int count : counts) EXPECT_NEAR(count, 4096, 400);  // 6 sigma
}

}  // namespace
}  // namespace hoist::measure::workload_test
