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

#include "hostile.hpp"
#include "volumes.hpp"

namespace hoist::test::space_test {
namespace {

using testing::HasSubstr;

class Space : public Hostile {};

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
