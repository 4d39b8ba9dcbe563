// SPDX-License-Identifier: Apache-2.0
// A run resumes with another number of ranks: the engine redistributes the state, bit by bit, into a new store, and
// removes the old store only when the new one is committed.
#include <filesystem>
#include <fstream>
#include <map>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/damage.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/detail/store_files.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::reshard_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class ReshardTest : public testing::TestWithParam<std::pair<Placement, Placement>> {
 protected:
  ReshardTest() {
    setup_.engine.store_directory = directory_ / "store";
    setup_.engine.keep_steps = 1;
  }

  bool on_nvme() const { return GetParam().first == Placement::nvme || GetParam().second == Placement::nvme; }

  std::string directory_of(int rank) const {
    return setup_.engine.store_directory + (own_drives_ ? std::to_string(rank) : "");
  }

  void on_engines(int ranks, const std::function<void(int rank, ToyModel&)>& body) {
    on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      EngineOptions engine = setup_.engine;
      engine.store_directory = directory_of(rank);
      Runtime runtime(setup_.runtime, join);
      ToyModel model(runtime, engine);
      body(rank, model);
    });
  }

  // Two ranks train to `last_step`, and keep step 2 as 'two'.
  void begin_and_keep_two(std::uint64_t last_step) {
    on_engines(2, [&](int rank, ToyModel& model) {
      Engine& engine = model.initialize();
      const std::string state = "rank " + std::to_string(rank);
      model.train(1, 2);
      engine.save("two", std::as_bytes(std::span(state))).wait();
      const Digests mine = state_digests(model);
      if (rank == 0) at_["two"] = mine;
      go_on(rank, model, 2, last_step, before_);
    });
    ranks_before_ = 2;
  }

  // Resumes with so many ranks, expects what was there, trains on and saves.
  void continue_with(int ranks, std::uint64_t last_step, const std::string& from = "") {
    Digests after;
    on_engines(ranks, [&](int rank, ToyModel& model) {
      const RestoreReport report = model.restore({.from = from});
      EXPECT_EQ(report.world_size, ranks_before_);
      const std::string state(reinterpret_cast<const char*>(report.caller_state.data()), report.caller_state.size());
      EXPECT_EQ(state, "rank " + std::to_string(rank < ranks_before_ ? rank : 0));
      const Digests found = state_digests(model);
      if (from.empty())
        EXPECT_EQ(found, before_);
      else
        EXPECT_EQ(found, at_.at(from));
      go_on(rank, model, report.step, last_step, after);
    });
    before_ = after;
    ranks_before_ = ranks;
  }

  void go_on(int rank, ToyModel& model, std::uint64_t step, std::uint64_t last_step, Digests& after) {
    const std::string state = "rank " + std::to_string(rank);
    while (step < last_step) {
      model.pass(++step);
      model.engine().step({.caller_state = std::as_bytes(std::span(state))});
    }
    if (!on_nvme()) model.engine().save("", std::as_bytes(std::span(state))).wait();
    model.engine().settle();
    EXPECT_EQ(model.engine().committed_step(), last_step);
    const Digests mine = state_digests(model);
    if (rank == 0) after = mine;
  }

  void begin_with(int ranks, std::uint64_t last_step) {
    on_engines(ranks, [&](int rank, ToyModel& model) {
      model.initialize();
      go_on(rank, model, 0, last_step, before_);
    });
    ranks_before_ = ranks;
  }

  std::vector<detail::StoreDirectory> places() const {
    return detail::store_directories(setup_.engine.store_directory);
  }

  // Damages a commit slot of a rank's manifest, or makes it one that was never written.
  static void spoil(const std::string& store, int rank, std::uint32_t slot, bool blank = false) {
    const std::string manifest = tiers::detail::StorePaths(store, rank).manifest;
    const tiers::Superblock superblock = *tiers::detail::view_manifest(manifest).superblock;
    std::fstream file(manifest, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(superblock.slot_offset(slot)));
    file << std::string(blank ? superblock.slot_bytes() : 1, '\0');
  }
  // Removes a store as a process that was killed after it had renamed the manifest of rank 0.
  void put_back_half_removed(const std::filesystem::path& copy, const std::string& store) {
    std::filesystem::copy(copy, store);
    std::filesystem::rename(store + "/rank-00000.manifest", store + "/rank-00000.manifest-new");
    EXPECT_TRUE(tiers::Store::is_half_removed(store));
  }

  TempDirectory directory_;
  ToySetup setup_ = toy_setup(GetParam().first, GetParam().second);
  Digests before_;
  std::map<std::string, Digests> at_;
  int ranks_before_ = 0;
  bool own_drives_ = false;  // each rank has a directory that the others do not see
};

