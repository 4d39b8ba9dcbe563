// SPDX-License-Identifier: Apache-2.0
// Files of a store are missing, damaged or another process's: the engine refuses to continue, and changes nothing.
#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/zero/checkpoint/stored_model.hpp>

#include "reshard_fixture.hpp"

namespace hoist::test::reshard_refusals_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST_P(ReshardTest, RefusalsSayWhatToDo) {
  begin_with(2, 2);
  expect_refusal(3, kInitialize, HasSubstr("holds step 2 of a run of 2 ranks; continue it (Engine::restore()"));
  const FilesAway unmounted({store_ + "/rank-00001.manifest"});
  expect_refusal(3, kRestore,
                 AllOf(HasSubstr("is of a run of 2 ranks, whose files are not all readable"),
                       HasSubstr("start 2 ranks, or bring the files together")));
}

// Each rank sees the files on its own drive, and rank 2 none.
TEST_P(ReshardTest, WithoutASharedFileSystemTheRefusalNamesTheNumberOfRanks) {
  own_drives_ = true;
  begin_with(2, 2);
  expect_refusal(3, kRestore, AllOf(HasSubstr("is of a run of 2 ranks"), HasSubstr("start 2 ranks")));
}

TEST_P(ReshardTest, AMissingRunIsNamed) {
  expect_refusal(2, kRestore, AllOf(HasSubstr("there is no run in "), HasSubstr("begin one with Engine::create()")));
}

TEST_P(ReshardOnNvmeTest, NothingIsTakenOverIntoAStoreThatKeepsNothing) {
  begin_with(2, 2);
  setup_.engine.durability = tiers::Durability::none;
  setup_.engine.keep_steps = 0;
  expect_refusal(3, kRestore, HasSubstr("would be taken over into one of durability \"none\""));
  setup_.engine.durability = tiers::Durability::step;
  continue_with(3, 3);
}

// The run was started twice: the second process must leave the directory alone in which the first makes its new store.
TEST_P(ReshardTest, APlaceThatAnotherProcessIsMakingIsLeftAlone) {
  begin_with(2, 3);
  const std::string theirs = store_ + "/reshard-0001-ranks-3";
  {
    tiers::detail::Creation other(tiers::detail::StorePaths(theirs, 0));
    other.claim({});
    setup_.engine.lock_timeout = std::chrono::milliseconds(1);
    on_engines(3, [&](int, ToyModel& model) { EXPECT_THROW(model.restore(), Error); });
    EXPECT_TRUE(std::filesystem::exists(theirs + "/rank-00000.data"));
  }
  continue_with(3, 4);
}

// The same with as many ranks: the second process has waited for the old store until the first had read it.
TEST_P(ReshardTest, AStoreThatAnotherProcessTakesOverFromIsNotContinuedInPlace) {
  begin_with(2, 3);
  {
    tiers::detail::Creation other(tiers::detail::StorePaths(store_ + "/reshard-0001-ranks-3", 2));
    other.claim({});
    setup_.engine.lock_timeout = std::chrono::milliseconds(100);
    expect_refusal(2, kRestore, HasSubstr("another process continues from the store in"));
  }
  continue_with(2, 4);
}

// A run that goes back by a name, to a store that no process uses, while another process trains in the newest one.
TEST_P(ReshardTest, NoOtherStoreIsTakenOverWhileTheNewestIsInUse) {
  begin_and_keep_two(3);
  continue_with(3, 4);
  setup_.engine.lock_timeout = std::chrono::milliseconds(100);
  const auto go_back = [](ToyModel& model) { model.restore({.from = "two"}); };
  on_engines(3, [&](int rank, ToyModel& model) {
    model.restore();
    if (rank == 0) expect_refusal(2, go_back, HasSubstr("another process continues from the store in"));
    train_to(rank, model, 4, 5, before_);
  });
  on_engines(2, [](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "two"}).step, 2u); });
}

// A job is started again with another number of ranks, and waits for the lock of a process that makes its last commit.
// It does not take over the one before that, which it has found.
TEST_P(ReshardTest, ACommitThatIsMadeWhileANewStoreWaitsForTheLockIsNotPassedOver) {
  begin_with(2, 3);
  std::promise<void> is_open;
  std::thread last_process([&] {
    on_engines(2, [&](int rank, ToyModel& model) {
      model.restore();
      if (rank == 0) is_open.set_value();
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      train_to(rank, model, 3, 4, before_);
    });
  });
  is_open.get_future().wait();
  try {
    on_engines(3, [](int, ToyModel& model) {
      EXPECT_EQ(model.restore().step, 4u) << "if it has looked late";
      throw Error("it goes on");
    });
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::AnyOf(HasSubstr("has changed since this process looked"), HasSubstr("goes on")));
  }
  last_process.join();
  if (stores().size() == 1) continue_with(3, 5);
}

