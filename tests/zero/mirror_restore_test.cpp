// SPDX-License-Identifier: Apache-2.0
// A run that has lost its drives goes on from its mirror, bit by bit, and one that has not does not.
#include <filesystem>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/damage.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "mirror_run.hpp"
#include "reshard_fixture.hpp"

namespace hoist::test::mirror_restore_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class MirrorRestoreTest : public MirrorRun {
 protected:
  // Step 5 in a new store, whose mirror holds step 4.
  void leave_a_newer_first_commit();
};

TEST_P(MirrorRestoreTest, ARunGoesOnFromItWhenItsDriveIsGone) {
  const auto& states = undisturbed(6);
  for (const auto& [before, after] : std::vector<std::pair<int, int>>{{1, 1}, {2, 2}, {2, 1}, {1, 4}}) {
    SCOPED_TRACE(std::to_string(before) + " ranks, then " + std::to_string(after));
    train_and_mirror(before, 4);
    fs::remove_all(setup_.engine.store_directory);
    on_engines(after, [&](int, ToyModel& model) {
      EXPECT_EQ(model.find_commit(), 4u);
      const RestoreReport report = model.restore();
      EXPECT_EQ(report.step, 4u);
      EXPECT_EQ(report.mirror, setup_.engine.mirror.directory);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(report.caller_state.data()), report.caller_state.size()),
                "step 4");
      EXPECT_EQ(state_digests(model), states.at(4));
      for (const std::uint64_t step : {5u, 6u}) take_step(model, step);
      model.engine().save("", bytes_of("step 6"), {.mirror = true}).wait();
      EXPECT_EQ(state_digests(model), states.at(6));
    });
    // The store that the first run's mirror was is gone, and the one that took its place is whole.
    EXPECT_EQ(stores_in(setup_.engine.mirror.directory).size(), 1u);
    {
      StoredModel copy(setup_.engine.mirror.directory);
      EXPECT_EQ(copy.step(), 6u);
      EXPECT_EQ(copy.world_size(), after);
      EXPECT_TRUE(verify_job(std::vector{setup_.engine.mirror.directory})[0].is_sound());
    }
    // The next start finds its own store again.
    on_engines(after, [&](int, ToyModel& model) {
      const RestoreReport report = model.restore();
      EXPECT_EQ(report.step, 6u);
      EXPECT_EQ(report.mirror, "");
      EXPECT_EQ(state_digests(model), states.at(6));
    });
    fs::remove_all(setup_.engine.store_directory);
    fs::remove_all(setup_.engine.mirror.directory);
  }
}

// The files of a healthy rank stay where they are: a person may want them.
TEST_P(MirrorRestoreTest, OneRankWithANewDriveTakesAllBackToIt) {
  own_drives_ = true;
  const auto& states = undisturbed(6);
  on_engines(2, [&](int, ToyModel& model) {
    model.initialize();
    for (std::uint64_t step = 1; step <= 6; ++step) {
      take_step(model, step);
      if (step == 4) model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
    }
    if (!on_nvme()) model.engine().save("", bytes_of("step 6")).wait();
  });
  for (int lost = 0; lost < 2; ++lost) {  // once more: a healthy rank then holds half a store that took over
    fs::remove_all(setup_.engine.store_directory + "1");
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_EQ(model.restore().step, 4u);
      EXPECT_EQ(state_digests(model), states.at(4));
      for (const std::uint64_t step : {5u, 6u}) take_step(model, step);
      EXPECT_EQ(state_digests(model), states.at(6));
      if (!on_nvme()) model.engine().save("", bytes_of("step 6")).wait();
    });
  }
  EXPECT_TRUE(fs::exists(setup_.engine.store_directory + "0/rank-00000.manifest"));
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 6u); });
}

