// SPDX-License-Identifier: Apache-2.0
// Vertical order: a pass holds all micro-batches of a step. The gradient is their mean, rounded once; weights and
// gradients move once a step; nothing is added up in pinned memory.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::vertical_test {
namespace {

constexpr int kMicroBatches = 3;

ToySetup in_order(MicroBatchOrder order, Placement parameters, Placement optimizer, const std::string& directory = "",
                  int micro_batches = kMicroBatches) {
  const bool nvme = parameters == Placement::nvme || optimizer == Placement::nvme;
  ToySetup setup = toy_setup(parameters, optimizer, nvme ? directory : "");
  setup.engine.micro_batches_max = static_cast<unsigned>(micro_batches);
  setup.engine.micro_batch_order = order;
  return setup;
}
ToySetup vertical(Placement parameters, Placement optimizer, const std::string& directory = "") {
  return in_order(MicroBatchOrder::vertical, parameters, optimizer, directory);
}

// The model, set to make its steps of as many micro-batches as the engine was made for, in its order.
ToyModel model_for(const ToySetup& setup, const auto&... join_and_shape) {
  ToyModel model(setup, join_and_shape...);
  model.micro_batches = static_cast<int>(setup.engine.micro_batches_max);
  model.vertical = setup.engine.micro_batch_order == MicroBatchOrder::vertical;
  return model;
}

std::vector<float> values_of(Engine& engine, ParameterId parameter, State state) {
  std::vector<float> values(static_cast<std::size_t>(engine.model().parameters()[parameter.index].shape[0]));
  engine.read(parameter, state, 0, values);
  return values;
}

// --- the gradient ----------------------------------------------------------------------------------------------------

TEST(Vertical, TheGradientIsTheFloatMeanRoundedOnce) {
  const ToySetup setup = vertical(Placement::pinned, Placement::pinned);
  Runtime runtime(setup.runtime);
  constexpr std::int64_t kCount = 1000;
  tiers::DeviceBlock made = runtime.device_arena().allocate(kMicroBatches * kCount * sizeof(float), "gradients");
  auto* const values = reinterpret_cast<float*>(made.data());
  const std::vector<ParameterSpec> specs{{.name = "matrix", .shape = {kCount}},
                                         {.name = "norm", .shape = {kCount}, .dtype = DType::fp32}};
  Model model;
  const UnitId unit = model.add_unit("unit", specs);
  Engine engine = Engine::create(runtime, setup.engine, model, [](ParameterId, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, 0.5f);
  });
  const auto stream = runtime.device().create_stream("compute");
  for (int i = 0; i < kMicroBatches * kCount; ++i)
    values[i] = std::sin(static_cast<float>(i) * 0.37f) * std::exp(static_cast<float>(i % 40) - 20.0f);
  {
    const PassScope scope = engine.begin(Pass::train, {.micro_batches = kMicroBatches});
    engine.gather(unit, *stream).release(*stream);
    engine.gather(unit, *stream).release(*stream);
    const std::int64_t shape[] = {kCount};
    for (int m = 0; m < kMicroBatches; ++m) {
      for (const char* name : {"matrix", "norm"}) {
        const TensorView gradient{values + m * kCount, DType::fp32, shape, 0};
        engine.accumulate(engine.parameter(name), gradient, *stream);
      }
    }
    engine.finish(unit, *stream);
  }
  const std::vector<float> matrix = values_of(engine, engine.parameter("matrix"), State::gradient);
  const std::vector<float> norm = values_of(engine, engine.parameter("norm"), State::gradient);
  for (std::int64_t i = 0; i < kCount; ++i) {
    const float sum = (values[i] + values[kCount + i]) + values[2 * kCount + i];
    const float mean = (1.0f / kMicroBatches) * sum;
    ASSERT_EQ(norm[static_cast<std::size_t>(i)], mean) << "element " << i;
    ASSERT_EQ(matrix[static_cast<std::size_t>(i)], to_float(to_bf16(mean))) << "element " << i;
  }
  engine.discard();
}

