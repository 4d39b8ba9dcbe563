// SPDX-License-Identifier: Apache-2.0
// P3 against SIGKILL: a real process dies in every phase, and the resumed run ends in the bits of an undisturbed one.
// This is the short form; the program hoist_crash_campaign is the long one.
#include <array>

#include <gtest/gtest.h>

#include "campaign.hpp"

namespace hoist::test::kill_test {
namespace {

class Kills : public testing::TestWithParam<CrashSetup> {};

TEST_P(Kills, InEveryPhaseEndInTheSameBits) {
  // A run ends early when it plans to die in a restore before there is a commit to restore.
  const std::uint64_t runs = GetParam().groups > 1 ? 4 : 2;
  const TempDirectory directory;
  Campaign campaign(GetParam(), directory.path().string());
  ASSERT_EQ(campaign.prepare(), "");
  CrashTally tally;
  for (std::uint64_t seed = 1; seed <= runs; ++seed) ASSERT_EQ(campaign.run(seed, tally), "");
  SCOPED_TRACE(table(tally, 1));
  const auto hits = [&](Phase phase) { return tally.hits[static_cast<std::size_t>(phase)]; };
  // Mode `backward` updates in the phase backward. It may have nothing left to update in the next forward.
  constexpr std::array kUpdates{Phase::step_update, Phase::forward_update, Phase::backward};
  const UpdateMode mode = GetParam().update_mode;
  const Phase update = kUpdates[mode == UpdateMode::step ? 0 : mode == UpdateMode::forward ? 1 : 2];
  for (const Phase phase :
       {Phase::create, Phase::initialize, update, Phase::backward, Phase::flush, Phase::manifest, Phase::restore})
    EXPECT_GE(hits(phase), 1u) << name_of(phase);
  if (GetParam().ranks > 1) {
    EXPECT_GE(hits(Phase::reduce), 1u);
  }
  if (GetParam().rank_count() > 1) {
    EXPECT_GE(hits(Phase::between_ranks), 1u);
  }
  EXPECT_GE(tally.chained_restores, 1u);
  if (GetParam().mirrored) {
    EXPECT_GE(tally.lost_stores, 1u);
  }
  if (GetParam().disturbed) {
    EXPECT_GE(tally.troubles(), 5u);
  }
}

INSTANTIATE_TEST_SUITE_P(Setups, Kills, testing::ValuesIn(all_crash_setups()),
                         [](const auto& c) { return c.param.name(); });
INSTANTIATE_TEST_SUITE_P(Mirrored, Kills, testing::ValuesIn(mirror_crash_setups()),
                         [](const auto& c) { return c.param.name(); });
INSTANTIATE_TEST_SUITE_P(Disturbed, Kills, testing::ValuesIn(disturbed_crash_setups()),
                         [](const auto& c) { return c.param.name(); });
INSTANTIATE_TEST_SUITE_P(Groups, Kills, testing::ValuesIn(group_crash_setups()),
                         [](const auto& c) { return c.param.name(); });

}  // namespace
}  // namespace hoist::test::kill_test