TEST_P(ReshardTest, OneFourThreeOne) {
  begin_with(1, 3);
  continue_with(4, 5);
  continue_with(4, 6);  // in place
  continue_with(3, 8);
  continue_with(1, 9);
  continue_with(1, 10);
  ASSERT_EQ(places().size(), 1u);
  EXPECT_EQ(places()[0].name, "reshard-0003-ranks-1");
  EXPECT_FALSE(std::filesystem::exists(setup_.engine.store_directory + "/rank-00000.data"));
  const StoredModel stored(setup_.engine.store_directory);  // tools find it below
  EXPECT_EQ(stored.step(), 10u);
  EXPECT_EQ(stored.world_size(), 1);
}

// Moments pass through fp32 on their way, and come out of it as they were, exponents of their blocks included.
TEST_P(ReshardTest, StateOfEightBits) {
  setup_.engine.optimizer_defaults.moments = MomentType::fp8;
  setup_.engine.optimizer_defaults.remainder = RemainderType::int8;
  begin_with(1, 3);
  continue_with(4, 5);
  continue_with(3, 8);
  continue_with(1, 9);
}

// The padding between parameters keeps its accumulator, too, which no parameter's values replace.
TEST_P(ReshardTest, WhatAdagradBeginsWithStays) {
  setup_.engine.optimizer_defaults.kind = optim::OptimizerKind::adagrad;
  setup_.engine.optimizer_defaults.initial_accumulator = 0.1;
  setup_.engine.optimizer_defaults.epsilon = 0;
  begin_with(1, 3);
  continue_with(2, 5);
  continue_with(1, 6);
}

// The memory for reading the old store is taken from the pinned budget and given back afterwards. A budget that is too
// small is refused, and the error names one that works.
TEST_P(ReshardTest, ReadingTheOldStoreIsWithinTheBudget) {
  begin_with(3, 2);
  const std::uint64_t reading_bytes = StoredModel(setup_.engine.store_directory).memory_bytes();
  const std::uint64_t plain_bytes = predict(setup_.runtime, setup_.engine, describe({}), 2).pinned.least_bytes;
  const auto resume = [&](std::uint64_t budget) {
    setup_.runtime.pinned_memory_bytes = budget;
    std::uint64_t need_bytes = 0;
    on_engines(2, [&](int rank, ToyModel& model) {
      try {
        EXPECT_EQ(model.restore().step, 2u);
        const tiers::Budget& pinned = model.engine().runtime().pinned_budget();
        EXPECT_EQ(pinned.peak_bytes() - pinned.held_bytes(), reading_bytes);
      } catch (const BudgetError& error) {
        EXPECT_EQ(error.need.key, "hoist.pinned_memory");
        if (rank == 0) need_bytes = error.need.need_bytes;
      }
    });
    return need_bytes;
  };
  const std::uint64_t need_bytes = resume(round_up(plain_bytes, kBlockAlignment));
  EXPECT_GE(need_bytes, plain_bytes + reading_bytes);
  EXPECT_EQ(resume(need_bytes - kBlockAlignment), need_bytes);
  EXPECT_EQ(resume(need_bytes), 0u);
}

TEST_P(ReshardTest, AStoreThatKeepsStepsStaysAndIsGoneBackTo) {
  begin_and_keep_two(4);
  continue_with(3, 6);
  EXPECT_EQ(places().size(), 2u);
  on_engines(3, [&](int, ToyModel& model) {
    const auto kept = model.find_checkpoints();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].name, "two");
    EXPECT_EQ(model.find_commit(), 6u);
  });
  ranks_before_ = 2;
  continue_with(3, 5, "two");  // also a new store: the one of step 6 was newer than the one that keeps it
  continue_with(3, 7);
  EXPECT_EQ(places().size(), 2u);
  on_engines(3, [&](int rank, ToyModel& model) {
    model.restore();
    const std::string state = "rank " + std::to_string(rank);
    model.engine().save("two", std::as_bytes(std::span(state))).wait();  // replaces the one that the old store keeps
    const auto kept = model.find_checkpoints();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].step, 7u);
  });
  continue_with(3, 8);
  EXPECT_EQ(places().size(), 1u);
}

