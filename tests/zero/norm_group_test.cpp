// SPDX-License-Identifier: Apache-2.0
// Two sharding groups of two ranks in one norm group of four: clipped, and skipped, as one model.
#include <filesystem>
#include <fstream>
#include <thread>

#include <gtest/gtest.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "sliced_model.hpp"

namespace hoist::test::norm_group_test {
namespace {

constexpr int kSlices = 2;
constexpr int kRanksOfSlice = 2;

// The reports by rank of the whole job.
std::vector<StepReport> step_of_all(bool with_norm_group, int poisoned_slice, const std::string& recorded = "") {
  comm::ThreadGroup all(kSlices * kRanksOfSlice);
  std::vector<std::unique_ptr<comm::ThreadGroup>> slices;
  for (int s = 0; s < kSlices; ++s) slices.push_back(std::make_unique<comm::ThreadGroup>(kRanksOfSlice));
  std::vector<StepReport> reports(kSlices * kRanksOfSlice);
  std::vector<std::exception_ptr> errors(reports.size());
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kSlices * kRanksOfSlice; ++rank) {
    threads.emplace_back([&, rank] {
      const int slice = rank % kSlices;
      comm::ThreadGroup& mine = *slices[static_cast<std::size_t>(slice)];
      Runtime::Groups groups;
      groups.sharding = [&](const comm::CommunicatorOptions& o) { return mine.join(rank / kSlices, o); };
      if (with_norm_group) groups.norm = [&](const comm::CommunicatorOptions& o) { return all.join(rank, o); };
      try {
        reports[static_cast<std::size_t>(rank)] =
            step_of_slice(groups, {.index = slice, .poisoned = slice == poisoned_slice, .recorded = recorded});
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
        mine.abort(error.what());
        all.abort(error.what());
      }
    });
  }
  threads.clear();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return reports;
}

TEST(NormGroup, ClipsAllSlicesByTheirCommonNorm) {
  const double norm = norm_of_slices(kSlices);
  for (const StepReport& report : step_of_all(/*with_norm_group=*/true, -1)) {
    EXPECT_TRUE(report.applied);
    EXPECT_NEAR(report.gradient_norm, norm, 1e-9 * norm);
    EXPECT_NEAR(report.clip_factor, 0.5 / (norm + 1e-6), 1e-9);
  }
  const auto apart = step_of_all(/*with_norm_group=*/false, -1);
  EXPECT_GT(std::abs(apart[0].gradient_norm - norm), 0.01 * norm) << "a slice's own norm would pass as well";
  EXPECT_NE(apart[0].gradient_norm, apart[1].gradient_norm);
}

TEST(NormGroup, OneSliceThatIsNotFiniteSkipsTheStepOfAll) {
  for (const StepReport& report : step_of_all(/*with_norm_group=*/true, 1)) EXPECT_FALSE(report.applied);
  const auto apart = step_of_all(/*with_norm_group=*/false, 1);
  EXPECT_TRUE(apart[0].applied);
  EXPECT_FALSE(apart[1].applied);
}

TEST(NormGroup, IsOneJobToThoseWhoWatchIt) {
  const TempDirectory directory;
  step_of_all(/*with_norm_group=*/true, -1, directory.path());
  std::ifstream metrics(directory / "metrics.jsonl");
  int lines = 0;
  for (std::string line; std::getline(metrics, line);) ++lines;
  EXPECT_EQ(lines, 1) << "of one rank, not of one in each group";
  for (int rank = 0; rank < kSlices * kRanksOfSlice; ++rank)
    EXPECT_TRUE(std::filesystem::exists(directory / ("trace.rank-" + std::to_string(rank) + ".json"))) << rank;
}

TEST(NormGroup, MustHoldTheShardingGroup) {
  comm::ThreadGroup pair(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const Runtime::Groups groups{.sharding = [&](const comm::CommunicatorOptions& o) { return pair.join(rank, o); },
                                   .norm = [](const comm::CommunicatorOptions& o) { return comm::make_self(o); }};
      EXPECT_THROW(step_of_slice(groups, {}), UsageError);
    });
  }
}

// Only ranks that divide weights stage them for collectives, in 4 MiB of device memory.
TEST(NormGroup, RanksThatDivideNothingNeedNoMemoryForCollectives) {
  comm::ThreadGroup pair(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const Runtime::Groups groups{.sharding = {},
                                   .norm = [&](const comm::CommunicatorOptions& o) { return pair.join(rank, o); }};
      const Runtime runtime(
          {.device = platform::DeviceKind::host, .device_memory_bytes = 1 * kMiB, .pinned_memory_bytes = 1 * kMiB},
          groups);
      EXPECT_EQ(runtime.world_size(), 1);
    });
  }
}

}  // namespace
}  // namespace hoist::test::norm_group_test