// Readers share the lock of the store that they take over, so two starts may read it at once.
TEST_P(ReshardTest, OfTwoStartsAtOnceOneTrains) {
  int rounds_won = 0;
  for (int round = 0; round < 4; ++round) {
    begin_with(2, 3);
    std::atomic<int> have_won{0}, have_answered{0};
    const auto start = [&](int ranks) {
      try {
        on_engines(ranks, [&](int rank, ToyModel& model) {
          model.restore();
          if (rank == 0) {
            ++have_won;
            ++have_answered;
            while (have_answered < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          model.engine().settle();
        });
      } catch (const Error& error) {
        ++have_answered;
        EXPECT_THAT(error.what(), testing::AnyOf(HasSubstr("another process"), HasSubstr("in use by"),
                                                 HasSubstr("has changed since")));
      }
    };
    setup_.engine.lock_timeout = std::chrono::milliseconds(1000);
    std::thread other([&] { start(3); });
    start(1);
    other.join();
    EXPECT_LE(have_won, 1) << "round " << round;
    rounds_won += have_won;
    std::filesystem::remove_all(store_);
  }
  EXPECT_GT(rounds_won, 0) << "on a slow machine both may give way";
}

// One rank's copy is still running: its data are there, and the manifest is not.
TEST_P(ReshardTest, TheOnlyRanksManifestThatIsMissingForAMomentCostsNothing) {
  for (const std::uint32_t keep_steps : {0u, 1u}) {  // without an older store, and with one
    setup_.engine.keep_steps = keep_steps;
    setup_.engine.caller_state_bytes_max = 4096;
    on_engines(1, [&](int rank, ToyModel& model) {
      model.initialize();
      train_to(rank, model, 0, 2, before_);
      if (keep_steps > 0) model.engine().save("two", std::as_bytes(std::span("rank 0").first(6))).wait();
    });
    ranks_before_ = 1;
    setup_.engine.caller_state_bytes_max = 8192;
    continue_with(1, 3);  // in a new store
    continue_with(1, 4);
    ASSERT_EQ(stores().size(), keep_steps + 1);
    {
      const FilesAway copied_later({stores()[0].in(store_) + "/rank-00000.manifest"});
      const auto lacks = HasSubstr("rank 0 finds data of rank 0, and not their manifest");
      const auto find_commit = [](ToyModel& model) { (void)model.find_commit(); };
      const auto begin_later = [](ToyModel& model) { model.begin({.masters = model.fill(), .step = 1}); };
      for (const Call call : {Call(find_commit), kRestore, kInitialize, Call(begin_later)})
        for (const int ranks : {1, 2}) expect_refusal(ranks, call, lacks);
    }
    continue_with(1, 5);
    std::filesystem::remove_all(store_);
  }
}

// In the first store, the only one, too.
TEST_P(ReshardTest, TheFirstStoresManifestThatIsMissingIsNamed) {
  begin_with(1, 2);
  {
    const FilesAway copied_later({store_ + "/rank-00000.manifest"});
    for (const int ranks : {1, 2}) expect_refusal(ranks, kInitialize, HasSubstr("and not their manifest"));
  }
  continue_with(1, 3);
}

// A program that holds all state in memory saves once into its new store, at its end. The older store is still there.
TEST_P(ReshardTest, ASaveThatARankLacksForAMomentIsNotPassedOver) {
  if (on_nvme()) GTEST_SKIP() << "the new store begins with the older one's step";
  begin_with(2, 3);
  continue_with(3, 6);
  const std::string newer = store_ + "/reshard-0001-ranks-3";
  ASSERT_EQ(stores().size(), 2u);
  for (const int rank : {0, 1, 2}) {
    const tiers::detail::StorePaths paths(newer, rank);
    for (const auto& files : {std::vector{paths.data, paths.manifest}, std::vector{paths.manifest}}) {
      const FilesAway unmounted(files);
      for (const int ranks : {2, 3}) expect_refusal(ranks, kRestore, HasSubstr("no commit that every rank has"));
      expect_refusal(3, kInitialize, HasSubstr("no commit that every rank has"));
    }
  }
  const auto swap = [&] {
    std::filesystem::rename(newer + "/rank-00001.manifest", directory_ / "aside");
    std::filesystem::rename(newer + "/rank-00002.manifest", newer + "/rank-00001.manifest");
    std::filesystem::rename(directory_ / "aside", newer + "/rank-00002.manifest");
  };
  swap();
  expect_refusal(3, kRestore, HasSubstr("rank 1 finds none of its files, and those of rank 2"));
  expect_refusal(3, kInitialize, HasSubstr("rank 1 finds none of its files, and those of rank 2"));
  on_engines(2, [](int, ToyModel& model) { EXPECT_THROW(model.restore(), Error); });
  swap();
  continue_with(3, 7);
}

// The same after a step back by a name: the older store has later steps, which the run has given up.
TEST_P(ReshardTest, ASaveAfterAStepBackThatARankLacksIsNotPassedOver) {
  if (on_nvme()) GTEST_SKIP() << "the new store begins with the older one's step";
  begin_and_keep_two(5);
  continue_with(3, 3, "two");
  {
    const tiers::detail::StorePaths paths(store_ + "/reshard-0001-ranks-3", 2);
    const FilesAway unmounted({paths.data, paths.manifest});
    for (const int ranks : {2, 3}) expect_refusal(ranks, kRestore, HasSubstr("no commit that every rank has"));
  }
  continue_with(3, 4);
}

// A rank's file is of another run, which was as far.
TEST_P(ReshardTest, AFirstCommitBesideAnotherRunsFileIsNotPassedOver) {
  if (on_nvme()) GTEST_SKIP() << "the new store begins with the older one's step";
  const std::string newer = store_ + "/reshard-0001-ranks-3";
  const auto train = [&] {
    begin_with(2, 3);
    continue_with(3, 4);
  };
  train();
  std::filesystem::copy(newer, directory_ / "other");
  std::filesystem::remove_all(store_);
  train();
  {
    const FilesAway replaced({newer + "/rank-00001.data", newer + "/rank-00001.manifest"});
    for (const char* const file : {"/rank-00001.data", "/rank-00001.manifest"})
      std::filesystem::copy((directory_ / "other") + file, newer + file);
    expect_refusal(3, kRestore, HasSubstr("no commit that every rank has"));
    for (const char* const file : {"/rank-00001.data", "/rank-00001.manifest"}) std::filesystem::remove(newer + file);
  }
  continue_with(3, 5);
}

// A rank's drive is not mounted, say. What the other ranks trained is not a first start's, and no run begins beside it.
TEST_P(ReshardOnNvmeTest, APartOfAStoreThatTookOverIsNeitherPassedOverNorRemoved) {
  begin_with(2, 2);
  on_engines(3, kRestore);  // its only commit is step 2, and the store of two ranks is gone
  const std::string store = store_ + "/reshard-0001-ranks-3";
  {
    const FilesAway unmounted({store + "/rank-00000.data", store + "/rank-00000.manifest"});
    const auto find_commit = [](ToyModel& model) { (void)model.find_commit(); };
    const auto begin_later = [](ToyModel& model) { model.begin({.masters = model.fill(), .step = 1}); };
    for (const Call call : {Call(find_commit), kRestore, kInitialize, Call(begin_later)})
      expect_refusal(3, call, AllOf(HasSubstr("no commit that every rank has"), HasSubstr("rank 0 finds no")));
    expect_refusal(2, kInitialize, HasSubstr("is of a run of 3 ranks, whose files are not all readable"));
    for (const int rank : {1, 2}) EXPECT_EQ(tiers::Store::look(store, rank).commits.size(), 1u) << rank;
  }
  on_engines(3, [](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 2u); });
}

// The same with drives of their own, after more room was asked for.
TEST_P(ReshardTest, ARanksPartOfAFirstCommitIsKeptUntilTheOtherIsBack) {
  own_drives_ = true;
  begin_with(2, 3);
  setup_.engine.keep_steps = 2;
  continue_with(2, 3);  // in a new store
  std::filesystem::rename(directory_of(1), directory_ / "aside");
  expect_refusal(2, kInitialize, HasSubstr("rank 1 finds no files"));
  expect_refusal(2, kRestore, HasSubstr("rank 1 finds no files"));
  std::filesystem::remove_all(directory_of(1));
  std::filesystem::rename(directory_ / "aside", directory_of(1));
  continue_with(2, 4);
}

// A newer store, at its first commit or further, cannot be used, and the run goes back by a name to the store before
// it. The next start finds the run there.
TEST_P(ReshardOnNvmeTest, AStepBackBehindAStoreThatIsOutOfReachIsContinued) {
  for (const std::uint64_t last_step : {4u, 5u}) {
    SCOPED_TRACE(last_step);
    setup_.engine.keep_steps = 1;
    begin_and_keep_two(3);
    setup_.engine.keep_steps = 2;
    continue_with(2, 4);
    setup_.engine.keep_steps = 3;
    continue_with(2, last_step);
    {
      const FilesAway away({stores().front().in(store_) + "/rank-00001.manifest"});
      expect_refusal(2, kRestore, HasSubstr("move the directory away to go back to step 3 in the store before it"));
      continue_with(2, 3, "two");
      continue_with(2, 4);
    }
    continue_with(2, 5);
    std::filesystem::remove_all(store_);
  }
}

// Whether its other ranks had made theirs cannot be known.
TEST_P(ReshardOnNvmeTest, AFirstCommitWhoseOtherRanksAreElsewhereIsNotReplacedByAnotherNumberOfRanks) {
  on_engines(2, kInitialize);
  {
    const FilesAway unmounted({store_ + "/rank-00000.data", store_ + "/rank-00000.manifest"});
    expect_refusal(1, kInitialize, HasSubstr("first commit of rank 1 of a run of 2 ranks"));
  }
  on_engines(2, [](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 0u); });
}

