// SPDX-License-Identifier: Apache-2.0
// The commands on a run with two stores, whose newest one is incomplete, damaged or unfinished: an older store is never
// taken for the training without a word.
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <hoist/tests/support/damage.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/zero/reshard_fixture.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>

#include "program.hpp"
#include "stores.hpp"

namespace hoist::newest_store_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class NewestStore : public test::ProgramTest {
 protected:
  void train(int ranks, std::uint64_t last_step = 4) {
    test::make_two_stores(path("store"), ranks, last_step);
    newer_ = path(fmt::format("store/reshard-0001-ranks-{}", ranks));
  }
  // `missing`: what the commands say of the newest store.
  void expect_refusals(const std::string& missing) {
    const auto named = AllOf(HasSubstr(fs::path(newer_).filename()), HasSubstr(missing), HasSubstr("step 2"));
    const auto inspected = run("inspect store --json report.json");
    EXPECT_EQ(inspected.exit_code, 1);
    EXPECT_THAT(inspected.output, AllOf(named, HasSubstr("store holds step 2, and stays for its checkpoints, two")));
    EXPECT_TRUE(json_of("report.json")["resumes_from_step"].is_null());
    EXPECT_EQ(json_of("report.json")["older_stores"].size(), 1u);
    const auto verified = run("verify store --json report.json");
    EXPECT_EQ(verified.exit_code, 1);
    EXPECT_THAT(verified.errors, named);
    EXPECT_EQ(json_of("report.json")["sound"], false);
    for (const char* command : {"copy", "export"}) {
      SCOPED_TRACE(command);
      const auto refused = run(fmt::format("{} store --to to", command));
      EXPECT_NE(refused.exit_code, 0);
      EXPECT_THAT(refused.errors, AllOf(named, HasSubstr("--from 'two' (step 2 of store)")));
      EXPECT_FALSE(fs::exists(path("to")));
      EXPECT_EQ(run(fmt::format("{} store --from two --to to", command)).exit_code, 0);
      fs::remove_all(path("to"));
    }
    EXPECT_TRUE(look_at_store(path("store")).commits.empty());
  }
  std::string file(int rank, const char* suffix) const { return fmt::format("{}/rank-{:05}.{}", newer_, rank, suffix); }

  std::string newer_;
};

TEST_F(NewestStore, WithoutARanksFilesIsSaid) {
  train(3);
  {
    const test::FilesAway away({file(2, "data"), file(2, "manifest")});
    expect_refusals("no files of rank 2 are here");
  }
  {
    const test::FilesAway away({file(1, "manifest")});
    expect_refusals("rank-00001.manifest is missing");
  }
  EXPECT_THAT(run("inspect store").output, Not(HasSubstr("holds a training, but")));
  EXPECT_EQ(run("inspect store").exit_code, 0);
  EXPECT_EQ(run("verify store").exit_code, 0);
}

TEST_F(NewestStore, OfOneRankWithoutAManifestIsSaid) {
  train(1);
  const test::FilesAway away({file(0, "manifest")});
  expect_refusals("rank-00000.manifest is missing");
}

TEST_F(NewestStore, WithADamagedManifestIsSaid) {
  train(1);
  test::flip_bits(file(0, "manifest"), 130);
  expect_refusals("cannot be used");
  test::flip_bits(file(0, "manifest"), 130);
  for (const std::uint32_t slot : {0u, 1u}) test::damage_slot(newer_, 0, slot);
  expect_refusals("commit slot 1");
}

// A host of several has the whole older store, and its own ranks' part of the newest. A real fault of that is said,
// too.
TEST_F(NewestStore, OfWhichAHostHasItsPartIsNotGivenUp) {
  train(3);
  const test::FilesAway away({file(1, "data"), file(1, "manifest"), file(2, "data"), file(2, "manifest")});
  const auto is_said =
      AllOf(HasSubstr("these ranks have their files on other hosts"), HasSubstr("only to give its steps up"));
  EXPECT_THAT(run("inspect store").output, is_said);
  EXPECT_THAT(run("verify store").errors, AllOf(is_said, Not(HasSubstr("holds no commit"))));
  for (const std::uint32_t slot : {0u, 1u}) test::damage_slot(newer_, 0, slot);
  EXPECT_THAT(run("verify store").errors, AllOf(is_said, HasSubstr("holds no commit that every rank has")));
}

// There is no older one.
TEST_F(NewestStore, AloneWithoutAManifestIsFound) {
  train(1);
  const test::FilesAway away({file(0, "manifest")});
  for (const int rank : {0, 1})
    for (const char* suffix : {"data", "manifest"}) fs::remove(path(fmt::format("store/rank-{:05}.{}", rank, suffix)));
  for (const char* command : {"inspect store", "verify store", "export store --to to"}) {
    const auto result = run(command);
    EXPECT_NE(result.exit_code, 0) << command;
    EXPECT_THAT(result.output + result.errors,
                AllOf(HasSubstr("rank-00000.manifest is missing"), Not(HasSubstr("there is no store"))));
  }
}

