// SPDX-License-Identifier: Apache-2.0
// P3 with ranks that are processes. The short form; hoist_crash_campaign is the long one.
#include <gtest/gtest.h>

#include "mpi_campaign.hpp"

namespace hoist::test::mpi_kill_test {
namespace {

class MpiKills : public testing::TestWithParam<MpiCrashSetup> {};

TEST_P(MpiKills, OfOneRankStopTheOthersAndEndInTheSameBits) {
  if (const std::string obstacle = MpiCampaign::obstacle(); !obstacle.empty()) GTEST_SKIP() << obstacle;
  const TempDirectory directory;
  MpiCampaign campaign(GetParam(), directory.path().string());
  ASSERT_EQ(campaign.prepare(), "");
  MpiTally tally;
  ASSERT_EQ(campaign.run(/*seed=*/1, /*kills=*/6, tally), "");
  SCOPED_TRACE(table(tally, 1));
  EXPECT_GE(tally.kills.kills(), 4u);
  EXPECT_GE(tally.survivors, 1u);
}

INSTANTIATE_TEST_SUITE_P(Setups, MpiKills,
                         testing::Values(MpiCrashSetup{Placement::nvme, UpdateMode::forward, 2},
                                         MpiCrashSetup{Placement::pinned, UpdateMode::step, 4}),
                         [](const auto& c) { return c.param.name(); });

}  // namespace
}  // namespace hoist::test::mpi_kill_test