TEST_P(ReshardTest, StepsAreKeptOverAllStoresAndNoMore) {
  setup_.engine.keep_steps = 1;
  begin_and_keep_two(2);
  for (const int ranks : {1, 2, 1, 2}) {
    on_engines(ranks, [&](int rank, ToyModel& model) {
      const std::uint64_t step = model.restore().step;
      EXPECT_LE(places().size(), 2u) << "the newest, and the one that keeps the last named step";
      EXPECT_EQ(model.find_checkpoints().size(), 1u);
      go_on(rank, model, step, step + 1, before_);
      model.engine().save(fmt::format("step {}", step + 1), {}).wait();
    });
  }
}

// The newer name counts, and yet what a start goes back to is there for the next one, should it fail.
TEST_P(ReshardTest, AStepIsGoneBackToMoreThanOnce) {
  setup_.engine.keep_steps = 1;
  begin_and_keep_two(2);
  on_engines(1, [&](int rank, ToyModel& model) {
    go_on(rank, model, model.restore().step, 6, before_);
    model.engine().save("six", {}).wait();
  });
  for (const int ranks : {2, 1})
    on_engines(ranks, [&](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "two"}).step, 2u); });
}

TEST_P(ReshardTest, DamageIsToldWithTheStepsThatOlderStoresKeep) {
  begin_and_keep_two(2);
  continue_with(1, 4);
  flip_bits(fmt::format("{}/rank-00000.data", places()[0].in(setup_.engine.store_directory)), 5, 4096);
  on_engines(1, [&](int, ToyModel& model) {
    EXPECT_THAT(
        [&] {
          model.restore();
          model.train(5, 6);
        },
        testing::ThrowsMessage<CorruptionError>(HasSubstr("'two' (step 2)")));
  });
}

TEST_P(ReshardTest, ACrashBeforeTheNewStoreIsCommittedLeavesTheOldOne) {
  begin_with(2, 3);
  // The files of a process that died while it was making the store of three ranks.
  const std::string half = setup_.engine.store_directory + "/reshard-0001-ranks-3";
  std::filesystem::create_directory(half);
  std::ofstream(half + "/rank-00000.data").close();
  std::filesystem::resize_file(half + "/rank-00000.data", kMiB);
  continue_with(3, 4);
  continue_with(3, 5);  // without NVMe, what is left goes only now that the new store has a commit
  ASSERT_EQ(places().size(), 1u);
  EXPECT_EQ(places()[0].name, "reshard-0001-ranks-3");
}

// The run was started twice: the second process must leave the directory alone in which the first makes its new store.
TEST_P(ReshardTest, APlaceThatAnotherProcessIsMakingIsLeftAlone) {
  begin_with(2, 3);
  const std::string theirs = setup_.engine.store_directory + "/reshard-0001-ranks-3";
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
    tiers::detail::Creation other(
        tiers::detail::StorePaths(setup_.engine.store_directory + "/reshard-0001-ranks-3", 2));
    other.claim({});
    setup_.engine.lock_timeout = std::chrono::milliseconds(100);
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_THAT([&] { model.restore(); },
                  testing::ThrowsMessage<StoreError>(HasSubstr("another process continues from the store in")));
    });
  }
  continue_with(2, 4);
}

// A process that was killed in its first commit left nothing, for any number of ranks.
TEST_P(ReshardTest, ATornFirstCommitIsReplacedByAnotherNumberOfRanks) {
  if (!on_nvme()) GTEST_SKIP() << "without NVMe the first commit is a save";
  on_engines(2, [](int, ToyModel& model) { model.initialize(); });
  for (const int rank : {0, 1}) {
    spoil(setup_.engine.store_directory, rank, 0, /*blank=*/true);
    spoil(setup_.engine.store_directory, rank, 1);
  }
  begin_with(3, 2);
  continue_with(3, 3);
}

