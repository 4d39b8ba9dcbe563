// SPDX-License-Identifier: Apache-2.0
// Space: what a training has reserved is its own, whoever fills the drive; where a promise of space is broken (a thin
// volume, a copy that shares blocks, a quota), the error says so, the last commit is intact, nothing hangs, and it goes
// on when there is space.
#include <filesystem>
#include <fstream>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "hostile.hpp"
#include "volumes.hpp"

namespace hoist::test::space_test {
namespace {

using testing::HasSubstr;

class Space : public Hostile {
 protected:
  // Leaves so much of the volume.
  static bool leave(const LoopVolume& volume, std::uint64_t bytes) {
    const std::uint64_t free = std::filesystem::space(volume.path()).available;
    return free > bytes && succeeds(fmt::format("fallocate -l {} {}", free - bytes, volume / "filler"));
  }
};

TEST_F(Space, AThinVolumeThatFillsUpLeavesTheLastCommit) {
  ThinVolume volume(directory_, "2m");
  HOIST_NEEDS_MOUNTED(volume);
  const ToySetup setup = toy(volume.store());
  const Life life = train(setup);
  ASSERT_NE(life.error, "") << "the volume was large enough";
  RecordProperty("error", life.error);
  EXPECT_THAT(life.error, HasSubstr(volume.path()));
  volume.unmount();
  ASSERT_TRUE(volume.grow("64m"));
  ASSERT_TRUE(volume.mount());
  if (life.committed >= 0) {
    expect_intact(setup, life.committed);
  } else {
    EXPECT_EQ(train(setup).error, "");
  }
}

// Not before the store was made, but in the middle of a training.
TEST_F(Space, AThinVolumeThatFillsUpLaterLeavesTheLastCommit) {
  ThinVolume volume(directory_, "64m");
  HOIST_NEEDS_MOUNTED(volume);
  const ToySetup setup = toy(volume.store());
  // Only the first extents have been written when it happens: step 0 is complete, and step 1 finds no room.
  const Life life = train(setup, [&](std::uint64_t step) {
    if (step != 0) return;
    std::ofstream filler(volume.backing_file("filler"), std::ios::binary);
    const std::vector<char> bytes(kMiB, 'x');
    while (filler.write(bytes.data(), static_cast<std::streamsize>(bytes.size())).flush()) {
    }
  });
  ASSERT_NE(life.error, "");
  EXPECT_GE(life.committed, 0);
  EXPECT_THAT(life.error, HasSubstr(volume.path()));
  volume.unmount();
  std::filesystem::remove(volume.backing_file("filler"));
  ASSERT_TRUE(volume.mount());
  expect_intact(setup, life.committed);
}

class ReservedSpace : public Space, public testing::WithParamInterface<const char*> {};

// Before most of it has been written for the first time.
TEST_P(ReservedSpace, IsThereWhenEverythingElseIsTaken) {
  LoopVolume volume(directory_, GetParam());
  HOIST_NEEDS_MOUNTED(volume);
  const Life life = train(toy(volume / "store"), [&](std::uint64_t step) {
    if (step == 0) fill_up(volume / "filler");
  });
  EXPECT_EQ(life.error, "");
  EXPECT_FALSE(has_room(volume / "more", 64 * kKiB)) << "it was not full";
}

INSTANTIATE_TEST_SUITE_P(FileSystems, ReservedSpace, testing::Values("ext4", "xfs", "btrfs"),
                         [](const auto& kind) { return std::string(kind.param); });

// The mirror's drive has space for one store. The run goes on from it when its own drive is lost, and from then on
// nothing is copied until there is space.
TEST_F(Space, ForOneStoreIsEnoughToGoOnFromAMirror) {
  LoopVolume volume(directory_, "ext4");
  HOIST_NEEDS_MOUNTED(volume);
  constexpr std::uint64_t kCopied = 6;
  ToySetup setup = toy(directory_ / "store");
  setup.engine.mirror.directory = volume / "copies";
  const auto nothing = [](std::uint64_t) {};
  ASSERT_EQ(train(setup, nothing, kCopied).error, "");
  ASSERT_TRUE(leave(volume, 400 * kKiB));
  std::filesystem::remove_all(setup.engine.store_directory);
  EXPECT_EQ(train(setup, nothing, kCopied + 2).error, "");
  std::filesystem::remove(volume / "filler");
  EXPECT_EQ(train(setup, nothing, kCopied + 4).error, "");
  std::filesystem::remove_all(setup.engine.store_directory);
  EXPECT_EQ(train(setup).error, "");
}

// Scratch is reserved at each start, beside a store that has its space.
TEST_F(Space, ThatSpilledGradientsLackIsRefusedAtTheStartAndTheLastCommitIsThere) {
  LoopVolume volume(directory_, "ext4");
  HOIST_NEEDS_MOUNTED(volume);
  constexpr std::uint64_t kCommitted = 6;
  ToySetup setup = toy(volume / "store");
  setup.engine.gradient_spill_units = 99;
  ASSERT_EQ(train(
                setup, [](std::uint64_t) {}, kCommitted)
                .error,
            "");
  fill_up(volume / "filler");
  const Life life = train(setup);
  RecordProperty("error", life.error);
  EXPECT_THAT(life.error, HasSubstr("hoist.gradient_spill"));
  EXPECT_THAT(life.error, HasSubstr("hoist.pinned_memory"));
  EXPECT_FALSE(std::filesystem::exists(volume / "store/rank-00000.scratch"));
  setup.engine.gradient_spill_units = 0;
  expect_intact(setup, kCommitted);  // in the space that the store has
}

// The store has its space, and beside it there is half of what scratch needs.
class NewSpill : public Space, public testing::WithParamInterface<int> {};

TEST_P(NewSpill, WithoutSpaceIsRefusedAndNothingIsLeft) {
  LoopVolume volume(directory_, "ext4");
  HOIST_NEEDS_MOUNTED(volume);
  const int ranks = GetParam();
  ToySetup setup = toy(volume / "store");
  setup.engine.gradient_spill_units = 99;
  const ToyShape shape;
  const auto create = [&]() -> std::string {
    try {
      train_on(ranks, setup, shape, 2);
      return "";
    } catch (const std::exception& error) {
      return error.what();
    }
  };
  const Prediction plan = predict(setup.runtime, setup.engine, describe(shape), ranks);
  ASSERT_GT(plan.scratch_bytes, 64 * kKiB);
  const auto all = static_cast<std::uint64_t>(ranks) * plan.nvme_bytes;
  ASSERT_TRUE(leave(volume, all - plan.scratch_bytes / 2));
  const std::string error = create();
  RecordProperty("error", error);
  EXPECT_THAT(error, HasSubstr("gradients that do not fit pinned memory (hoist.gradient_spill)"));
  EXPECT_THAT(error, HasSubstr("the free space of the file system of " + volume / "store"));
  EXPECT_THAT(error, HasSubstr("or hoist.pinned_memory"));
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(volume.path()))
    if (entry.is_regular_file() && entry.path().filename() != "filler") left.push_back(entry.path());
  EXPECT_THAT(left, testing::IsEmpty());
  if (ranks == 1) {
    EXPECT_FALSE(std::filesystem::exists(volume / "store"));
  }
  std::filesystem::remove(volume / "filler");
  EXPECT_EQ(create(), "") << "with the space that there is now";
}
INSTANTIATE_TEST_SUITE_P(Ranks, NewSpill, testing::Values(1, 2),
                         [](const auto& ranks) { return fmt::format("{}", ranks.param); });

// `cp` shares blocks where it can; from then on, each that either side writes needs a new one.
TEST_F(Space, ThatACopySharesMayBeMissingAndTheLastCommitIsThere) {
  LoopVolume volume(directory_, "xfs");
  HOIST_NEEDS_MOUNTED(volume);
  constexpr std::uint64_t kCopied = 6;
  const ToySetup setup = toy(volume / "store");
  ASSERT_EQ(train(
                setup, [](std::uint64_t) {}, kCopied)
                .error,
            "");
  ASSERT_TRUE(succeeds(fmt::format("cp -r --reflink=always {0}/store {0}/copy", volume.path())));
  fill_up(volume / "filler");
  const Life life = train(setup);
  ASSERT_NE(life.error, "") << "there was room enough";
  RecordProperty("error", life.error);
  EXPECT_THAT(life.error, HasSubstr(volume / "store"));
  EXPECT_THAT(life.error, HasSubstr("No space left on device"));
  std::filesystem::remove(volume / "filler");
  expect_intact(setup, std::max<std::int64_t>(life.committed, kCopied));
  expect_intact(toy(volume / "copy"), kCopied);
}

// Quotas of btrfs, which every kernel that has btrfs has; it takes room from them even to rewrite what is there.
class Quota : public Space {
 protected:
  void SetUp() override {
    HOIST_NEEDS_MOUNTED(volume_);
    ASSERT_TRUE(
        succeeds(fmt::format("btrfs quota enable {0} && btrfs subvolume create {0}/jobs && "
                             "btrfs quota rescan -w {0}",
                             volume_.path())));
  }
  // `bytes`: a number, or "none". The first subvolume of a file system has this number.
  bool limit(const char* bytes) const {
    return succeeds(fmt::format("btrfs qgroup limit {} 0/256 {}", bytes, volume_.path()));
  }