// Each host has the other rank's drive: the store is whole, so nothing older is continued and nothing is removed.
TEST_P(ReshardTest, HostsThatWereSwappedLoseNothing) {
  own_drives_ = true;
  setup_.engine.keep_steps = 0;
  begin_with(2, 2);
  setup_.engine.keep_steps = 2;
  setup_.engine.mirror.directory = directory_ / "mirror";
  continue_with(2, 3);
  continue_with(2, 4);
  const auto swap = [&] {
    std::filesystem::rename(directory_of(0), directory_ / "aside");
    std::filesystem::rename(directory_of(1), directory_of(0));
    std::filesystem::rename(directory_ / "aside", directory_of(1));
  };
  swap();
  on_engines(2, [](int, ToyModel& model) { EXPECT_THROW(model.restore(), Error); });
  on_engines(2, [](int, ToyModel& model) {
    EXPECT_THROW(model.begin({.masters = model.fill(), .step = 1}), Error) << "as a run that took its state elsewhere";
  });
  swap();
  continue_with(2, 5);
}

// The newer store has a file that cannot be read. The engine must not fall back to the older store.
TEST_P(ReshardTest, ADamagedNewerStoreIsAnErrorAndNothingIsRemoved) {
  begin_and_keep_two(3);
  continue_with(3, 5);
  continue_with(3, 6);
  {
    const FilesAway unmounted({stores()[0].in(store_) + "/rank-00001.manifest"});
    on_engines(3, [&](int, ToyModel& model) {
      EXPECT_THROW(model.find_commit(), StoreError);
      EXPECT_THROW(model.restore(), StoreError);
      EXPECT_THROW(model.initialize(), StoreError);
    });
  }
  {  // a store that keeps steps stays as well when a file of it cannot be reached
    const FilesAway unmounted({store_ + "/rank-00001.manifest"});
    continue_with(3, 7);
  }
  on_engines(3, [&](int, ToyModel& model) { EXPECT_EQ(model.find_checkpoints().size(), 1u); });
}