// One rank had made its first commit when all were killed, the other had not.
TEST_P(ReshardTest, AFirstStartThatWasNeverFinishedIsReplacedByAnyNumberOfRanks) {
  if (!on_nvme()) GTEST_SKIP() << "without NVMe the first commit is a save";
  for (const int lacking : {0, 1}) {
    for (const int ranks : {1, 2, 3}) {
      on_engines(2, [](int, ToyModel& model) { model.initialize(); });
      for (const std::uint32_t slot : {0u, 1u}) spoil(setup_.engine.store_directory, lacking, slot, /*blank=*/true);
      begin_with(ranks, 2);
      EXPECT_EQ(tiers::Store::ranks_in(setup_.engine.store_directory).size(), static_cast<std::size_t>(ranks));
      EXPECT_EQ(StoredModel(setup_.engine.store_directory).step(), 2u);
      continue_with(4, 3);
      std::filesystem::remove_all(setup_.engine.store_directory);
    }
  }
}

// A rank's drive is not mounted, say. What the other ranks trained is not a first start's.
TEST_P(ReshardTest, APartOfAStoreThatTookOverOutlivesANewBeginning) {
  if (!on_nvme()) GTEST_SKIP() << "without NVMe the first commit is a save";
  begin_with(2, 2);
  on_engines(3, [](int, ToyModel& model) { model.restore(); });  // its only commit is step 2
  const std::string store = setup_.engine.store_directory + "/reshard-0001-ranks-3";
  std::filesystem::create_directory(directory_ / "elsewhere");
  for (const char* file : {"data", "manifest"})
    std::filesystem::rename(store + "/rank-00000." + file, directory_ / (std::string("elsewhere/rank-00000.") + file));
  on_engines(3, [](int, ToyModel& model) { model.initialize(); });
  for (const int rank : {1, 2}) EXPECT_EQ(tiers::Store::look(store, rank).commits.size(), 1u) << rank;
}

// Whether its other ranks had made theirs cannot be known.
TEST_P(ReshardTest, AFirstCommitWhoseOtherRanksAreElsewhereIsNotReplacedByAnotherNumberOfRanks) {
  if (!on_nvme()) GTEST_SKIP() << "without NVMe the first commit is a save";
  on_engines(2, [](int, ToyModel& model) { model.initialize(); });
  const std::string& store = setup_.engine.store_directory;
  std::filesystem::create_directory(directory_ / "elsewhere");
  for (const char* file : {"data", "manifest"})
    std::filesystem::rename(store + "/rank-00000." + file, directory_ / (std::string("elsewhere/rank-00000.") + file));
  on_engines(1, [](int, ToyModel& model) {
    EXPECT_THAT([&] { model.initialize(); },
                testing::ThrowsMessage<StoreError>(HasSubstr("first commit of rank 1 of a run of 2 ranks")));
  });
  for (const char* file : {"data", "manifest"})
    std::filesystem::rename(directory_ / (std::string("elsewhere/rank-00000.") + file), store + "/rank-00000." + file);
  on_engines(2, [](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 0u); });
}

// A first start of two ranks was killed when it was about to name its manifests.
TEST_P(ReshardTest, WhatAFirstStartLeftIsRemovedByTheNextAndTakesNoStoreWithIt) {
  const std::string& store = setup_.engine.store_directory;
  const std::string data = store + "/rank-00001.data", manifest_new = store + "/rank-00001.manifest-new";
  on_engines(2, [](int, ToyModel& model) { model.initialize(); });
  for (const int rank : {0, 1}) {
    const tiers::detail::StorePaths paths(store, rank);
    std::filesystem::rename(paths.manifest, paths.manifest_new);
  }
  std::filesystem::copy(data, directory_ / "data");
  std::filesystem::copy(manifest_new, directory_ / "manifest-new");
  on_engines(1, [&](int rank, ToyModel& model) {
    model.initialize();
    EXPECT_FALSE(std::filesystem::exists(data));
    EXPECT_FALSE(std::filesystem::exists(manifest_new));
    go_on(rank, model, 0, 1, before_);
    model.engine().save("kept", {}).wait();
  });
  ranks_before_ = 1;
  std::filesystem::copy(directory_ / "data", data);  // as earlier programs left them
  std::filesystem::copy(directory_ / "manifest-new", manifest_new);
  EXPECT_FALSE(tiers::Store::is_half_removed(store));
  on_engines(2, [&](int rank, ToyModel& model) { go_on(rank, model, model.restore().step, 2, before_); });
  on_engines(2, [](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "kept"}).step, 1u); });
}

