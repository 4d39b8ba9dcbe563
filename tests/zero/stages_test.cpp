// SPDX-License-Identifier: Apache-2.0
// ZeRO stages: the same bits at every stage, the bytes on the wire that the stage's formula says, and a stage that
// changes from one run to the next.
#include <map>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/remembered.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::stages_test {
namespace {

constexpr std::uint64_t kSteps = 5;

ToySetup at_stage(int stage, Placement optimizer, const std::string& directory = "") {
  ToySetup setup = toy_setup(Placement::device, optimizer, directory);
  setup.engine.stage = stage;
  return setup;
}

class StageTest : public testing::TestWithParam<int> {};

TEST_P(StageTest, EndsInTheBitsOfStage3) {
  for (const Placement optimizer : {Placement::device, Placement::pinned, Placement::nvme}) {
    for (const int ranks : {1, 3}) {
      SCOPED_TRACE(testing::Message() << "optimizer " << static_cast<int>(optimizer) << ", ranks " << ranks);
      const TempDirectory directory;
      const std::string store = optimizer == Placement::nvme ? directory / "store" : std::string();
      const auto here = train_on(ranks, at_stage(GetParam(), optimizer, store), ToyShape{}, kSteps);
      static std::map<int, std::vector<RankRun>> made;
      const auto& there =
          remembered(made, ranks, [&] { return train_on(ranks, at_stage(3, Placement::pinned), ToyShape{}, kSteps); });
      EXPECT_EQ(here[0].digests, there[0].digests);
    }
  }
}

TEST_P(StageTest, MovesTheBytesOfItsFormulaOverTheWire) {
  constexpr int kRanks = 3;
  const ToyShape shape{.matrices = {120000, 90000, 60000}, .norm = 96, .frozen = false, .tied = false};
  for (const int micro_batches : {1, 2}) {
    SCOPED_TRACE(micro_batches);
    on_ranks(kRanks, [&](int, const Runtime::MakeCommunicator& join) {
      ToySetup setup = at_stage(GetParam(), Placement::pinned);
      setup.engine.micro_batches_max = static_cast<unsigned>(micro_batches);
      setup.engine.reuse_distance_elements = 0;  // backward gathers again
      ToyModel model(setup, join, shape);
      model.micro_batches = micro_batches;
      Engine& engine = model.initialize();
      model.train(1, 3);  // the plan is made
      const double moved = static_cast<double>(model.bytes_moved(4, 7)[Link::wire]) / 4;
      EXPECT_NEAR(moved / static_cast<double>(engine.formula_bytes().wire), 1, 0.02);
      if (micro_batches > 1) return;
      // 2 or 3 times the weights' bytes, but for this rank's own share.
      const double weights = 2.0 * static_cast<double>(model.model().parameter_count());
      const double share = static_cast<double>(kRanks - 1) / kRanks;
      EXPECT_NEAR(moved / (weights * share), GetParam() < 3 ? 2 : 3, 0.05);
    });
  }
}

// Bytes a parameter of model states, all on the device: weights 2, gradient 2, and 10 of optimizer state (DeepSpeed's
// 12 less the half of the fp32 master that is the bf16 weight). Partitioned among ranks, and below stage 3 the weights
// once more whole. Beside it stand the buffers that a prediction counts; padding is what is left.
TEST_P(StageTest, HoldsTheMemoryOfTheZeroTable) {
  constexpr std::int64_t kUnits = 24, kElements = 48'000;
  const ToyShape shape{
      .matrices = std::vector<std::int64_t>(kUnits, kElements), .norm = 96, .frozen = false, .tied = false};
  for (const int ranks : {1, 2, 4}) {
    SCOPED_TRACE(ranks);
    on_ranks(ranks, [&](int, const Runtime::MakeCommunicator& join) {
      ToySetup setup = at_stage(GetParam(), Placement::device);
      setup.runtime.device_memory_bytes = 32 * kMiB;
      ToyProgram model(setup, join, shape);
      const Prediction prediction = predict(setup.runtime, setup.engine, model.model(), ranks);
      const auto all = static_cast<double>(model.model().parameter_count());
      const double vectors = kUnits * 96.0;  // of fp32: 4 of weights, 4 of gradient, 8 of moments
      const double states = (14 * (all - vectors) + 16 * vectors) / ranks;
      const double whole = GetParam() < 3 && ranks > 1 ? 2 * (all - vectors) + 4 * vectors : 0;
      const double unit_bytes = 2.0 * kElements + 4 * 96;
      const double buffers = static_cast<double>(prediction.gather_bytes) +
                             static_cast<double>(prediction.gradient_buffers) * unit_bytes +
                             (ranks > 1 ? static_cast<double>(setup.runtime.comm_scratch_bytes) : 0);
      const auto held = static_cast<double>(model.runtime().device_budget().held_bytes());
      const double padding = held - (states + whole + buffers);
      EXPECT_GE(padding, 0);
      // Segments end on 4 KiB, records on whole blocks and blocks of the arena: some 40 KiB a unit at most.
      EXPECT_LE(padding, static_cast<double>(kUnits + prediction.gradient_buffers) * 40 * kKiB);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, StageTest, testing::Values(0, 1, 2, 3));

TEST(Stages, TheStageMayChangeBetweenRuns) {
  const TempDirectory directory;
  const std::string store = directory / "store";
  Digests found;
  const auto resume = [&](int stage, std::uint64_t last_step) {
    on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
      const ToySetup setup = at_stage(stage, Placement::nvme, store);
      ToyModel model(setup, join);
      std::uint64_t first = 1;
      if (model.find_commit())
        first = model.restore().step + 1;
      else
        model.initialize();
      model.train(first, last_step);
      Digests mine = digests_of(model);
      if (rank == 0) found = mine;
    });
  };
  resume(2, 3);
  resume(3, 5);
  resume(1, 7);
  Digests expected = train_on(2, at_stage(3, Placement::pinned), ToyShape{}, 7)[0].digests;
  found.losses = expected.losses;
  EXPECT_EQ(found, expected);
}

TEST(Stages, BelowStage3WeightsAreNotOffloaded) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.stage = 2;
  Runtime runtime(setup.runtime);
  EXPECT_THROW(ToyModel(runtime, setup.engine).initialize(), ConfigError);
  setup.engine.stage = 4;
  EXPECT_THROW(ToyModel(runtime, setup.engine).initialize(), ConfigError);
}

}  // namespace
}  // namespace hoist::test::stages_test
