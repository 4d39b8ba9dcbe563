// SPDX-License-Identifier: Apache-2.0
// Tests the files that a killed start leaves, and how the next start handles them.
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include <hoist/zero/checkpoint/stored_model.hpp>

#include "reshard_fixture.hpp"

namespace hoist::test::reshard_kills_test {
namespace {

TEST_P(ReshardTest, ACrashBeforeTheNewStoreIsCommittedLeavesTheOldOne) {
  begin_with(2, 3);
  // The files of a process that died while it was making the store of three ranks.
  const std::string half = store_ + "/reshard-0001-ranks-3";
  std::filesystem::create_directory(half);
  std::ofstream(half + "/rank-00000.data").close();
  std::filesystem::resize_file(half + "/rank-00000.data", kMiB);
  continue_with(3, 4);
  continue_with(3, 5);  // without NVMe, the old store is removed only now that the new one has a commit
  ASSERT_EQ(stores().size(), 1u);
  EXPECT_EQ(stores()[0].name, "reshard-0001-ranks-3");
}

// More than named checkpoints can keep, each in a store of its own; and the other rank has none of these directories.
TEST_P(ReshardTest, AStoreIsFoundBehindAnyNumberOfNewerOnes) {
  own_drives_ = true;
  begin_with(2, 2);
  for (std::uint64_t order = 1; order <= 70; ++order)
    std::filesystem::create_directory(detail::new_store_directory(order, 2).in(directory_of(0)));
  continue_with(2, 3);
}

// A process that was killed in its first commit left nothing, for any number of ranks.
TEST_P(ReshardOnNvmeTest, ATornFirstCommitIsReplacedByAnotherNumberOfRanks) {
  on_engines(2, kInitialize);
  for (const int rank : {0, 1}) {
    blank_slot(store_, rank, 0);
    damage_slot(store_, rank, 1);
  }
  begin_with(3, 2);
  continue_with(3, 3);
}

// One rank had made its first commit when all were killed, the other had not.
TEST_P(ReshardOnNvmeTest, AFirstStartThatWasNeverFinishedIsReplacedByAnyNumberOfRanks) {
  for (const int lacking : {0, 1}) {
    for (const int ranks : {1, 2, 3}) {
      on_engines(2, kInitialize);
      for (const std::uint32_t slot : {0u, 1u}) blank_slot(store_, lacking, slot);
      begin_with(ranks, 2);
      EXPECT_EQ(tiers::Store::ranks_in(store_).size(), static_cast<std::size_t>(ranks));
      EXPECT_EQ(StoredModel(store_).step(), 2u);
      continue_with(4, 3);
      std::filesystem::remove_all(store_);
    }
  }
}

// A first start of two ranks was killed when it was about to name its manifests.
TEST_P(ReshardTest, WhatAFirstStartLeftIsRemovedByTheNextAndTakesNoStoreWithIt) {
  const std::string data = store_ + "/rank-00001.data", manifest_new = store_ + "/rank-00001.manifest-new";
  on_engines(2, kInitialize);
  for (const int rank : {0, 1}) {
    const tiers::detail::StorePaths paths(store_, rank);
    std::filesystem::rename(paths.manifest, paths.manifest_new);
  }
  std::filesystem::copy(data, directory_ / "data");
  std::filesystem::copy(manifest_new, directory_ / "manifest-new");
  on_engines(1, [&](int rank, ToyModel& model) {
    model.initialize();
    EXPECT_FALSE(std::filesystem::exists(data));
    EXPECT_FALSE(std::filesystem::exists(manifest_new));
    train_to(rank, model, 0, 1, before_);
    model.engine().save("kept", {}).wait();
  });
  ranks_before_ = 1;
  std::filesystem::copy(directory_ / "data", data);  // as earlier programs left them
  std::filesystem::copy(directory_ / "manifest-new", manifest_new);
  EXPECT_FALSE(tiers::Store::is_half_removed(store_));
  on_engines(2, [&](int rank, ToyModel& model) { train_to(rank, model, model.restore().step, 2, before_); });
  on_engines(2, [](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "kept"}).step, 1u); });
}

// The new store's ranks died when only some of them had made their first commit.
TEST_P(ReshardOnNvmeTest, HalfAFirstCommitOfTheNewStoreLeavesTheOldOne) {
  begin_with(2, 3);
  std::filesystem::copy(store_, directory_ / "old", std::filesystem::copy_options::recursive);
  on_engines(3, kRestore);
  const std::string half = store_ + "/reshard-0001-ranks-3";
  for (const std::uint32_t slot : {0u, 1u}) blank_slot(half, 2, slot);
  std::filesystem::copy(directory_ / "old", store_, std::filesystem::copy_options::recursive);
  continue_with(3, 5);
  ASSERT_EQ(stores().size(), 1u);
  EXPECT_EQ(stores()[0].name, "reshard-0001-ranks-3");
}

// A run that never committed leaves files of ranks that the next one has not.
TEST_P(ReshardTest, ARunThatNeverCommittedLeavesNothingForOthersToRead) {
  setup_.engine.keep_steps = 0;
  if (on_nvme()) setup_.engine.durability = tiers::Durability::none;  // else the program's saves are the commits
  on_engines(3, kInitialize);
  EXPECT_EQ(tiers::Store::ranks_in(store_).size(), 3u);
  setup_.engine.durability = tiers::Durability::step;
  begin_with(1, 2);
  EXPECT_EQ(tiers::Store::ranks_in(store_), std::vector<int>{0});
  EXPECT_EQ(StoredModel(store_).step(), 2u);
  continue_with(2, 3);
}

// A kill while the first store is removed: its manifests have other names, and its data is still there.
TEST_P(ReshardTest, ARemovalThatWasKilledIsEndedByTheNextStart) {
  setup_.engine.keep_steps = 0;
  begin_with(1, 2);
  const std::string manifest = store_ + "/rank-00000.manifest", data = store_ + "/rank-00000.data";
  std::filesystem::copy(data, directory_ / "data");
  std::filesystem::copy(manifest, directory_ / "manifest");
  continue_with(2, 3);
  continue_with(2, 4);  // removes it
  std::filesystem::copy(directory_ / "data", data);
  std::filesystem::copy(directory_ / "manifest", manifest + "-new");
  EXPECT_TRUE(tiers::Store::is_half_removed(store_));
  continue_with(2, 5);
  EXPECT_FALSE(std::filesystem::exists(data));
  EXPECT_FALSE(std::filesystem::exists(manifest + "-new"));
}

// Some ranks' manifests have other names, and some have theirs.
TEST_P(ReshardTest, ARemovalThatWasKilledBetweenTwoRanksIsEndedByTheNextStart) {
  setup_.engine.keep_steps = 0;
  const std::string second = store_ + "/reshard-0001-ranks-3";
  begin_with(2, 2);
  std::filesystem::copy(store_, directory_ / "first");
  continue_with(3, 3);
  continue_with(3, 4);  // removes it
  std::filesystem::copy(second, directory_ / "second");
  make_half_removed_store(directory_ / "first", store_);
  continue_with(3, 5);
  EXPECT_FALSE(std::filesystem::exists(store_ + "/rank-00001.data"));
  continue_with(2, 6);
  continue_with(2, 7);
  make_half_removed_store(directory_ / "second", second);
  continue_with(2, 8);
  EXPECT_FALSE(std::filesystem::exists(second));
}

}  // namespace
}  // namespace hoist::test::reshard_kills_test
