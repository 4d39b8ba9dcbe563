// SPDX-License-Identifier: Apache-2.0
// Predicted bytes equal the bytes that are held and moved, for every placement.
#include <filesystem>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::prediction_test {
namespace {

constexpr std::array kPlacements{Placement::device, Placement::pinned, Placement::nvme};
// No ties and nothing frozen: the plain pass that predictions assume is the toy's own.
const ToyShape kPlain{.matrices = {40000, 70001, 16384, 9973, 25000}, .frozen = false, .tied = false};

std::uint64_t file_bytes(const std::string& directory, int rank) {
  const std::string stem = directory + "/rank-0000" + std::to_string(rank);
  return std::filesystem::file_size(stem + ".data") + std::filesystem::file_size(stem + ".manifest");
}

// Predictions are right for the mode that `automatic` chooses, and for `backward`.
class PredictionOf : public testing::TestWithParam<std::tuple<Placement, Placement, int, UpdateMode, double>> {};

TEST_P(PredictionOf, EqualsWhatIsHeldAndMoved) {
  const auto [parameters, optimizer, ranks, mode, ratio] = GetParam();
  if (ratio < 1 && optimizer == Placement::device) GTEST_SKIP() << "nothing is offloaded";
  if (mode == UpdateMode::backward && optimizer == Placement::device) GTEST_SKIP() << "refused, by definition";
  for (const ToyShape& shape : {kPlain, ToyShape{}}) {
    for (const std::uint64_t device_bytes : {std::uint64_t{16 * kMiB}, std::uint64_t{2500 * kKiB}}) {
      const TempDirectory directory;
      ToySetup setup = toy_setup(parameters, optimizer, directory / "store");
      setup.engine.update_mode = mode;
      setup.engine.optimizer_offload_ratio = ratio;
      if (mode == UpdateMode::backward) setup.engine.gradient_clipping = 0;
      setup.runtime.device_memory_bytes = device_bytes;
      setup.runtime.comm_scratch_bytes = 256 * kKiB;
      on_ranks(ranks, [&, ranks = ranks](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model(setup, join, shape);
        const Prediction predicted = predict(setup.runtime, setup.engine, model.model(), ranks);
        if (!predicted.device.fits()) {
          EXPECT_THROW(model.initialize(), BudgetError);
          return;
        }
        model.initialize();
        model.train(1, 2);
        model.engine().settle();
        // A group of threads takes the staging memory with one rank, too, and gives it back.
        if (ranks > 1) {
          EXPECT_EQ(model.runtime().device_budget().peak_bytes(), predicted.device.bytes);
        }
        EXPECT_EQ(model.runtime().device_budget().held_bytes(), predicted.device.bytes);
        EXPECT_EQ(model.runtime().pinned_budget().peak_bytes(), predicted.pinned.bytes);
        EXPECT_EQ(file_bytes(directory / "store", rank), predicted.nvme_bytes);
        if (shape.tied) return;
        const StepBytes real = model.engine().formula_bytes();
        EXPECT_EQ(predicted.step.nvme_read, real.nvme_read);
        EXPECT_EQ(predicted.step.nvme_write, real.nvme_write);
        EXPECT_EQ(predicted.step.host_to_device, real.host_to_device);
        EXPECT_EQ(predicted.step.device_to_host, real.device_to_host);
        EXPECT_EQ(predicted.step.wire, real.wire);
      });
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cells, PredictionOf,
                         testing::Combine(testing::ValuesIn(kPlacements), testing::ValuesIn(kPlacements),
                                          testing::Values(1, 3),
                                          testing::Values(UpdateMode::automatic, UpdateMode::backward),
                                          testing::Values(1.0, 0.4)));

class LeastBudget : public testing::TestWithParam<UpdateMode> {};

TEST_P(LeastBudget, IsTheSmallestThatStarts) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.update_mode = GetParam();
  if (GetParam() == UpdateMode::backward) setup.engine.gradient_clipping = 0;
  const auto starts = [&] {
    ToyModel model(setup, kPlain);
    try {
      model.initialize();
      std::filesystem::remove_all(directory / "store");
      return true;
    } catch (const BudgetError&) {
      return false;
    }
  };
  ToyModel model(setup, kPlain);
  const Prediction predicted = predict(setup.runtime, setup.engine, model.model(), 1);
  setup.runtime.device_memory_bytes = round_up(predicted.device.least_bytes, kBlockAlignment);
  setup.runtime.pinned_memory_bytes = round_up(predicted.pinned.least_bytes, kBlockAlignment);
  EXPECT_TRUE(starts());
  setup.runtime.device_memory_bytes -= kBlockAlignment;
  EXPECT_FALSE(starts());
  setup.runtime.device_memory_bytes += kBlockAlignment;
  setup.runtime.pinned_memory_bytes -= kBlockAlignment;
  EXPECT_FALSE(starts());
}
INSTANTIATE_TEST_SUITE_P(Modes, LeastBudget, testing::Values(UpdateMode::automatic, UpdateMode::backward));

// Gradient, weights and state, by hand.
TEST(Prediction, CountsWhatAnUpdateReadsAndWrites) {
  const auto bytes_of = [](DType dtype, Placement optimizer, double ratio, bool accessible) {
    RuntimeOptions runtime{
        .device = platform::DeviceKind::host, .device_memory_bytes = kGiB, .pinned_memory_bytes = kGiB};
    runtime.host_device.host_accessible = accessible;
    EngineOptions engine{.optimizer = optimizer, .optimizer_offload_ratio = ratio};
    engine.gradient_clipping = 0;
    const Prediction p = predict(runtime, engine, uniform_model(8 * 32768, 8, dtype), 1);
    return std::pair(p.update_memory_bytes / 32768, p.device_update_bytes / 32768);
  };
  using Pair = std::pair<std::uint64_t, std::uint64_t>;
  EXPECT_EQ(bytes_of(DType::bf16, Placement::pinned, 1, true), Pair(8 * (2 + 2 * (2 + 10)), 0));
  EXPECT_EQ(bytes_of(DType::fp32, Placement::pinned, 1, true), Pair(8 * (4 + 2 * (4 + 8)), 0));
  // The weights are made of their masters.
  EXPECT_EQ(bytes_of(DType::fp16, Placement::pinned, 1, true), Pair(8 * (2 + 2 + 2 * 12), 0));
  // A device that the host reaches is updated by the host.
  EXPECT_EQ(bytes_of(DType::bf16, Placement::device, 1, true), Pair(8 * 26, 0));
  EXPECT_EQ(bytes_of(DType::bf16, Placement::device, 1, false), Pair(0, 8 * 26));
  EXPECT_EQ(bytes_of(DType::bf16, Placement::pinned, 0.75, false), Pair(6 * 26, 2 * 26));
}

TEST(Prediction, LeavesRoomForWhatTheProgramPins) {
  const Model model = uniform_model(1'000'000'000, 20);
  RuntimeOptions runtime{
      .device = platform::DeviceKind::host, .device_memory_bytes = kGiB, .pinned_memory_bytes = 12 * kGiB};
  const EngineOptions engine{.parameters = Placement::nvme,
                             .optimizer = Placement::nvme,
                             .optimizer_pinned_fraction = std::nullopt,
                             .store_directory = "/nowhere"};
  const Prediction alone = predict(runtime, engine, model, 1);
  const ProgramMemory program{.pinned_bytes = 3 * kGiB};
  const Prediction beside = predict(runtime, engine, model, 1, program);
  EXPECT_LT(beside.pinned_fraction, alone.pinned_fraction);
  EXPECT_TRUE(beside.pinned.fits());
  EXPECT_LE(beside.pinned.bytes, runtime.pinned_memory_bytes);
  EXPECT_LT(largest_pinned_fraction(runtime, engine, model, 1, program), alone.pinned_fraction);
  runtime.pinned_memory_bytes = 4 * kGiB;  // its gradients and buffers, or what the program offloads
  EXPECT_FALSE(predict(runtime, engine, model, 1, program).pinned.fits());
}

TEST(Prediction, OfAModelOnlyItsSizeIsKnown) {
  const Model model = uniform_model(7'000'000'000, 34);
  const Prediction predicted = predict(
      {}, {.parameters = Placement::nvme, .optimizer = Placement::nvme, .store_directory = "/nowhere"}, model, 8);
  EXPECT_EQ(predicted.parameter_count, 7'000'000'000u);
  EXPECT_NEAR(static_cast<double>(predicted.nvme_bytes), 2 * 12 * 7e9 / 8, 0.01 * 24 * 7e9 / 8);
  EXPECT_THROW(uniform_model(0, 1), UsageError);
  EXPECT_THROW(predict({}, {}, {}, 1), UsageError);
}

TEST(Prediction, OfAStoreThatNeverCommitsIsRefused) {
  EngineOptions options;
  options.commit_every = 0;
  EXPECT_THROW(predict({}, options, uniform_model(1'000'000, 4), 4), UsageError);
}

}  // namespace
}  // namespace hoist::test::prediction_test
