// SPDX-License-Identifier: Apache-2.0
// Several micro-batches a step: sums in fp32, exact and in order; the same bits in every placement.
#include <functional>
#include <map>
#include <stdexcept>
#include <utility>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/remembered.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::accumulation_test {
namespace {

constexpr int kMicroBatches = 3;
constexpr std::array kPlacements{Placement::device, Placement::pinned, Placement::nvme};

ToySetup accumulating(Placement parameters, Placement optimizer, const std::string& directory,
                      MicroBatchOrder order = MicroBatchOrder::horizontal) {
  const bool nvme = parameters == Placement::nvme || optimizer == Placement::nvme;
  ToySetup setup = toy_setup(parameters, optimizer, nvme ? directory : "");
  setup.engine.micro_batches_max = kMicroBatches;
  setup.engine.micro_batch_order = order;
  return setup;
}

std::vector<float> gradient_of(Engine& engine, ParameterId parameter) {
  std::vector<float> values(static_cast<std::size_t>(engine.model().parameters()[parameter.index].shape[0]));
  engine.read(parameter, State::gradient, 0, values);
  return values;
}

TEST(Accumulation, IsTheFloatSumInOrderOverTheirCount) {
  const ToySetup setup = accumulating(Placement::pinned, Placement::pinned, "");
  ToyModel model(setup);
  Engine& engine = model.initialize();
  for (const ParameterId parameter : {model.matrix(0), model.matrix(1), model.model().parameter("unit2.norm")}) {
    std::vector<float> sums;
    for (int i = 0; i < kMicroBatches; ++i) {
      model.pass(1 + 10'000 * static_cast<std::uint64_t>(i));  // the same gradients, one by one
      const std::vector<float> one = gradient_of(engine, parameter);
      engine.discard();
      sums.resize(one.size());
      for (std::size_t e = 0; e < one.size(); ++e) sums[e] = i == 0 ? one[e] : sums[e] + one[e];
    }
    for (int i = 0; i < kMicroBatches; ++i) model.pass(1, {.micro_batch = i, .micro_batches = kMicroBatches});
    const std::vector<float> together = gradient_of(engine, parameter);
    for (std::size_t e = 0; e < sums.size(); ++e)
      ASSERT_EQ(together[e], (1.0f / kMicroBatches) * sums[e]) << "element " << e;
    engine.discard();
  }
}

class AccumulationIn : public testing::TestWithParam<std::tuple<Placement, Placement>> {};
INSTANTIATE_TEST_SUITE_P(Placements, AccumulationIn,
                         testing::Combine(testing::ValuesIn(kPlacements), testing::ValuesIn(kPlacements)));

TEST_P(AccumulationIn, EveryPlacementModeAndRankHasTheSameBitsInEitherOrder) {
  const auto [parameters, optimizer] = GetParam();
  for (const MicroBatchOrder order : {MicroBatchOrder::horizontal, MicroBatchOrder::vertical}) {
    for (const int ranks : {1, 2, 3}) {
      ToySetup simplest = accumulating(Placement::pinned, Placement::pinned, "", order);
      simplest.engine.update_mode = UpdateMode::step;
      static std::map<std::pair<MicroBatchOrder, int>, Digests> made;
      const Digests& expected =
          remembered(made, {order, ranks}, [&] { return train_in_micro_batches(ranks, simplest, 4); });
      for (const UpdateMode mode : {UpdateMode::step, UpdateMode::automatic}) {
        const TempDirectory directory;
        ToySetup setup = accumulating(parameters, optimizer, directory / "store", order);
        setup.engine.update_mode = mode;
        setup.runtime.host_device.chaos_seed = 5;
        EXPECT_EQ(train_in_micro_batches(ranks, setup, 4), expected)
            << ranks << (order == MicroBatchOrder::vertical ? " ranks, vertical" : " ranks");
      }
    }
  }
}

// A pass that is taken back before it has finished a unit; later, the whole step is dropped.
TEST_P(AccumulationIn, APassThatIsTakenBackLeavesTheMicroBatchesBeforeIt) {
  const auto [parameters, optimizer] = GetParam();
  const auto run = [&, parameters = parameters, optimizer = optimizer](bool takes_back) {
    const TempDirectory directory;
    const ToySetup setup = accumulating(parameters, optimizer, directory / "store");
    ToyProgram model(setup);
    const auto pass = [&](int i) { model.pass(1, {.micro_batch = i, .micro_batches = 2}); };
    const auto leave = [&](std::function<void(std::size_t)>& at, std::size_t unit, int i, bool earlier_stay) {
      const auto kept = std::exchange(at, [&, unit, earlier_stay](std::size_t reached) {
        if (reached != unit) return;
        EXPECT_EQ(model.engine().discard_pass(), earlier_stay);
        throw std::runtime_error("the program's own");
      });
      EXPECT_THROW(pass(i), std::runtime_error);
      at = kept;
    };
    for (int step = 0; step < 2; ++step) {
      if (takes_back) leave(model.in_forward, 0, 0, false);
      pass(0);
      if (takes_back) {
        leave(model.in_forward, 1, 1, true);
        leave(model.in_backward, 2, 1, false);  // finished
        EXPECT_THROW(pass(1), UsageError);
        pass(0);
        leave(model.in_forward, 0, 1, true);
      }
      pass(1);
      EXPECT_TRUE(model.engine().step().applied);
    }
    return state_digests(model);  // some passes were made twice
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Accumulation, RoomForItChangesNothingForStepsOfOneMicroBatch) {
  const ToySetup with = accumulating(Placement::pinned, Placement::pinned, "");
  EXPECT_EQ(train_once(with, {}, 4), train_once(toy_setup(Placement::pinned, Placement::pinned), {}, 4));
}

TEST(Accumulation, MovesEachMicroBatchOnce) {
  const TempDirectory directory;
  ToySetup setup = accumulating(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.reuse_distance_elements = 0;
  ToyModel model(setup, {.matrices = {300'000, 300'000, 300'000}, .frozen = false, .tied = false});
  model.micro_batches = kMicroBatches;
  Engine& engine = model.initialize();
  model.train(1, 1);
  const MovedBytes moved = model.bytes_moved(2, 5);
  const StepBytes formula = engine.formula_bytes();
  EXPECT_EQ(moved[Link::device_to_host], 4 * formula.device_to_host);
  EXPECT_NEAR(static_cast<double>(moved[Link::nvme_read]) / 4 / static_cast<double>(formula.nvme_read), 1.0, 0.03);
}

TEST(Accumulation, MicroBatchesComeInOrderAndAllBeforeTheStep) {
  const ToySetup setup = accumulating(Placement::pinned, Placement::pinned, "");
  ToyModel model(setup);
  Engine& engine = model.initialize();
  const auto pass = [&](int i, int of) { model.pass(1, {.micro_batch = i, .micro_batches = of}); };
  EXPECT_THROW(pass(0, kMicroBatches + 1), UsageError);
  EXPECT_THROW(pass(0, 0), UsageError);
  EXPECT_THROW(pass(1, 2), UsageError);
  pass(0, 2);
  EXPECT_THROW(engine.step(), UsageError);
  EXPECT_THROW(pass(0, 2), UsageError);
  EXPECT_THROW(pass(1, 3), UsageError);
  model.evaluate();  // harmless in between
  pass(1, 2);
  EXPECT_THROW(pass(2, 3), UsageError);
  EXPECT_TRUE(engine.step().applied);
  // Dropped half way: the next step begins anew.
  pass(0, 2);
  engine.discard();
  pass(0, 1);
  EXPECT_TRUE(engine.step().applied);
}

TEST(Accumulation, AMicroBatchThatIsNotFiniteSkipsTheWholeStep) {
  const ToySetup setup = accumulating(Placement::pinned, Placement::pinned, "");
  ToyModel model(setup);
  Engine& engine = model.initialize();
  const std::string before = state_digest(engine, State::master);
  for (int i = 0; i < kMicroBatches; ++i) {
    model.gradient_scale = i == 1 ? std::numeric_limits<float>::infinity() : 1.0f;
    model.pass(1, {.micro_batch = i, .micro_batches = kMicroBatches});
  }
  EXPECT_FALSE(engine.step().applied);
  EXPECT_EQ(state_digest(engine, State::master), before);
}

}  // namespace
}  // namespace hoist::test::accumulation_test