// Earlier programs began a run beside what a killed start of more ranks had left.
TEST_P(ReshardTest, FilesOfTwoRunsAreToldApart) {
  const std::string& store = setup_.engine.store_directory;
  on_engines(2, [](int, ToyModel& model) { model.initialize(); });
  std::filesystem::copy(store + "/rank-00001.manifest", directory_ / "other");
  std::filesystem::remove_all(store);
  begin_with(1, 2);
  std::filesystem::copy(directory_ / "other", store + "/rank-00001.manifest");
  const std::string other = on_nvme() ? "at step 0" : "without a commit";
  EXPECT_THAT([&] { StoredModel stored(store); },
              testing::ThrowsMessage<StoreError>(HasSubstr("rank 0's is of a run of 1 rank, at step 2, and rank 1's is "
                                                           "of a run of 2 ranks, " +
                                                           other)));
}

// A named checkpoint of a store that nothing has replaced yet stays, even if the store seems to be half removed.
TEST_P(ReshardTest, AHalfRemovedStoreStaysWhileItHoldsANamedCheckpointThatCounts) {
  begin_and_keep_two(3);
  const std::string manifest = setup_.engine.store_directory + "/rank-00001.manifest";
  continue_with(3, 4);
  continue_with(3, 5);
  std::filesystem::rename(manifest, manifest + "-new");
  EXPECT_TRUE(tiers::Store::is_half_removed(setup_.engine.store_directory));
  continue_with(3, 6);
  std::filesystem::rename(manifest + "-new", manifest);
  ranks_before_ = 2;
  continue_with(3, 7, "two");
}

// No slot of it can be read. It must not be taken for a store that was only being made, and removed.
TEST_P(ReshardTest, ANewerStoreWithoutAReadableCommitStays) {
  setup_.engine.keep_steps = 0;
  begin_with(2, 3);
  std::filesystem::copy(setup_.engine.store_directory, directory_ / "old");
  continue_with(1, 4);
  std::filesystem::copy(directory_ / "old", setup_.engine.store_directory,
                        std::filesystem::copy_options::overwrite_existing);
  const std::string newer = setup_.engine.store_directory + "/" + places()[0].name;
  for (const std::uint32_t slot : {0u, 1u}) spoil(newer, 0, slot);
  for (const int ranks : {1, 2}) {
    on_engines(ranks, [](int, ToyModel& model) {
      EXPECT_THAT([&] { model.restore(); },
                  testing::ThrowsMessage<StoreError>(HasSubstr("holds a training, but no commit that every rank has")));
    });
  }
  EXPECT_TRUE(std::filesystem::exists(newer + "/rank-00000.data"));
}

// The new store's ranks died when only some of them had made their first commit.
TEST_P(ReshardTest, HalfAFirstCommitOfTheNewStoreLeavesTheOldOne) {
  if (!on_nvme()) GTEST_SKIP() << "without NVMe the new store is committed to by a save";
  begin_with(2, 3);
  std::filesystem::copy(setup_.engine.store_directory, directory_ / "old", std::filesystem::copy_options::recursive);
  on_engines(3, [&](int, ToyModel& model) { model.restore(); });
  const std::string half = setup_.engine.store_directory + "/reshard-0001-ranks-3";
  for (const std::uint32_t slot : {0u, 1u}) spoil(half, 2, slot, /*blank=*/true);
  std::filesystem::copy(directory_ / "old", setup_.engine.store_directory, std::filesystem::copy_options::recursive);
  continue_with(3, 5);
  ASSERT_EQ(places().size(), 1u);
  EXPECT_EQ(places()[0].name, "reshard-0001-ranks-3");
}

TEST_P(ReshardTest, MoreRoomForNamedCheckpointsIsMadeByDealingOutAnew) {
  begin_with(2, 2);
  setup_.engine.keep_steps = 3;
  continue_with(2, 4);
  EXPECT_EQ(places()[0].name, "reshard-0001-ranks-2");
}