// The gradients of one step, by parameter.
std::vector<std::vector<float>> gradients_in(const ToySetup& setup, int ranks,
                                             std::vector<std::vector<float>>* masters) {
  std::vector<std::vector<float>> found;
  on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyModel model = model_for(setup, join, ToyShape{.frozen = false, .tied = false});
    Engine& engine = model.initialize();
    std::vector<std::vector<float>> gradients, weights;
    for (std::uint32_t p = 0; p < engine.model().parameters().size(); ++p)
      weights.push_back(values_of(engine, ParameterId{p}, State::master));
    for (int i = 0; i < (model.vertical ? 1 : model.micro_batches); ++i)
      model.pass(1, {.micro_batch = i, .micro_batches = model.micro_batches});
    for (std::uint32_t p = 0; p < engine.model().parameters().size(); ++p)
      gradients.push_back(values_of(engine, ParameterId{p}, State::gradient));
    engine.discard();
    if (rank != 0) return;
    found = gradients;
    if (masters != nullptr) *masters = weights;
  });
  return found;
}

// Horizontally every micro-batch's gradient is rounded to bf16, with several ranks once more as a mean over them, then
// added up in fp32; vertically the mean is rounded, and once more over ranks. A rounding to bf16 moves a value by 2^-8
// of it at most, and no gradient of the toy model is larger than 0.05 |weight| + 0.01.
TEST(Vertical, DiffersFromHorizontalByItsRoundingsAtMost) {
  for (const int ranks : {1, 3}) {
    std::vector<std::vector<float>> masters;
    const auto across =
        gradients_in(in_order(MicroBatchOrder::horizontal, Placement::pinned, Placement::pinned), ranks, &masters);
    const auto down = gradients_in(vertical(Placement::pinned, Placement::pinned), ranks, nullptr);
    const double roundings = ranks == 1 ? 2 : 4;
    std::uint64_t differing = 0;
    for (std::size_t p = 0; p < across.size(); ++p) {
      for (std::size_t i = 0; i < across[p].size(); ++i) {
        const double largest = 0.05 * 1.01 * std::abs(static_cast<double>(masters[p][i])) + 0.0101;
        ASSERT_NEAR(down[p][i], across[p][i], roundings / 256 * largest) << "parameter " << p << ", element " << i;
        differing += down[p][i] != across[p][i] ? 1u : 0u;
      }
    }
    EXPECT_GT(differing, 0u) << "nothing was compared";
  }
}

// Where nothing is rounded on the way the sums are the same: fp32, one rank, and a mean that is exact.
TEST(Vertical, InFp32OnOneRankTheBitsAreThoseOfHorizontalOrder) {
  constexpr int kFour = 4;
  const auto across =
      gradients_in(in_order(MicroBatchOrder::horizontal, Placement::pinned, Placement::pinned, "", kFour), 1, nullptr);
  const auto down =
      gradients_in(in_order(MicroBatchOrder::vertical, Placement::pinned, Placement::pinned, "", kFour), 1, nullptr);
  ASSERT_GT(across.size(), 1u);
  for (std::size_t p = 1; p < across.size(); p += 2) {  // the vectors
    EXPECT_EQ(down[p], across[p]);
    EXPECT_THAT(across[p], testing::Contains(testing::Ne(0)));
  }
}

TEST(Vertical, APassThatHoldsOneIsAStepAsEver) {
  ToySetup setup = vertical(Placement::pinned, Placement::pinned);
  EXPECT_EQ(train_once(setup, {}, 4), train_once(toy_setup(Placement::pinned, Placement::pinned), {}, 4));
}

// --- the same everywhere ---------------------------------------------------------------------------------------------