// No slot of it can be read. It must not be taken for a store that was only being made, and removed.
TEST_P(ReshardTest, ANewerStoreWithoutAReadableCommitStays) {
  setup_.engine.keep_steps = 0;
  begin_with(2, 3);
  std::filesystem::copy(store_, directory_ / "old");
  continue_with(1, 4);
  std::filesystem::copy(directory_ / "old", store_, std::filesystem::copy_options::overwrite_existing);
  const std::string newer = stores()[0].in(store_);
  for (const std::uint32_t slot : {0u, 1u}) damage_slot(newer, 0, slot);
  for (const int ranks : {1, 2})
    expect_refusal(ranks, kRestore, HasSubstr("holds a training, but no commit that every rank has"));
  EXPECT_TRUE(std::filesystem::exists(newer + "/rank-00000.data"));
}

// Earlier programs began a run beside what a killed start of more ranks had left.
TEST_P(ReshardTest, FilesOfTwoRunsAreToldApart) {
  on_engines(2, kInitialize);
  std::filesystem::copy(store_ + "/rank-00001.manifest", directory_ / "other");
  std::filesystem::remove_all(store_);
  begin_with(1, 2);
  std::filesystem::copy(directory_ / "other", store_ + "/rank-00001.manifest");
  const std::string other = on_nvme() ? "at step 0" : "without a commit";
  EXPECT_THAT([&] { StoredModel stored(store_); },
              testing::ThrowsMessage<StoreError>(HasSubstr("rank 0's is of a run of 1 rank, at step 2, and rank 1's is "
                                                           "of a run of 2 ranks, " +
                                                           other)));
}

}  // namespace
}  // namespace hoist::test::reshard_refusals_test
