// SPDX-License-Identifier: Apache-2.0
// Update mode `forward`: a step is decided now and carried out under the next pass. Whatever happens in between, the
// bits are those of mode `step`.
#include <atomic>
#include <limits>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>

#include "mode_placements.hpp"
#include "toy_ranks.hpp"

namespace hoist::test::update_mode_test {
namespace {

class ForwardMode : public ModePlacement {};
INSTANTIATE_TEST_SUITE_P(Placements, ForwardMode,
                         testing::Combine(testing::Values(UpdateMode::forward), testing::ValuesIn(kWheres)), name_of);

// What holds for any mode in which steps are carried out later.
class LateModes : public ModePlacement {};
INSTANTIATE_TEST_SUITE_P(Placements, LateModes,
                         testing::Combine(testing::Values(UpdateMode::forward, UpdateMode::backward),
                                          testing::ValuesIn(kWheres)),
                         name_of);

TEST_P(ForwardMode, SettlesBetweenAnyTwoSteps) {
  for (std::uint64_t settled = 1; settled <= 5; ++settled) {
    const TempDirectory store;
    ToySetup s = setup();
    if (where().has_store()) s.engine.store_directory = store / "store";
    ToyTraining run(s);
    run.model.initialize();
    run.model.train(1, settled);
    run.engine().settle();
    run.model.train(settled + 1, 6);
    EXPECT_EQ(digests_of(run.model), expected(6)) << "settled after step " << settled;
  }
}

TEST_P(ForwardMode, EvaluationSeesTheStepThatIsPending) {
  const auto forward = fresh();
  const TempDirectory other;
  ToySetup s = setup_of(where(), UpdateMode::step, other / "store");
  ToyTraining step(s, {});
  step.model.initialize();
  for (std::uint64_t i = 1; i <= 4; ++i) {
    forward->model.train(i, i);
    step.model.train(i, i);
    EXPECT_EQ(forward->model.evaluate(), step.model.evaluate()) << "after step " << i;
  }
  forward->model.losses = step.model.losses;
  EXPECT_EQ(digests_of(forward->model), expected(4));
}

TEST_P(ForwardMode, ReadsAndWritesSeeTheStepThatIsPending) {
  const auto run = fresh();
  const auto reference = std::make_unique<ToyTraining>(toy_setup(Placement::pinned, Placement::pinned), ToyShape{});
  reference->model.initialize();
  for (ToyTraining* r : {run.get(), reference.get()}) {
    r->model.train(1, 2);
    std::vector<float> values(100);
    r->engine().read(r->model.matrix(1), State::master, 50, values);
    for (float& value : values) value *= 2;
    r->engine().write(r->model.matrix(1), State::master, 50, values);
    r->model.train(3, 4);
  }
  EXPECT_EQ(digests_of(run->model), digests_of(reference->model));
}

TEST_P(ForwardMode, SkippedAndClippedStepsKeepTheirPlace) {
  const auto run = fresh();
  run->model.train(1, 2);
  EXPECT_LT(run->model.reports.back().clip_factor, 1);
  run->model.gradient_scale = std::numeric_limits<float>::infinity();
  run->model.pass(3);
  EXPECT_FALSE(run->engine().step().applied);
  run->model.losses.pop_back();
  run->model.gradient_scale = 1;
  run->model.train(3, 5);
  EXPECT_EQ(digests_of(run->model), expected(5));
}

// In mode `backward`, before its first gradient is finished.
TEST_P(LateModes, APassThatIsDroppedDoesNoHarm) {
  const auto run = fresh();
  run->model.train(1, 3);
  for (const std::size_t thrown_at : {0u, 2u}) {
    run->model.in_forward = [&](std::size_t unit) {
      if (unit == thrown_at) throw std::runtime_error("the program's own");
    };
    EXPECT_THROW(run->model.pass(4), std::runtime_error);
    run->model.in_forward = [](std::size_t) {};
    run->engine().discard();
  }
  run->model.train(4, 6);
  EXPECT_EQ(digests_of(run->model), expected(6));
}

TEST_P(ForwardMode, UnitsInAnotherOrderAreUpdatedWhenTheyAreAskedFor) {
  const auto run = fresh();
  run->model.train(1, 3);
  {
    // Backwards, and only some: neither the expected order nor all of it.
    const PassScope pass = run->engine().begin(Pass::evaluate);
    for (const std::size_t unit : {3u, 1u}) {
      Lease lease = run->engine().gather(run->model.unit(unit), run->model.stream());
      lease.release(run->model.stream());
    }
  }
  run->model.train(4, 5);
  EXPECT_EQ(digests_of(run->model), expected(5));
}

TEST_P(LateModes, AnOrderlyEndCarriesOutTheLastStep) {
  if (!where().has_store()) GTEST_SKIP() << "nothing is committed by steps";
  { fresh()->model.train(1, 3); }
  ToyTraining resumed(setup());
  EXPECT_EQ(resumed.model.restore().step, 3u);
  resumed.model.train(4, 5);
  resumed.model.losses = expected(5).losses;
  EXPECT_EQ(digests_of(resumed.model), expected(5));
}

TEST_P(LateModes, WhoeverWaitsForACommitIsNotLeftWaiting) {
  const auto run = fresh();
  run->model.train(1, 2);
  run->model.reports.back().committed.wait();  // no pass follows, and nobody settles
  if (where().optimizer == Placement::nvme) {
    EXPECT_EQ(run->engine().committed_step(), 2u);
  }
  run->model.train(3, 4);
  EXPECT_EQ(digests_of(run->model), expected(4));
}

TEST_P(ForwardMode, AnUpdateThatCannotBeCommittedIsReportedByTheNextStep) {
  const auto run = fresh();
  run->model.train(1, 2);
  run->engine().settle();
  run->engine().set_learning_rate(GroupId{0}, 1e38);
  run->model.pass(3);
  const StepReport report = run->engine().step();
  EXPECT_TRUE(report.applied);
  EXPECT_THROW(run->engine().settle(), Error);
  EXPECT_THROW(run->engine().settle(), Error);  // the engine has failed for good
  if (!where().has_store()) return;
  EXPECT_THROW(report.committed.wait(), Error);
  EXPECT_EQ(run->engine().committed_step(), 2u);
}

// An error of an update that no call waits for, in modes `forward` and `backward`.
class LateUpdates : public testing::TestWithParam<UpdateMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, LateUpdates, testing::Values(UpdateMode::forward, UpdateMode::backward),
                         [](const auto& mode) { return mode.param == UpdateMode::forward ? "forward" : "backward"; });

TEST_P(LateUpdates, AFailureOnOneRankIsNamedOnTheOthers) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.update_mode = GetParam();
  if (GetParam() == UpdateMode::backward) setup.engine.gradient_clipping = 0;  // as it has to be
  std::atomic<int> named{0};
  on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
    Runtime runtime(setup.runtime, join);
    ToyModel model(runtime, setup.engine);
    Engine& engine = model.initialize();
    model.train(1, 2);
    // Takes one element, in rank 1's shard, beyond all numbers.
    const float huge = 3e38f;
    engine.write(model.matrix(0), State::moment1, 20'000, std::span(&huge, 1));
    engine.set_learning_rate(GroupId{0}, 1e3);
    model.pass(3);
    const StepReport report = engine.step();
    try {
      report.committed.wait();
      ADD_FAILURE() << "committed on rank " << rank;
    } catch (const CommError& error) {
      named += std::string(error.what()).find("rank 1") != std::string::npos ? 1 : 0;
    } catch (const Error&) {
      EXPECT_EQ(rank, 1);
    }
  });
  EXPECT_EQ(named, 2);
}

TEST(ForwardModeOptions, IsRefusedWhereNothingIsOffloaded) {
  ToySetup setup = toy_setup(Placement::device, Placement::device);
  setup.engine.update_mode = UpdateMode::forward;
  Runtime runtime(setup.runtime);
  EXPECT_THROW(ToyModel(runtime, setup.engine).initialize(), ConfigError);
}

}  // namespace
}  // namespace hoist::test::update_mode_test