TEST(Vertical, ClipsByTheNormOfTheMean) {
  const TempDirectory directory;
  const ToySetup setup = vertical(Placement::pinned, Placement::nvme, directory / "store");
  ToyModel model = model_for(setup);
  Engine& engine = model.initialize();
  model.pass(1, {.micro_batches = kMicroBatches});
  double squares = 0;
  for (std::uint32_t p = 0; p < engine.model().parameters().size(); ++p) {
    if (!engine.model().parameters()[p].trainable) continue;
    for (const float g : values_of(engine, ParameterId{p}, State::gradient))
      squares += static_cast<double>(g) * static_cast<double>(g);
  }
  const StepReport report = engine.step();
  EXPECT_NEAR(report.gradient_norm, std::sqrt(squares), 1e-6 * std::sqrt(squares));
  EXPECT_LT(report.clip_factor, 1);
  EXPECT_NEAR(report.clip_factor, setup.engine.gradient_clipping / (report.gradient_norm + 1e-6), 1e-9);
}

TEST(Vertical, ARunGoesOnFromItsCommit) {
  for (const int ranks : {1, 2}) {
    const Digests expected = train_in_micro_batches(ranks, vertical(Placement::pinned, Placement::pinned), 7);
    const TempDirectory directory;
    const ToySetup setup = vertical(Placement::nvme, Placement::nvme, directory / "store");
    Digests found;
    for (const std::uint64_t last : {3u, 7u}) {
      on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model = model_for(setup, join);
        std::uint64_t first = 1;
        if (last == 3) {
          model.initialize();
        } else {
          first = model.restore().step + 1;
        }
        model.train(first, last);
        Digests mine = digests_of(model);
        if (rank == 0) found = mine;
      });
    }
    found.losses = expected.losses;
    EXPECT_EQ(found, expected) << ranks << " ranks";
  }
}

// --- what it moves, and what it takes --------------------------------------------------------------------------------

struct Moved {
  MovedBytes bytes;
  StepBytes formula;
  std::uint64_t pinned = 0;
};