// One rank went back to step 3, and the others died before they did: only the commit that it abandoned is common.
TEST_F(NewestStore, WithAnAbandonedCommitAloneIsComplete) {
  train(3);
  const auto without_step = [&](int rank, std::uint64_t step) {
    const std::string bytes = test::contents_of(file(rank, "manifest"));
    for (const std::uint32_t slot : {0u, 1u}) {
      test::blank_slot(newer_, rank, slot);
      if (tiers::Store::look(newer_, rank).commits.front().step != step) return;
      std::ofstream(file(rank, "manifest"), std::ios::binary) << bytes;
    }
  };
  const std::string whole = path("whole");
  fs::copy(newer_, whole);
  without_step(2, 4);
  test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("store"));
  setup.engine.keep_steps = 1;
  const auto restored_step = [&] {
    std::uint64_t step = 0;
    test::on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
      test::ToyModel model(setup, join);
      model.restore();
      if (rank == 0) step = model.engine().step_count();
    });
    return step;
  };
  EXPECT_EQ(restored_step(), 3u);
  for (const int rank : {1, 2}) {
    for (const char* suffix : {"data", "manifest"})
      fs::copy(fs::path(whole) / fs::path(file(rank, suffix)).filename(), file(rank, suffix),
               fs::copy_options::overwrite_existing);
    without_step(rank, 3);
  }
  // As a crash would leave it that came before rank 0 wrote over step 4.
  const std::string adopted = test::contents_of(file(0, "manifest"));
  const std::string before = test::contents_of(fs::path(whole) / "rank-00000.manifest");
  const tiers::Superblock superblock = *tiers::detail::view_manifest(file(0, "manifest")).superblock;
  for (const std::uint32_t slot : {0u, 1u}) {
    if (!tiers::Store::look(newer_, 0).abandoned.empty()) break;
    std::string both = adopted;
    both.replace(superblock.slot_offset(slot), superblock.slot_bytes(), before, superblock.slot_offset(1 - slot),
                 superblock.slot_bytes());
    std::ofstream(file(0, "manifest"), std::ios::binary) << both;
  }
  ASSERT_EQ(tiers::Store::look(newer_, 0).abandoned.size(), 1u);
  ASSERT_EQ(tiers::Store::look(newer_, 0).commits.front().step, 3u);
  ASSERT_EQ(tiers::Store::look(newer_, 1).commits.front().step, 4u);
  const auto inspected = run("inspect store");
  EXPECT_EQ(inspected.exit_code, 0);
  EXPECT_THAT(inspected.output, AllOf(HasSubstr("resumes from  step 4"), Not(HasSubstr("holds a training, but"))));
  const auto verified = run("verify store");
  EXPECT_EQ(verified.exit_code, 0) << verified.errors;
  EXPECT_EQ(run("copy store --to to").exit_code, 0);
  EXPECT_EQ(look_at_store(path("to/hoist")).commits.front().step, 4u);
  EXPECT_EQ(restored_step(), 4u);
}

// Its first commit is on one rank only. The other one has its files: it had not got so far.
TEST_F(NewestStore, ThatIsUnfinishedIsPassedOver) {
  train(3, 2);
  for (const std::uint32_t slot : {0u, 1u}) test::blank_slot(newer_, 1, slot);
  const auto inspected = run("inspect store");
  EXPECT_EQ(inspected.exit_code, 0);
  EXPECT_THAT(inspected.output, AllOf(HasSubstr("resumes from  step 2"), Not(HasSubstr("reshard-0001"))));
  EXPECT_EQ(run("verify store").exit_code, 0);
  EXPECT_EQ(run("copy store --to to").exit_code, 0);
  // With files away it is, too, as long as the older store holds its step.
  for (const char* suffix : {"data", "manifest"}) fs::remove(file(1, suffix));
  EXPECT_EQ(run("inspect store").exit_code, 0);
}

// Only it holds the training.
TEST_F(NewestStore, WhoseFirstCommitIsOutOfReachIsTheTraining) {
  train(3, 2);
  for (const char* suffix : {"data", "manifest"}) fs::remove(file(1, suffix));
  for (const int rank : {0, 1})
    for (const char* suffix : {"data", "manifest"}) fs::remove(path(fmt::format("store/rank-{:05}.{}", rank, suffix)));
  EXPECT_EQ(look_at_store(path("store")).directory, newer_);
  EXPECT_THAT(run("inspect store").output, HasSubstr("some are not here"));
}

TEST_F(NewestStore, DoesNotHideTheStepsOfOlderOnes) {
  train(3);
  for (const char* command : {"copy", "export"}) {
    const auto refused = run(fmt::format("{} store --step 2 --to to", command));
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_THAT(refused.errors, AllOf(HasSubstr("holds the steps 4, 3"), HasSubstr("--from 'two' (step 2 of store)")));
  }
}

}  // namespace
}  // namespace hoist::newest_store_test