// Each rank then takes over its own part: the files of the others are out of its sight.
TEST_P(ReshardTest, MoreRoomIsMadeOnDrivesOfTheRanksOwn) {
  own_drives_ = true;
  setup_.engine.keep_steps = 0;
  begin_with(2, 2);
  setup_.engine.keep_steps = 2;
  continue_with(2, 3);
  continue_with(2, 4);  // without NVMe, what was taken over from goes only now that the new store has a commit
  setup_.engine.mirror.directory = directory_ / "mirror";
  continue_with(2, 5);
  continue_with(2, 6);
  for (const int rank : {0, 1}) {
    const auto stores = detail::store_directories(directory_of(rank));
    ASSERT_EQ(stores.size(), 1u) << "rank " << rank;
    EXPECT_EQ(stores[0].name, "reshard-0002-ranks-2");
  }
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

TEST_P(ReshardTest, RefusalsSayWhatToDo) {
  begin_with(2, 2);
  const auto refusal = [&](int ranks, const std::function<void(ToyModel&)>& act) {
    std::string message;
    on_engines(ranks, [&](int rank, ToyModel& model) {
      try {
        act(model);
      } catch (const Error& error) {
        if (rank == 0) message = error.what();
      }
    });
    return message;
  };
  EXPECT_THAT(refusal(3, [](ToyModel& model) { model.initialize(); }),
              HasSubstr("holds step 2 of a run of 2 ranks; continue it (Engine::restore()"));
  std::filesystem::rename(setup_.engine.store_directory + "/rank-00001.manifest", directory_ / "elsewhere");
  EXPECT_THAT(refusal(3, [](ToyModel& model) { model.restore(); }),
              AllOf(HasSubstr("is of a run of 2 ranks, whose files are not all readable"),
                    HasSubstr("start 2 ranks, or bring the files together")));
}

// Each rank sees the files on its own drive, and rank 2 none.
TEST_P(ReshardTest, WithoutASharedFileSystemTheRefusalNamesTheNumberOfRanks) {
  own_drives_ = true;
  begin_with(2, 2);
  on_engines(3, [](int, ToyModel& model) {
    EXPECT_THAT([&] { model.restore(); }, testing::ThrowsMessage<StoreError>(
                                              AllOf(HasSubstr("is of a run of 2 ranks"), HasSubstr("start 2 ranks"))));
  });
}

TEST_P(ReshardTest, ThatThereIsNoRunIsSaid) {
  on_engines(2, [](int, ToyModel& model) {
    EXPECT_THAT([&] { model.restore(); },
                testing::ThrowsMessage<StoreError>(
                    AllOf(HasSubstr("there is no run in "), HasSubstr("begin one with Engine::create()"))));
  });
}

TEST_P(ReshardTest, NothingIsTakenOverIntoAStoreThatKeepsNothing) {
  if (!on_nvme()) GTEST_SKIP() << "durability none is for state on NVMe";
  begin_with(2, 2);
  setup_.engine.durability = tiers::Durability::none;
  setup_.engine.keep_steps = 0;
  on_engines(3, [&](int, ToyModel& model) { EXPECT_THROW(model.restore(), StoreError); });
  setup_.engine.durability = tiers::Durability::step;
  continue_with(3, 3);
}

// A run that never committed leaves files of ranks that the next one has not.
TEST_P(ReshardTest, ARunThatNeverCommittedLeavesNothingForOthersToRead) {
  setup_.engine.keep_steps = 0;
  if (on_nvme()) setup_.engine.durability = tiers::Durability::none;  // else the program's saves are the commits
  on_engines(3, [](int, ToyModel& model) { model.initialize(); });
  EXPECT_EQ(tiers::Store::ranks_in(setup_.engine.store_directory).size(), 3u);
  setup_.engine.durability = tiers::Durability::step;
  begin_with(1, 2);
  EXPECT_EQ(tiers::Store::ranks_in(setup_.engine.store_directory), std::vector<int>{0});
  EXPECT_EQ(StoredModel(setup_.engine.store_directory).step(), 2u);
  continue_with(2, 3);
}

// A kill while the first store is removed: its manifests have other names, and its data is still there.
TEST_P(ReshardTest, ARemovalThatWasKilledIsEndedByTheNextStart) {
  setup_.engine.keep_steps = 0;
  begin_with(1, 2);
  const std::string manifest = setup_.engine.store_directory + "/rank-00000.manifest";
  const std::string data = setup_.engine.store_directory + "/rank-00000.data";
  std::filesystem::copy(data, directory_ / "data");
  std::filesystem::copy(manifest, directory_ / "manifest");
  continue_with(2, 3);
  continue_with(2, 4);  // removes it
  std::filesystem::copy(directory_ / "data", data);
  std::filesystem::copy(directory_ / "manifest", manifest + "-new");
  EXPECT_TRUE(tiers::Store::is_half_removed(setup_.engine.store_directory));
  continue_with(2, 5);
  EXPECT_FALSE(std::filesystem::exists(data));
  EXPECT_FALSE(std::filesystem::exists(manifest + "-new"));
}

// Some ranks' manifests have other names, and some have theirs.
TEST_P(ReshardTest, ARemovalThatWasKilledBetweenTwoRanksIsEndedByTheNextStart) {
  setup_.engine.keep_steps = 0;
  const std::string first = setup_.engine.store_directory, second = first + "/reshard-0001-ranks-3";
  begin_with(2, 2);
  std::filesystem::copy(first, directory_ / "first");
  continue_with(3, 3);
  continue_with(3, 4);  // removes it
  std::filesystem::copy(second, directory_ / "second");
  put_back_half_removed(directory_ / "first", first);
  continue_with(3, 5);
  EXPECT_FALSE(std::filesystem::exists(first + "/rank-00001.data"));
  continue_with(2, 6);
  continue_with(2, 7);
  put_back_half_removed(directory_ / "second", second);
  continue_with(2, 8);
  EXPECT_FALSE(std::filesystem::exists(second));
}

// The newer store has a file that cannot be read. The engine must not fall back to the older store.
TEST_P(ReshardTest, ADamagedNewerStoreIsAnErrorAndNothingIsRemoved) {
  begin_and_keep_two(3);
  continue_with(3, 5);
  continue_with(3, 6);
  const std::string newer = setup_.engine.store_directory + "/" + places()[0].name;
  const std::string older = setup_.engine.store_directory + "/rank-00001.manifest";
  std::filesystem::rename(newer + "/rank-00001.manifest", directory_ / "elsewhere");
  on_engines(3, [&](int, ToyModel& model) {
    EXPECT_THROW(model.find_commit(), StoreError);
    EXPECT_THROW(model.restore(), StoreError);
    EXPECT_THROW(model.initialize(), StoreError);
  });
  std::filesystem::rename(directory_ / "elsewhere", newer + "/rank-00001.manifest");
  // A store that keeps steps stays as well when a file of it cannot be reached.
  std::filesystem::rename(older, directory_ / "elsewhere");
  continue_with(3, 7);
  std::filesystem::rename(directory_ / "elsewhere", older);
  on_engines(3, [&](int, ToyModel& model) { EXPECT_EQ(model.find_checkpoints().size(), 1u); });
}

// One rank died before it had gone back to a named checkpoint with the others. All ranks still have the last commit.
TEST_P(ReshardTest, ACrashBetweenRanksGoingBackLeavesTheLastCommit) {
  if (!on_nvme()) GTEST_SKIP() << "with two commits in all, the step that was to be gone back to is common as well";
  begin_and_keep_two(6);
  const Digests at_six = before_;
  const std::string manifest = setup_.engine.store_directory + "/rank-00001.manifest";
  std::filesystem::copy(manifest, directory_ / "before");
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "two"}).step, 2u); });
  std::filesystem::rename(directory_ / "before", manifest);
  std::filesystem::copy(setup_.engine.store_directory, directory_ / "store-between");
  const auto continue_at_six = [&](int ranks, std::uint32_t keep_steps) {
    std::filesystem::remove_all(setup_.engine.store_directory);
    std::filesystem::copy(directory_ / "store-between", setup_.engine.store_directory);
    setup_.engine.keep_steps = keep_steps;
    before_ = at_six;
    ranks_before_ = 2;
    continue_with(ranks, 7);  // expects the state of step 6
  };
  continue_at_six(2, 1);
  continue_at_six(2, 2);  // into a new store
  continue_at_six(3, 1);
}

std::string placement_names(const testing::TestParamInfo<std::pair<Placement, Placement>>& cell) {
  const char* names[] = {"device", "pinned", "nvme"};
  return std::string(names[static_cast<int>(cell.param.first)]) + "_" + names[static_cast<int>(cell.param.second)];
}

INSTANTIATE_TEST_SUITE_P(Placements, ReshardTest,
                         testing::Values(std::pair(Placement::nvme, Placement::nvme),
                                         std::pair(Placement::pinned, Placement::nvme),
                                         std::pair(Placement::pinned, Placement::pinned)),
                         placement_names);

}  // namespace
}  // namespace hoist::test::reshard_test