// The bytes that four steps move on rank 0, once the plan is made.
Moved moved_in(MicroBatchOrder order, int ranks, int micro_batches) {
  const TempDirectory directory;
  Moved moved;
  on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToySetup setup = in_order(order, Placement::nvme, Placement::nvme, directory / "store", micro_batches);
    setup.engine.reuse_distance_elements = 0;  // backward gathers again
    ToyModel model =
        model_for(setup, join, ToyShape{.matrices = {300'000, 300'000, 300'000}, .frozen = false, .tied = false});
    Engine& engine = model.initialize();
    model.train(1, 2);
    const MovedBytes bytes = model.bytes_moved(3, 6);
    if (rank != 0) return;
    moved.bytes = bytes;
    moved.formula = engine.formula_bytes();
    moved.pinned = model.runtime().pinned_budget().held_bytes();
  });
  return moved;
}

TEST(Vertical, MovesWeightsAndGradientsOnceAStepAndAddsNothingUpInPinnedMemory) {
  for (const int ranks : {1, 3}) {
    SCOPED_TRACE(ranks);
    const Moved once = moved_in(MicroBatchOrder::horizontal, ranks, 1);
    const Moved across = moved_in(MicroBatchOrder::horizontal, ranks, kMicroBatches);
    const Moved down = moved_in(MicroBatchOrder::vertical, ranks, kMicroBatches);
    // Whatever the number of micro-batches, the bytes of a step of one.
    EXPECT_EQ(down.bytes.by_link, once.bytes.by_link);
    EXPECT_EQ(down.bytes[Link::device_to_host], 4 * down.formula.device_to_host);
    EXPECT_NEAR(static_cast<double>(down.bytes[Link::host_to_device]) / 4,
                static_cast<double>(down.formula.host_to_device),
                0.03 * static_cast<double>(down.formula.host_to_device));
    EXPECT_EQ(across.bytes[Link::device_to_host], kMicroBatches * down.bytes[Link::device_to_host]);
    EXPECT_EQ(across.bytes[Link::host_to_device], kMicroBatches * down.bytes[Link::host_to_device]);
    EXPECT_EQ(across.bytes[Link::wire], kMicroBatches * down.bytes[Link::wire]);
    EXPECT_EQ(down.bytes[Link::wire], 4 * down.formula.wire);
    EXPECT_NEAR(static_cast<double>(down.bytes[Link::nvme_read]) / 4, static_cast<double>(down.formula.nvme_read),
                0.03 * static_cast<double>(down.formula.nvme_read));
    if (ranks > 1) continue;
    EXPECT_EQ(down.pinned, once.pinned);
    EXPECT_GE(across.pinned, down.pinned + 2 * 900'000) << "2 bytes a parameter more, and buffers";
  }
}

TEST(Vertical, TheSumsCountInTheDeviceBudget) {
  const ToyShape shape{.matrices = {300'000, 300'000, 300'000}, .frozen = false, .tied = false};
  const auto least = [&](const ToySetup& setup) {
    return predict(setup.runtime, setup.engine, describe(shape), 1).device.least_bytes;
  };
  const std::uint64_t across = least(in_order(MicroBatchOrder::horizontal, Placement::pinned, Placement::pinned));
  ToySetup setup = vertical(Placement::pinned, Placement::pinned);
  const std::uint64_t down = least(setup);
  EXPECT_NEAR(static_cast<double>(down - across), 4 * (300'000 + 97), 4096);
  setup.runtime.device_memory_bytes = round_up(across, kBlockAlignment);
  ToyModel model(setup, shape);
  EXPECT_THROW(model.initialize(), BudgetError);
}

// --- what is refused -------------------------------------------------------------------------------------------------

TEST(Vertical, OnePassMakesTheStep) {
  const ToySetup setup = vertical(Placement::pinned, Placement::pinned);
  ToyModel model = model_for(setup);
  Engine& engine = model.initialize();
  EXPECT_THROW(model.pass(1, {.micro_batches = kMicroBatches + 1}), UsageError);
  EXPECT_THROW(model.pass(1, {.micro_batch = 1, .micro_batches = kMicroBatches}), UsageError);
  model.pass(1, {.micro_batches = kMicroBatches});
  EXPECT_THROW(model.pass(1, {.micro_batches = kMicroBatches}), UsageError);
  EXPECT_THAT([&] { model.pass(1, {.micro_batch = 1, .micro_batches = kMicroBatches}); },
              testing::ThrowsMessage<UsageError>(testing::HasSubstr("micro-batch 0, holds them all")));
  EXPECT_TRUE(engine.step().applied);
  model.pass(2, {.micro_batches = 2});  // fewer than it was made for
  EXPECT_TRUE(engine.step().applied);
}

TEST(Vertical, AMicroBatchThatIsNotFiniteSkipsTheStep) {
  const ToySetup setup = vertical(Placement::pinned, Placement::pinned);
  ToyModel model = model_for(setup);
  Engine& engine = model.initialize();
  const std::string before = state_digest(engine, State::master);
  model.gradient_scale = std::numeric_limits<float>::infinity();
  model.pass(1, {.micro_batches = kMicroBatches});
  EXPECT_FALSE(engine.step().applied);
  EXPECT_EQ(state_digest(engine, State::master), before);
}

TEST(Vertical, RanksThatHoldDifferentNumbersAreNamed) {
  const ToySetup setup = vertical(Placement::pinned, Placement::pinned);
  EXPECT_THAT(
      [&] {
        on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
          ToyModel model = model_for(setup, join);
          Engine& engine = model.initialize();
          model.pass(1, {.micro_batches = 2 + rank});
          engine.step();
        });
      },
      testing::ThrowsMessage<CommError>(testing::HasSubstr("3 held")));
}

}  // namespace
}  // namespace hoist::test::vertical_test
