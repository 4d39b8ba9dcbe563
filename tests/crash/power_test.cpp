// SPDX-License-Identifier: Apache-2.0
// Three steps are cut at every operation in turn, by a power cut, a kill or one failure (power_fixture.hpp). That the
// judge would notice is tested, too: each flush, and the agreement between ranks, is taken away in turn.
#include <filesystem>
#include <optional>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "power_fixture.hpp"

namespace hoist::test::power_test {
namespace {

TEST_P(Power, CutAtEveryOperationOfThreeSteps) {
  std::uint64_t cuts = 0;
  EXPECT_EQ(first_problem(cut_points(), {}, cuts), "");
  EXPECT_GT(cuts, 20u);
  fmt::print("{} power cuts\n", cuts);
}

// A dead process keeps what it wrote; nothing is lost or torn.
TEST_P(Power, KilledAtEveryOperationOfThreeSteps) {
  bool died = true;
  for (std::uint64_t dies_at = cut_points().stride - 1; died; dies_at += cut_points().stride) {
    start_over();
    const auto faults = std::make_shared<Faults>(0);
    die_at(*faults, dies_at);
    History history;
    died = live(faults, kCutSteps, {}, history);
    ASSERT_EQ(judge(history), "") << "dies at operation " << dies_at;
  }
}

// One operation fails, once. A short transfer is finished by trying again. An error of a write or a flush ends the
// step and the engine; one of a read does, too, unless nobody came to want what was read ahead. Of the short
// transfers, which change nothing, every third one is enough.
TEST_P(Power, OneFailureAtEveryOperationOfThreeSteps) {
  struct Case {
    const char* name;
    Fault::Kind kind;
    std::optional<aio::Operation> operation;
  };
  for (const Case& one : {Case{"a failed read", Fault::Kind::error, aio::Operation::read},
                          Case{"a failed write", Fault::Kind::error, aio::Operation::write},
                          Case{"a failed flush", Fault::Kind::error, aio::Operation::sync},
                          Case{"a short transfer", Fault::Kind::short_transfer, std::nullopt}}) {
    const bool may_fail = one.kind == Fault::Kind::error;
    std::uint64_t hits = 0;
    for (std::uint64_t at = 0;; at += cut_points().stride * (may_fail ? 1 : 3), ++hits) {
      SCOPED_TRACE(fmt::format("{}: number {}", one.name, at));
      start_over();
      const auto faults = std::make_shared<Faults>(0);
      faults->add({.kind = one.kind, .operation = one.operation, .first = at, .count = 1, .code = EIO});
      History history;
      const bool failed = live(faults, kCutSteps, {}, history);
      if (faults->hits(one.kind) == 0) break;
      const bool may_pass = !may_fail || one.operation == aio::Operation::read;
      EXPECT_TRUE(failed ? may_fail : may_pass);
      if (!failed) {
        EXPECT_EQ(history.committed, static_cast<std::int64_t>(kCutSteps - kCutSteps % GetParam().commit_every));
      }
      ASSERT_EQ(judge(history), "");
    }
    EXPECT_GT(hits, GetParam().commit_every == 1 ? 4u : 2u) << one.name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    OneRank, Power,
    testing::Values(PowerSetup{Placement::nvme, UpdateMode::forward},
                    PowerSetup{Placement::pinned, UpdateMode::forward}, PowerSetup{Placement::nvme, UpdateMode::step},
                    PowerSetup{Placement::pinned, UpdateMode::step},
                    PowerSetup{Placement::nvme, UpdateMode::forward, 1, true},
                    PowerSetup{Placement::pinned, UpdateMode::step, 1, true},
                    PowerSetup{Placement::pinned, UpdateMode::forward, 1, true, 2},
                    PowerSetup{Placement::nvme, UpdateMode::step, 1, false, 2},
                    PowerSetup{.parameters = Placement::nvme, .commit_every = 2, .pinned_fraction = 0.5},
                    PowerSetup{Placement::nvme, UpdateMode::backward},
                    PowerSetup{Placement::pinned, UpdateMode::backward, 1, true},
                    PowerSetup{Placement::pinned, UpdateMode::backward, 1, false, 2}),
    setup_name);
INSTANTIATE_TEST_SUITE_P(TwoRanks, Power,
                         testing::Values(PowerSetup{Placement::nvme, UpdateMode::forward, 2},
                                         PowerSetup{Placement::nvme, UpdateMode::forward, 2, true},
                                         PowerSetup{Placement::nvme, UpdateMode::backward, 2}),
                         setup_name);
INSTANTIATE_TEST_SUITE_P(TwoGroups, Power, testing::Values(PowerSetup{.keeps = true, .groups = 2}), setup_name);

class PowerMutation : public Power {
 protected:
  static ForgetfulBackend::Drops flushes_of(std::string ending) {
    return [ending = std::move(ending)](const std::string& path, std::uint64_t) { return path.ends_with(ending); };
  }
};

TEST_P(PowerMutation, WithoutFlushingTheDataDamageIsFound) { EXPECT_NE(found({.drops = flushes_of(".data")}), ""); }

TEST_P(PowerMutation, WithoutFlushingTheManifestDamageIsFound) {
  EXPECT_NE(found({.drops = flushes_of(".manifest")}), "");
}

TEST_P(PowerMutation, WithoutFlushingTheSuperblockDamageIsFound) {
  EXPECT_NE(found({.drops = flushes_of(".manifest-new")}), "");
}

TEST_P(PowerMutation, WithoutFlushingDirectoriesDamageIsFound) {
  EXPECT_NE(found({.forgets = [](const std::string& path) { return std::filesystem::is_directory(path); }}), "");
}

class PowerAgreement : public Power {};

TEST_P(PowerAgreement, WithoutItDamageIsFound) {
  std::uint64_t cuts = 0;
  EXPECT_EQ(first_problem(cut_points(), {.slow_manifest = true}, cuts), "");
  EXPECT_NE(found({.no_barrier = true, .slow_manifest = true}), "");
}

TEST_P(PowerAgreement, WithoutItOnNamedCheckpointsDamageIsFound) {
  EXPECT_NE(found({.no_keep_barrier = true, .slow_manifest = true}), "");
}

INSTANTIATE_TEST_SUITE_P(OneRank, PowerMutation, testing::Values(PowerSetup{}), setup_name);
INSTANTIATE_TEST_SUITE_P(TwoRanks, PowerMutation,
                         testing::Values(PowerSetup{Placement::pinned, UpdateMode::step, 2, true}), setup_name);
INSTANTIATE_TEST_SUITE_P(TwoRanks, PowerAgreement,
                         testing::Values(PowerSetup{Placement::pinned, UpdateMode::step, 2, true}), setup_name);
INSTANTIATE_TEST_SUITE_P(
    TwoGroups, PowerAgreement,
    testing::Values(PowerSetup{
        .parameters = Placement::pinned, .update_mode = UpdateMode::step, .keeps = true, .groups = 2}),
    setup_name);

// Two ranks go back to a named checkpoint. Until both have adopted it, the step they came from is what they have in
// common.
class PowerGoingBack : public Power {
 protected:
  void SetUp() override {
    from_ = "2";
    elastic_ = true;  // so that a rank that does without the others still computes what it should
    last_step_ = 8;
    Power::SetUp();
    begin_all_with(6);
  }
};

TEST_P(PowerGoingBack, CutAtEveryOperation) {
  std::uint64_t cuts = 0;
  EXPECT_EQ(first_problem(cut_points(), {.slow_manifest = true}, cuts), "");
  EXPECT_GT(cuts, 20u);
  fmt::print("{} power cuts\n", cuts);
}

TEST_P(PowerGoingBack, WhenAStepBeginsBeforeAllHaveAdoptedDamageIsFound) {
  EXPECT_NE(found({.no_adopt_barrier = true, .slow_manifest = true}), "");
}

INSTANTIATE_TEST_SUITE_P(TwoRanks, PowerGoingBack,
                         testing::Values(PowerSetup{Placement::nvme, UpdateMode::forward, 2},
                                         PowerSetup{Placement::pinned, UpdateMode::step, 2}),
                         setup_name);
INSTANTIATE_TEST_SUITE_P(TwoGroups, PowerGoingBack, testing::Values(PowerSetup{.groups = 2}), setup_name);

// The state is dealt out to another number of ranks, into a store of its own; then the old store is removed. The judge
// comes with the new number, or with the old one.
class PowerResharding : public Power {
 protected:
  void SetUp() override {
    elastic_ = true;
    Power::SetUp();
    begin_all_with(2);
  }
};

TEST_P(PowerResharding, CutAtEveryOperation) {
  std::uint64_t cuts = 0;
  EXPECT_EQ(first_problem(cut_points(), {.slow_manifest = true}, cuts), "");
  EXPECT_GT(cuts, 20u);
  fmt::print("{} power cuts\n", cuts);
}

INSTANTIATE_TEST_SUITE_P(
    Changes, PowerResharding,
    testing::Values(PowerSetup{.ranks = 1, .cut_ranks = 2, .judge_ranks = 2},
                    PowerSetup{.parameters = Placement::pinned, .ranks = 1, .cut_ranks = 2, .judge_ranks = 1},
                    PowerSetup{.parameters = Placement::pinned, .ranks = 2, .cut_ranks = 1, .judge_ranks = 2},
                    PowerSetup{.update_mode = UpdateMode::step, .ranks = 2, .cut_ranks = 4, .judge_ranks = 1}),
    setup_name);
INSTANTIATE_TEST_SUITE_P(TwoGroups, PowerResharding,
                         testing::Values(PowerSetup{.ranks = 1, .cut_ranks = 2, .judge_ranks = 1, .groups = 2}),
                         setup_name);

}  // namespace
}  // namespace hoist::test::power_test