// What a restore that ended early has left on the new drive, even the new store's first commit, is not the rank's
// training. (With nothing on NVMe a restore commits nothing, and leaves a store without a commit whenever it ends.)
TEST_P(MirrorRestoreTest, ARestoreFromItMayEndAtAnyMomentAndIsBegunAnew) {
  own_drives_ = true;
  const auto& states = undisturbed(4);
  train_and_mirror(2, 4);
  fs::remove_all(setup_.engine.store_directory + "1");
  for (const int failing : {0, 1}) {
    for (const char* const file : {".data", ".manifest"}) {
      SCOPED_TRACE("rank " + std::to_string(failing) + ", " + file);
      faults_ = std::make_shared<Faults>(1);
      faults_->add({.operation = aio::Operation::write,
                    .path_contains = of_rank(failing).engine.store_directory + "/reshard-0001-ranks-2/rank-0000" +
                                     std::to_string(failing) + file,
                    .first = file == std::string(".manifest") ? 1u : 0u});  // after the superblock
      on_engines(2, [&](int, ToyModel& model) {
        if (on_nvme())
          EXPECT_THROW(model.restore(), Error);
        else
          EXPECT_EQ(model.restore().step, 4u);
      });
      EXPECT_TRUE(fs::exists(setup_.engine.store_directory + "1/reshard-0001-ranks-2"));
    }
  }
  faults_.reset();
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().mirror, setup_.engine.mirror.directory);
    EXPECT_EQ(state_digests(model), states.at(4));
    model.engine().save("", bytes_of("step 4")).wait();
  });
  // It is the rank's training now, of which the mirror holds an older commit.
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().mirror, ""); });
}

// A store cannot be read without each of its drives. When one is lost, the others keep their files: it may come back.
TEST_P(MirrorRestoreTest, OneOfARanksDrivesIsEnoughToLose) {
  own_drives_ = true;
  const auto& states = undisturbed(4);
  setup_.engine.stripe_directories = {directory_ / "further"};
  const std::string first = of_rank(1).engine.store_directory, further = of_rank(1).engine.stripe_directories.front();
  for (const auto& [lost, other] : {std::pair(first, further), std::pair(further, first)}) {
    SCOPED_TRACE(lost);
    train_and_mirror(2, 4);
    fs::remove_all(lost);
    for (const bool again : {false, true}) {
      on_engines(2, [&](int, ToyModel& model) {
        EXPECT_EQ(model.restore().mirror, again ? "" : setup_.engine.mirror.directory);
        EXPECT_EQ(state_digests(model), states.at(4));
        model.engine().save("", bytes_of("step 4")).wait();
      });
      EXPECT_TRUE(fs::exists(other + "/rank-00001.data"));
    }
    for (const auto& entry : fs::directory_iterator(directory_ / "")) fs::remove_all(entry);
  }
}

// A drive that is not mounted for one start is no reason to remove what the other ranks have: the mirror may be
// damaged.
TEST_P(MirrorRestoreTest, TheOthersPartsStayUntilTheMirrorHasBeenRead) {
  own_drives_ = true;
  const auto& states = undisturbed(4);
  train_and_mirror(2, 4);
  lose_stores(2);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 4u);
    if (!on_nvme()) model.engine().save("", bytes_of("step 4")).wait();
  });
  const std::string store = of_rank(1).engine.store_directory, away = store + "-away";
  fs::rename(store, away);
  for (const auto& [name, order, ranks] : stores_in(setup_.engine.mirror.directory))
    for (const std::string rank : {"0", "1"}) {
      const std::string data = setup_.engine.mirror.directory + "/" + name + "/rank-0000" + rank + ".data";
      flip_bits(data, 100, 4096);
    }
  on_engines(2, [&](int, ToyModel& model) { EXPECT_THROW(model.restore(), Error); });
  EXPECT_TRUE(fs::exists(of_rank(0).engine.store_directory + "/reshard-0001-ranks-2/rank-00000.manifest"));
  fs::remove_all(store);
  fs::rename(away, store);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().mirror, "");
    EXPECT_EQ(state_digests(model), states.at(4));
  });
}