  LoopVolume volume_{directory_, "btrfs"};
  const ToySetup setup_ = toy(volume_ / "jobs/store");
};

TEST_F(Quota, ThatIsTooSmallIsRefusedAtTheStartAndNothingIsLeft) {
  ASSERT_TRUE(limit("1M"));
  const Life life = train(setup_);
  RecordProperty("error", life.error);
  EXPECT_THAT(life.error, HasSubstr("quota exceeded"));
  EXPECT_THAT(life.error, HasSubstr("reserve of " + volume_ / "jobs/store"));
  EXPECT_THAT(life.error, HasSubstr("choose another directory"));
  EXPECT_EQ(life.committed, -1);
  EXPECT_TRUE(std::filesystem::is_empty(volume_ / "jobs"));
  ASSERT_TRUE(limit("none"));
  EXPECT_EQ(train(setup_).error, "");
}

TEST_F(Quota, ThatIsLoweredUnderATrainingLeavesTheLastCommit) {
  constexpr std::uint64_t kLowered = 7;
  bool lowered = false;
  const Life life = train(setup_, [&](std::uint64_t step) {
    if (step == kLowered) lowered = limit("1M");
  });
  ASSERT_TRUE(lowered);
  ASSERT_NE(life.error, "") << "it trained on beyond its quota";
  RecordProperty("error", life.error);
  EXPECT_THAT(life.error, HasSubstr("quota exceeded"));
  EXPECT_THAT(life.error, HasSubstr(volume_ / "jobs/store"));
  EXPECT_GE(life.committed, static_cast<std::int64_t>(kLowered) - 2);
  // Nor can anybody go on while it is so; and nothing is lost by trying.
  EXPECT_THAT(train(setup_).error, HasSubstr("quota exceeded"));
  ASSERT_TRUE(limit("none"));
  expect_intact(setup_, life.committed);
}

}  // namespace
}  // namespace hoist::test::space_test
