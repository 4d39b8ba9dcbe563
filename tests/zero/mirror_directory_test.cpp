// SPDX-License-Identifier: Apache-2.0
// Which directories a run takes as its mirror, and what it leaves there.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/message_of.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

#include "mirror_run.hpp"

namespace hoist::test::mirror_directory_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class MirrorDirectoryTest : public MirrorRun {};

TEST_P(MirrorDirectoryTest, NeitherAFreshRunNorAnotherModelTakesItsPlace) {
  train_and_mirror(1, 2);
  fs::remove_all(setup_.engine.store_directory);
  on_engines(1, [&](int, ToyModel& model) {
    EXPECT_THAT([&] { model.initialize(); },
                testing::ThrowsMessage<StoreError>(
                    testing::AllOf(HasSubstr("holds step 2"), HasSubstr(setup_.engine.mirror.directory))));
    EXPECT_FALSE(fs::exists(setup_.engine.store_directory));
  });
  ToyShape other;
  other.norm += 1;
  ToyModel model(setup_, other);
  EXPECT_THROW(model.restore(), StoreError);
  EXPECT_EQ(StoredModel(setup_.engine.mirror.directory).step(), 2u);
}

// Runs that ended before their first copy: each start removes what the one before left.
TEST_P(MirrorDirectoryTest, StoresThatNoCopyReachedAreRemoved) {
  for (const int ranks : {1, 2, 2}) {
    on_engines(ranks, [](int, ToyModel& model) { model.initialize(); });
    fs::remove_all(setup_.engine.store_directory);
    EXPECT_EQ(stores_in(setup_.engine.mirror.directory).size(), 1u);
  }
  train_and_mirror(1, 2);
  EXPECT_EQ(stores_in(setup_.engine.mirror.directory).size(), 1u);
  EXPECT_EQ(StoredModel(setup_.engine.mirror.directory).step(), 2u);
}

// Two trainings of one model, and a mirror that is configured where the other one's is, or the other one itself.
TEST_P(MirrorDirectoryTest, AnotherTrainingIsNotReplaced) {
  train_and_mirror(1, 4);
  const std::string its_store = setup_.engine.store_directory, its_mirror = setup_.engine.mirror.directory;
  setup_.engine.store_directory = directory_ / "second";
  setup_.engine.mirror = {};
  on_engines(1, [&](int, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    model.engine().save("", bytes_of("step 1")).wait();
  });
  for (const std::string& place : {its_store, its_mirror}) {
    setup_.engine.mirror.directory = place;
    on_engines(1, [&](int, ToyModel& model) {
      EXPECT_THAT([&] { model.restore(); },
                  testing::ThrowsMessage<StoreError>(HasSubstr("of another training than the store")));
    });
    EXPECT_EQ(StoredModel(place).step(), 4u);
  }
  setup_.engine.mirror = {};
  on_engines(1, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 1u); });
}

// A run's own store becomes the mirror of the store on its new drive. Copies never replace named checkpoints.
TEST_P(MirrorDirectoryTest, NamedCheckpointsOfAStoreThatBecomesAMirrorStay) {
  setup_.engine.mirror = {};
  setup_.engine.keep_steps = 1;
  on_engines(1, [](int, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    model.engine().save("kept", bytes_of("step 1")).wait();
  });
  const std::string first = setup_.engine.store_directory;
  setup_.engine.store_directory = directory_ / "new-drive";
  setup_.engine.mirror.directory = first;
  on_engines(1, [](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 1u);
    take_step(model, 2);
    model.engine().save("", bytes_of("step 2"), {.mirror = true}).wait();
  });
  EXPECT_EQ(StoredModel(first).step(), 2u);
  setup_.engine.store_directory = first;
  setup_.engine.mirror = {};
  on_engines(1, [](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "kept"}).step, 1u); });
}

// A store has as many places as it was made for. One of them becomes the mirror's.
TEST_P(MirrorDirectoryTest, ANewMirrorTakesNoNamedCheckpointsPlace) {
  const auto mirror = std::exchange(setup_.engine.mirror, {});
  setup_.engine.keep_steps = 1;
  on_engines(1, [](int, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    model.engine().save("kept", bytes_of("step 1")).wait();
  });
  setup_.engine.keep_steps = 0;
  setup_.engine.mirror = mirror;
  on_engines(1, [](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 1u);
    take_step(model, 2);
    model.engine().save("", bytes_of("step 2"), {.mirror = true}).wait();
    const auto kept = model.find_checkpoints();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].name, "kept");
  });
}

INSTANTIATE_TEST_SUITE_P(, MirrorDirectoryTest, kMirrorCells, [](const auto& cell) { return cell.param.name; });

TEST(MirrorOptions, AreChecked) {
  const TempDirectory directory;
  const auto refused = [&](const std::function<void(EngineOptions&)>& change) {
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.engine.mirror.directory = directory / "mirror";
    change(setup.engine);
    ToyModel model(setup);
    return message_of<ConfigError>([&] { model.initialize(); });
  };
  EXPECT_EQ(refused([](EngineOptions&) {}), "no error");
  EXPECT_THAT(refused([](EngineOptions& o) { o.durability = tiers::Durability::none; }), HasSubstr("hoist.mirror"));
  EXPECT_THAT(refused([](EngineOptions& o) { o.mirror.directory = o.store_directory; }), HasSubstr("another"));
  EXPECT_THAT(refused([](EngineOptions& o) { o.mirror.directory = o.store_directory + "/../store/"; }),
              HasSubstr("where the store itself is"));
  fs::create_directory(directory / "drive");
  fs::create_symlink(directory / "drive", directory / "link");
  EXPECT_THAT(refused([&](EngineOptions& o) {
                o.store_directory = directory / "drive/store";
                o.mirror.directory = directory / "link/store";
              }),
              HasSubstr("where the store itself is"));
  EXPECT_THAT(refused([](EngineOptions& o) { o.keep_steps = 64; }), HasSubstr("63"));
  EXPECT_THAT(refused([](EngineOptions& o) {
                o.parameters = o.optimizer = Placement::pinned;
                o.store_directory.clear();
              }),
              HasSubstr("no store"));
  ToyProgram without(toy_setup(Placement::pinned, Placement::pinned, directory / "other"));
  EXPECT_THROW(without.engine().save("", {}, {.mirror = true}), UsageError);
}

}  // namespace
}  // namespace hoist::test::mirror_directory_test