// The directory of the new store is not named as one of which only the part on a further drive is left.
TEST_P(MirrorRestoreTest, ADriveThatHasLostTheOthersKeepsItsPart) {
  const auto& states = undisturbed(4);
  const std::string further = directory_ / "further";
  setup_.engine.stripe_directories = {further};
  train_and_mirror(2, 2);
  for (const std::string& drive : {setup_.engine.store_directory, further}) fs::remove_all(drive);
  on_engines(2, [&](int, ToyModel& model) {
    model.restore();
    for (const std::uint64_t step : {3u, 4u}) take_step(model, step);
    model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
  });
  fs::remove_all(setup_.engine.store_directory);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().mirror, setup_.engine.mirror.directory);
    EXPECT_EQ(state_digests(model), states.at(4));
  });
  EXPECT_TRUE(fs::exists(further + "/reshard-0001-ranks-2/rank-00000.data"));
}

TEST_P(MirrorRestoreTest, AnAdditionalDriveIsNotALostOne) {
  train_and_mirror(1, 2);
  setup_.engine.stripe_directories = {directory_ / "further"};
  on_engines(1, [&](int, ToyModel& model) { EXPECT_THROW(model.restore(), StoreError); });
  setup_.engine.stripe_directories.clear();
  on_engines(1, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().mirror, ""); });
}

TEST_P(MirrorRestoreTest, RelativePathsOutliveAChangeOfDirectory) {
  const fs::path before = fs::current_path();
  fs::current_path(directory_ / "");
  setup_.engine.store_directory = "store_here";
  setup_.engine.mirror.directory = "mirror_here";
  on_engines(1, [&](int, ToyModel& model) {
    model.initialize();
    for (std::uint64_t step = 1; step <= 3; ++step) {
      take_step(model, step);
      if (step == 2) fs::current_path(before);
      model.engine().save("", bytes_of("here"), {.mirror = true}).wait();
    }
  });
  EXPECT_FALSE(fs::exists("store_here") || fs::exists("mirror_here"));
  fs::current_path(before);
}

// A missing file does not mean a new drive: resuming from the mirror would ignore the files that are there.
TEST_P(MirrorRestoreTest, AStoreThatLacksAFileIsRefusedAndLeftAsItIs) {
  train_and_mirror(2, 4);
  const std::string manifest = setup_.engine.store_directory + "/rank-00001.manifest";
  fs::rename(manifest, directory_ / "aside");
  const auto expect_refused = [&](const testing::Matcher<std::string>& way_on) {
    const auto text = testing::AllOf(HasSubstr("rank 1 finds none of its files"), way_on);
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_THAT([&] { model.restore(); }, testing::ThrowsMessage<StoreError>(text));
    });
  };
  const std::string mirror = setup_.engine.mirror.directory, store = setup_.engine.store_directory;
  expect_refused(HasSubstr("The mirror in " + mirror + " has step 4: to continue from it, move " + store + " away"));
  fs::rename(mirror, mirror + "-aside");
  fs::create_symlink(mirror, mirror);
  expect_refused(HasSubstr("The mirror in " + mirror + " cannot be read: "));
  fs::remove(mirror);
  // A mirror of another training of this model is no way to continue this one.
  setup_.engine.store_directory = store + "-other";
  train_and_mirror(2, 4);
  setup_.engine.store_directory = store;
  expect_refused(testing::Not(HasSubstr("The mirror in")));
  fs::remove_all(mirror);
  fs::rename(mirror + "-aside", mirror);
  fs::rename(directory_ / "aside", manifest);
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().mirror, ""); });
}

