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
    ToyProgram run(s);
    run.train(1, settled);
    run.engine().settle();
    run.train(settled + 1, 6);
    EXPECT_EQ(digests_of(run), expected(6)) << "settled after step " << settled;
  }
}

// Settled, looked at and changed in between: each step's report and weights are those of mode `step`.
TEST_P(LateModes, ReportTheSameStepsAndShowWhatIsPending) {
  ToyModel step(simplest());
  step.initialize();
  const auto late = fresh();
  double last = late->evaluate();
  for (std::uint64_t i = 1; i <= 5; ++i) {
    for (ToyModel* run : {&step, late.get()}) {
      run->engine().set_learning_rate(GroupId{0}, 1e-2 / static_cast<double>(i));
      run->train(i, i);
    }
    const StepReport &wanted = step.reports.back(), &found = late->reports.back();
    EXPECT_EQ(found.gradient_norm, wanted.gradient_norm);
    EXPECT_EQ(found.learning_rate, wanted.learning_rate);
    EXPECT_EQ(found.clip_factor, wanted.clip_factor);
    EXPECT_EQ(found.step, i);
    EXPECT_TRUE(found.applied);
    EXPECT_EQ(late->engine().learning_rate(GroupId{0}), 1e-2 / static_cast<double>(i));
    if (i != 3) {
      EXPECT_EQ(late->losses.back(), last) << "step " << i << " saw other weights than the evaluation";
    }
    if (i == 2) {
      late->engine().settle();
      continue;  // and no evaluation before the next pass
    }
    if (i == 3) {
      for (ToyModel* run : {&step, late.get()}) {
        std::vector<float> values(100);
        run->engine().read(run->matrix(1), State::master, 50, values);
        for (float& value : values) value *= 2;
        run->engine().write(run->matrix(1), State::master, 50, values);
      }
    }
    last = late->evaluate();
    EXPECT_EQ(last, late->evaluate());
    EXPECT_EQ(last, step.evaluate()) << "after step " << i;
  }
  EXPECT_EQ(digests_of(*late), digests_of(step));
}

TEST_P(ForwardMode, SkippedAndClippedStepsKeepTheirPlace) {
  const auto run = fresh();
  run->train(1, 2);
  EXPECT_LT(run->reports.back().clip_factor, 1);
  for (const float poison : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    run->gradient_scale = poison;
    run->pass(3);
    const StepReport report = run->engine().step();
    EXPECT_FALSE(report.applied);
    EXPECT_EQ(report.step, 2u);
    run->losses.pop_back();
  }
  run->gradient_scale = 1;
  run->train(3, 5);
  EXPECT_EQ(digests_of(*run), expected(5));
}

// In mode `backward`, before its first gradient is finished.
TEST_P(LateModes, APassThatIsDroppedDoesNoHarm) {
  const auto run = fresh();
  run->train(1, 3);
  for (const std::size_t thrown_at : {0u, 2u}) {
    run->in_forward = [&](std::size_t unit) {
      if (unit == thrown_at) throw std::runtime_error("the program's own");
    };
    EXPECT_THROW(run->pass(4), std::runtime_error);
    run->in_forward = [](std::size_t) {};
    if (thrown_at == 2) run->engine().discard();  // the other one has ended with its scope
  }
  run->train(4, 6);
  EXPECT_EQ(digests_of(*run), expected(6));
}

TEST_P(ForwardMode, UnitsInAnotherOrderAreUpdatedWhenTheyAreAskedFor) {
  const auto run = fresh();
  run->train(1, 3);
  {
    // Backwards, and only some: neither the expected order nor all of it.
    const PassScope pass = run->engine().begin(Pass::evaluate);
    for (const std::size_t unit : {3u, 1u}) {
      Lease lease = run->engine().gather(run->unit(unit), run->stream());
      lease.release(run->stream());
    }
  }
  run->train(4, 5);
  EXPECT_EQ(digests_of(*run), expected(5));
}

TEST_P(LateModes, AnOrderlyEndCarriesOutTheLastStep) {
  if (!where().has_store()) GTEST_SKIP() << "nothing is committed by steps";
  { fresh()->train(1, 3); }
  ToyModel resumed(setup());
  EXPECT_EQ(resumed.restore().step, 3u);
  resumed.train(4, 5);
  resumed.losses = expected(5).losses;
  EXPECT_EQ(digests_of(resumed), expected(5));
}

TEST_P(LateModes, WhoeverWaitsForACommitIsNotLeftWaiting) {
  const auto run = fresh();
  run->train(1, 2);
  run->reports.back().committed.wait();  // no pass follows, and nobody settles
  if (where().optimizer == Placement::nvme) {
    EXPECT_EQ(run->engine().committed_step(), 2u);
  }
  run->train(3, 4);
  EXPECT_EQ(digests_of(*run), expected(4));
}

TEST_P(LateModes, AnUpdateThatCannotBeCommittedIsReported) {
  auto run = fresh();
  run->train(1, 2);
  run->engine().settle();
  run->engine().set_learning_rate(GroupId{0}, 1e38);
  run->pass(3);
  const StepReport report = run->engine().step();
  EXPECT_TRUE(report.applied);
  EXPECT_THROW(run->engine().settle(), Error);
  if (where().has_store()) {
    EXPECT_THROW(report.committed.wait(), Error);
    EXPECT_EQ(run->engine().committed_step(), 2u);
  }
  goes_on_from(std::move(run), 2);
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
    ToyModel model(setup, join);
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
