// SPDX-License-Identifier: Apache-2.0
// P3 while the number of ranks changes. The short form; hoist_crash_campaign is the long one.
#include <gtest/gtest.h>

#include "reshard_campaign.hpp"

namespace hoist::test::reshard_kill_test {
namespace {

struct Cell {
  const char* name;
  Placement parameters;
  int groups = 1;
};

class ReshardKills : public testing::TestWithParam<Cell> {};

TEST_P(ReshardKills, WhileTheStateIsDealtOutEndInTheSameBits) {
  constexpr std::uint64_t kRuns = 3;
  const TempDirectory directory;
  ReshardCampaign campaign(GetParam().parameters, UpdateMode::forward, directory.path().string(), GetParam().groups);
  ASSERT_EQ(campaign.prepare(), "");
  CrashTally tally;
  for (std::uint64_t seed = 1; seed <= kRuns; ++seed) ASSERT_EQ(campaign.run(seed, tally), "");
  SCOPED_TRACE(table(tally, 1));
  const auto hits = [&](Phase phase) { return tally.hits[static_cast<std::size_t>(phase)]; };
  for (const Phase phase : {Phase::create, Phase::reshard, Phase::between_ranks, Phase::remove})
    EXPECT_GE(hits(phase), 1u) << name_of(phase);
  EXPECT_GE(tally.two_stores, 1u);
}

INSTANTIATE_TEST_SUITE_P(Parameters, ReshardKills,
                         testing::Values(Cell{"nvme", Placement::nvme}, Cell{"memory", Placement::pinned},
                                         Cell{"nvme_2_groups", Placement::nvme, 2}),
                         [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace hoist::test::reshard_kill_test