// A drive is missing at a restart, the run goes on from the mirror, and then the drive is back with its older state.
TEST_P(MirrorRestoreTest, AStoreThatTheRunHasLeftBehindIsRefused) {
  const auto& states = undisturbed(4);
  train_and_mirror(2, 2);
  const std::string store = setup_.engine.store_directory, away = store + "-away";
  fs::rename(store, away);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 2u);
    for (const std::uint64_t step : {3u, 4u}) take_step(model, step);
    model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
  });
  fs::remove_all(store);
  fs::rename(away, store);
  const auto expect_refused = [&](const std::string& way) {
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_THAT([&] { model.restore(); },
                  testing::ThrowsMessage<StoreError>(
                      testing::AllOf(HasSubstr("the store in " + store + " ends with step 2"), HasSubstr("has step 4"),
                                     HasSubstr("To go on from step 4, " + way + "move the store away"))));
    });
  };
  expect_refused("");
  // Nor is it continued, and the copy replaced, while a rank's part of the copy is missing.
  const std::string manifest = setup_.engine.mirror.directory + "/reshard-0001-ranks-2/rank-00001.manifest";
  for (const bool with_data : {false, true}) {
    SCOPED_TRACE(with_data ? "its data, too" : "its manifest");
    std::vector<std::string> files{manifest};
    if (with_data) files.push_back(fs::path(manifest).replace_extension(".data"));
    const FilesAway missing(files);
    expect_refused("bring its missing files back and ");
  }
  expect_restored(2, 4, states);
}

// The same with the drive of one rank: the newer store has no files of it then. The mirror and both steps are named,
// and each advice leads there.
TEST_P(MirrorRestoreTest, OneRanksDriveThatIsBackIsRefusedWithBothWaysOn) {
  own_drives_ = true;
  const auto& states = undisturbed(5);
  train_and_mirror(2, 2);
  const std::string store = of_rank(1).engine.store_directory, drive = store + "-drive", below = store + "-below";
  fs::rename(store, drive);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 2u);
    for (const std::uint64_t step : {3u, 4u, 5u}) {
      take_step(model, step);
      if (step == 4) model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
    }
    if (!on_nvme()) model.engine().save("", bytes_of("step 5")).wait();
  });
  fs::rename(store, below);
  fs::rename(drive, store);
  const std::string mirror = setup_.engine.mirror.directory;
  on_engines(2, [&](int rank, ToyModel& model) {
    EXPECT_THAT([&] { model.restore(); },
                testing::ThrowsMessage<StoreError>(testing::AllOf(
                    HasSubstr("rank 1 finds no files"), HasSubstr("The newest step of any rank there is 5"),
                    HasSubstr("The mirror in " + mirror + " has step 4: to continue from it, move " +
                              of_rank(rank).engine.store_directory + " away, on all ranks"))));
  });
  fs::rename(store, drive);
  fs::rename(below, store);
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 5u); });
  for (const int rank : {0, 1}) fs::remove_all(of_rank(rank).engine.store_directory);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 4u);
    EXPECT_EQ(state_digests(model), states.at(4));
  });
}

// A mirror's drive that is not mounted, beside another rank's first copy in a new store.
class UnmountedMirrorTest : public MirrorRun {
 protected:
  UnmountedMirrorTest() { own_drives_ = own_mirrors_ = true; }
  void unmount_mirror_of_rank_1() const {
    fs::rename(drive_of_mirror(1), directory_ / "aside");
    fs::create_directory(drive_of_mirror(1));
  }
  void mount_it_again() const {
    fs::remove_all(drive_of_mirror(1));
    fs::rename(directory_ / "aside", drive_of_mirror(1));
  }
  void expect_it_is_continued(std::uint64_t step) {
    lose_stores(2);
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_EQ(model.restore().step, step);
      EXPECT_EQ(state_digests(model), undisturbed(6).at(step));
    });
  }
};

TEST_P(UnmountedMirrorTest, ATrainingThatOnlyItHoldsIsNeitherBegunAnewNorRemoved) {
  leave_a_first_copy_in_a_new_store(2, 4);
  lose_stores(2);
  unmount_mirror_of_rank_1();
  on_engines(2, [&](int, ToyModel& model) {
    const auto refused = testing::ThrowsMessage<StoreError>(testing::AllOf(
        HasSubstr("holds a training, but no commit that every rank has"), HasSubstr("rank 1 finds no files"),
        HasSubstr("reshard-0001"), HasSubstr("move the directory away to start anew; its training is then lost")));
    EXPECT_THAT([&] { model.find_commit(); }, refused);
    EXPECT_THAT([&] { model.restore(); }, refused);
    EXPECT_THAT([&] { model.initialize(); }, refused);
  });
  mount_it_again();
  expect_it_is_continued(4);
}

