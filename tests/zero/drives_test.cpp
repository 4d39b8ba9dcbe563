// SPDX-License-Identifier: Apache-2.0
// Several drives: the same bits as one, the same bytes in all, and a store that is read and resumed like any other.
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/damage.hpp>
#include <hoist/tests/support/log_capture.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::drives_test {
namespace {

// Large enough that every drive holds some of it: stripes are cut in units of 1 MiB.
const ToyShape kShape{.matrices = {150'000, 170'001, 65'536, 99'730}};

ToySetup setup_on(const TempDirectory& directory, int drives, Placement parameters = Placement::nvme) {
  ToySetup setup = toy_setup(parameters, Placement::nvme, directory / "drive0/hoist");
  for (int d = 1; d < drives; ++d)
    setup.engine.stripe_directories.push_back(directory / ("drive" + std::to_string(d) + "/hoist"));
  return setup;
}

class DrivesTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Drives, DrivesTest, testing::Values(2, 3), testing::PrintToStringParamName());

TEST_P(DrivesTest, GiveTheSameBitsAndBytesAsOneAndResume) {
  const Digests expected = train_once(toy_setup(Placement::pinned, Placement::pinned), kShape, 4);
  for (const Placement parameters : {Placement::nvme, Placement::pinned}) {
    const TempDirectory directory;
    const ToySetup setup = setup_on(directory, GetParam(), parameters);
    Digests half;
    {
      ToyProgram model(setup, kShape);
      model.train(1, 2);
      model.engine().settle();
      EXPECT_EQ(model.runtime().ledger().totals(Link::nvme_write).bytes % kBlockAlignment, 0u);
      half.losses = model.losses;
    }
    for (const std::string& drive : setup.engine.stripe_directories)
      EXPECT_GE(std::filesystem::file_size(drive + "/rank-00000.data"), kMiB) << drive;
    ToyModel model(setup, kShape);
    EXPECT_EQ(model.restore().step, 2u);
    Engine& engine = model.engine();
    model.losses = half.losses;
    model.train(3, 4);
    engine.settle();
    const StepBytes formula = engine.formula_bytes();
    const double written = static_cast<double>(model.runtime().ledger().totals(Link::nvme_write).bytes) / 2;
    EXPECT_NEAR(written / static_cast<double>(formula.nvme_write), 1.0, 0.03);
    EXPECT_EQ(digests_of(model), expected);
  }
}

TEST_P(DrivesTest, ServeSeveralRanksAndAreReadAsOneModel) {
  const TempDirectory directory;
  const ToySetup setup = setup_on(directory, GetParam());
  const auto reference = train_on(2, toy_setup(Placement::pinned, Placement::pinned), kShape, 2)[0].digests;
  EXPECT_EQ(train_on(2, setup, kShape, 2)[0].digests, reference);
  StoredModel model(setup.engine.store_directory);
  EXPECT_EQ(model.step(), 2u);
  EXPECT_TRUE(verify_job(std::vector{setup.engine.store_directory})[0].is_sound());
}

TEST(Drives, FewerAtTheNextStartAreRefusedAndNothingIsLost) {
  const TempDirectory directory;
  ToySetup setup = setup_on(directory, 2);
  train_once(setup, kShape, 1);
  const auto refused = [&](const EngineOptions& options) {
    Runtime runtime(setup.runtime);
    ToyModel model(runtime, options, kShape);
    EXPECT_THROW(model.restore(), StoreError);
  };
  EngineOptions fewer = setup.engine;
  fewer.stripe_directories.clear();
  refused(fewer);
  ToyModel model(setup, kShape);
  EXPECT_EQ(model.restore().step, 1u);
}

// The copy of the second drive is damaged, and the original's is whole.
TEST(Drives, OfACopyAreReadWhereTheConfigurationSaysTheyAre) {
  const TempDirectory directory;
  ToySetup setup = setup_on(directory, 2);
  train_once(setup, kShape, 1);
  std::string& store = setup.engine.store_directory;
  std::string& drive = setup.engine.stripe_directories[0];
  for (std::string* const part : {&store, &drive}) {
    const std::string copy = directory / ("copy-of-" + std::to_string(part == &drive ? 1 : 0));
    std::filesystem::copy(*part, copy);
    *part = copy;
  }
  flip_bits(drive + "/rank-00000.data", 5, 4096);
  EXPECT_THAT(verify_job(std::vector{store})[0].not_done, testing::HasSubstr("is a copy"));
  setup.engine.keep_steps = 1;  // needs a new store
  ToyModel model(setup, kShape);
  EXPECT_THAT([&] { model.restore(); }, testing::ThrowsMessage<CorruptionError>(testing::HasSubstr("copy-of-")));
}

// A new store takes over the state, from where the configuration says that the drives are now, or from where they were.
TEST(Drives, MountedElsewhereAreFoundByAStoreThatTakesOver) {
  const TempDirectory directory;
  ToySetup setup = setup_on(directory, 3);
  const Digests expected = train_once(setup, kShape, 2);
  setup.engine.keep_steps = 1;  // the store has no room for that
  for (const unsigned moved : {1u, 2u})
    std::filesystem::rename(directory / ("drive" + std::to_string(moved)),
                            directory / ("moved" + std::to_string(moved)));
  EXPECT_THAT([&] { const StoredModel model(setup.engine.store_directory); },
              testing::ThrowsMessage<StoreError>(
                  testing::AllOf(testing::HasSubstr(directory / "drive1/hoist"), testing::HasSubstr("symbolic link"))));
  std::filesystem::create_directory_symlink(directory / "moved1", directory / "drive1");
  std::filesystem::create_directory_symlink(directory / "moved2", directory / "drive2");
  EXPECT_TRUE(verify_job(std::vector{setup.engine.store_directory})[0].is_sound());
  for (const char* const link : {"drive1", "drive2"}) std::filesystem::remove(directory / link);
  const auto restores = [&] {
    ToyModel model(setup, kShape);
    EXPECT_EQ(model.restore().step, 2u);
    Digests state = digests_of(model);
    state.losses = expected.losses;
    EXPECT_EQ(state, expected);
  };
  setup.engine.stripe_directories = {directory / "moved1/hoist", directory / "moved2/hoist"};
  restores();
  setup.engine.stripe_directories = {directory / "other/hoist"};  // fewer, and another one
  setup.engine.keep_steps = 2;
  restores();
}

}  // namespace
}  // namespace hoist::test::drives_test