// A training that has its stores begins a new copy beside the part that is there, and removes that part once the copy
// is whole.
TEST_P(UnmountedMirrorTest, ItsCopyStaysUntilAnotherOneIsWhole) {
  for (const bool copies : {false, true}) {
    SCOPED_TRACE(copies ? "with a copy" : "without one");
    leave_a_first_copy_in_a_new_store(2, 4);
    unmount_mirror_of_rank_1();
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_EQ(model.restore().mirror, "");
      if (!copies) return;
      take_step(model, 5);
      model.engine().save("", bytes_of("step 5"), {.mirror = true}).wait();
    });
    EXPECT_EQ(stores_in(of_rank(0).engine.mirror.directory).size(), copies ? 1u : 2u);
    if (!copies) mount_it_again();
    expect_it_is_continued(copies ? 5 : 4);
    // The store that the start without the drive has left is gone with the next copy.
    on_engines(2, [&](int, ToyModel& model) {
      for (std::uint64_t step = model.restore().step + 1; step <= 6; ++step) take_step(model, step);
      model.engine().save("", bytes_of("step 6"), {.mirror = true}).wait();
    });
    for (const int rank : {0, 1}) EXPECT_EQ(stores_in(of_rank(rank).engine.mirror.directory).size(), 1u);
    for (const auto& entry : fs::directory_iterator(directory_ / "")) fs::remove_all(entry);
  }
}

INSTANTIATE_TEST_SUITE_P(, UnmountedMirrorTest, kMirrorCells, [](const auto& cell) { return cell.param.name; });

void MirrorRestoreTest::leave_a_newer_first_commit() {
  leave_a_first_copy_in_a_new_store(2, 4);
  setup_.engine.keep_steps = 1;
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 4u);
    take_step(model, 5);
    model.engine().save("", bytes_of("step 5")).wait();
  });
  setup_.engine.keep_steps = 2;
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 5u);
    if (!on_nvme()) model.engine().save("", bytes_of("step 5")).wait();
  });
}

// The mirror is behind the run when a rank's drive is lost. The other rank's newer part stays, though it is the first
// commit of its store: the drive may come back.
TEST_P(MirrorRestoreTest, AFirstCommitThatTheMirrorHasNotGotStays) {
  own_drives_ = true;
  leave_a_newer_first_commit();
  const auto newer = stores_in(of_rank(0).engine.store_directory).front();
  fs::rename(of_rank(1).engine.store_directory, directory_ / "aside");
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 4u); });
  EXPECT_EQ(tiers::Store::look(newer.in(of_rank(0).engine.store_directory), 0).commits.size(), 1u);
}

// A rank's data are there, and its manifest is not: no drive is lost.
TEST_P(MirrorRestoreTest, AFirstCommitOfWhichAManifestIsMissingIsNotALostDrive) {
  own_drives_ = true;
  leave_a_newer_first_commit();
  const auto newer = stores_in(of_rank(1).engine.store_directory).front();
  const std::string manifest = newer.in(of_rank(1).engine.store_directory) + "/rank-00001.manifest";
  fs::rename(manifest, directory_ / "aside");
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_THAT([&] { model.restore(); },
                testing::ThrowsMessage<StoreError>(testing::AllOf(
                    HasSubstr("rank 1 finds data of rank 1, and not their manifest"), HasSubstr("has step 4"))));
  });
  fs::rename(directory_ / "aside", manifest);
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 5u); });
}

INSTANTIATE_TEST_SUITE_P(, MirrorRestoreTest, kMirrorCells, [](const auto& cell) { return cell.param.name; });

}  // namespace
}  // namespace hoist::test::mirror_restore_test
