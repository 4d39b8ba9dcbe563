// SPDX-License-Identifier: Apache-2.0
// The whole model on a real engine: gradients against finite differences, placements against each other, learning.
#include "model.hpp"

#include <cmath>
#include <filesystem>
#include <memory>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/rng.hpp>

namespace hoist::gpt::model_test {
namespace {

constexpr std::uint64_t kSeed = 4;

RuntimeOptions small_runtime() {
  return {.device = platform::DeviceKind::host,
          .device_memory_bytes = 8 * kMiB,
          .pinned_memory_bytes = 64 * kMiB,
          .communicator = CommunicatorKind::self};
}

EngineOptions in_memory() {
  return {
      .parameters = Placement::device, .optimizer = Placement::pinned, .optimizer_defaults = {.learning_rate = 3e-3}};
}

GptOptions small_model(DType dtype = DType::bf16) {
  return {.layers = 2,
          .width = 24,
          .heads = 3,
          .context = 10,
          .batch = 3,
          .seed = kSeed,
          .threads = 2,
          .matrix_dtype = dtype};
}

Text sentence() {
  const std::string text = "the quick brown fox jumps over the lazy dog; the lazy dog sleeps. ";
  std::string repeated;
  for (int i = 0; i < 20; ++i) repeated += text;
  return Text(std::vector<std::uint8_t>(repeated.begin(), repeated.end()));
}

Batch batch_at(std::uint64_t step, const GptOptions& model, int rank = 0, int world_size = 1) {
  return sentence().batch({.seed = kSeed,
                           .step = step,
                           .rank = rank,
                           .world_size = world_size,
                           .batch = model.batch,
                           .context = model.context});
}

struct Trainer {
  Trainer(const RuntimeOptions& runtime_options, const EngineOptions& wanted, const GptOptions& options,
          const Runtime::MakeCommunicator& join = {})
      : engine_options(wanted),
        runtime(join ? std::make_unique<Runtime>(runtime_options, join) : std::make_unique<Runtime>(runtime_options)),
        model(std::make_unique<Gpt>(*runtime, wanted, options)) {}

  void initialize() { initialize(model->initial_values()); }
  void initialize(const Initializer& initializer) {
    engine = std::make_unique<Engine>(Engine::create(*runtime, engine_options, model->model(), initializer));
    model->attach(*engine);
  }
  std::vector<double> steps(std::uint64_t count) {
    std::vector<double> losses;
    for (std::uint64_t i = 0; i < count; ++i) {
      losses.push_back(model->train(batch_at(i, model->options(), runtime->rank(), runtime->world_size())));
      engine->step();
    }
    return losses;
  }
  std::vector<std::string> digests() {
    return {state_digest(*engine, State::master), state_digest(*engine, State::moment1),
            state_digest(*engine, State::moment2)};
  }

  const EngineOptions engine_options;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<Gpt> model;
  std::unique_ptr<Engine> engine;  // ends before the model's stream
};

// --- fp16 ----------------------------------------------------------------------------------------------------------

EngineOptions fp16_in_memory(double scale) {
  EngineOptions options = in_memory();
  options.weights_dtype = DType::fp16;
  options.loss_scale = {.dynamic = true, .scale = scale, .window = 1000, .hysteresis = 1};
  return options;
}

struct Learned {
  double first = 0, last = 0;  // loss
};
Learned learn(const EngineOptions& options, DType dtype, int steps) {
  Trainer trainer(small_runtime(), options, small_model(dtype));
  trainer.initialize();
  const auto losses = trainer.steps(static_cast<std::uint64_t>(steps));
  return {losses.front(), losses.back()};
}

// Weights of eleven bits stay closer to fp32's run than those of eight.
TEST(Fp16, LearnsAsFp32Does) {
  const Learned fp32 = learn(in_memory(), DType::fp32, 60);
  const Learned fp16 = learn(fp16_in_memory(65536), DType::fp16, 60);
  EXPECT_LT(fp32.last, 0.7 * fp32.first) << "there is nothing to compare";
  EXPECT_NEAR(fp16.first, fp32.first, 1e-3);
  EXPECT_NEAR(fp16.last, fp32.last, 0.02);
}

TEST(Fp16, AScaleTooLargeIsLoweredUntilItLearns) {
  Trainer trainer(small_runtime(), fp16_in_memory(0x1.0p40), small_model(DType::fp16));
  trainer.initialize();
  const std::string before = state_digest(*trainer.engine, State::master);
  int skipped = 0;
  for (std::uint64_t i = 0; i < 40; ++i) {
    trainer.model->train(batch_at(i, trainer.model->options()));
    const float scale = trainer.engine->loss_scale();
    const StepReport report = trainer.engine->step();
    if (report.applied) {
      EXPECT_TRUE(std::isfinite(report.gradient_norm));
      EXPECT_NE(state_digest(*trainer.engine, State::master), before);
      break;
    }
    ++skipped;
    EXPECT_EQ(trainer.engine->loss_scale(), scale / 2);
    ASSERT_EQ(state_digest(*trainer.engine, State::master), before);
  }
  EXPECT_GT(skipped, 10);
  EXPECT_LT(skipped, 40);
}

// --- gradients -----------------------------------------------------------------------------------------------------

class GradientTest : public testing::Test {
 protected:
  GradientTest() : trainer_(small_runtime(), in_memory(), small_model(DType::fp32)) {
    // Far from the initial values, where many gradients are too small to be told from rounding.
    trainer_.initialize([](ParameterId parameter, std::uint64_t first, std::span<float> out) {
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = static_cast<float>(0.3 * random_normal(parameter.index + 100, first + i));
      }
    });
    batch_ = batch_at(0, trainer_.model->options());
  }

  // The loss when `parameter` is moved by `distance` along `direction`, a unit vector.
  double loss_at(ParameterId parameter, const std::vector<float>& start, const std::vector<double>& direction,
                 double distance) {
    std::vector<float> moved = start;
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += static_cast<float>(distance * direction[i]);
    trainer_.engine->write(parameter, State::master, 0, moved);
    return trainer_.model->evaluate(batch_);
  }

  // The derivative along `direction`: central differences of two widths, extrapolated.
  double slope(ParameterId parameter, const std::vector<double>& direction) {
    std::vector<float> start(direction.size());
    trainer_.engine->read(parameter, State::master, 0, start);
    const auto difference = [&](double h) {
      return (loss_at(parameter, start, direction, h) - loss_at(parameter, start, direction, -h)) / (2 * h);
    };
    const double wide = difference(0.04), narrow = difference(0.02);
    trainer_.engine->write(parameter, State::master, 0, start);
    return (4 * narrow - wide) / 3;
  }

  Trainer trainer_;
  Batch batch_;
};

TEST_F(GradientTest, EveryParameterMatchesFiniteDifferences) {
  Engine& engine = *trainer_.engine;
  trainer_.model->train(batch_);
  std::vector<std::vector<float>> gradients;
  for (std::uint32_t p = 0; p < engine.model().parameters().size(); ++p) {
    std::uint64_t count = 1;
    for (const auto extent : engine.model().parameters()[p].shape) count *= static_cast<std::uint64_t>(extent);
    gradients.emplace_back(count);
    engine.read({p}, State::gradient, 0, gradients.back());
  }
  engine.discard();

  for (std::uint32_t p = 0; p < gradients.size(); ++p) {
    SCOPED_TRACE(engine.model().parameters()[p].name);
    const std::vector<float>& gradient = gradients[p];
    double norm = 0;
    for (const float g : gradient) norm += static_cast<double>(g) * static_cast<double>(g);
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 1e-3) << "this parameter is not being tested";

    std::vector<double> along(gradient.size());
    for (std::size_t i = 0; i < along.size(); ++i) along[i] = static_cast<double>(gradient[i]) / norm;
    EXPECT_NEAR(slope({p}, along), norm, 2e-3 * norm + 2e-4);

    for (std::uint64_t sample = 0; sample < 4; ++sample) {  // and single elements, where a misplaced one would show
      const std::size_t i = random_bits(p, sample) % gradient.size();
      std::vector<double> axis(gradient.size());
      axis[i] = 1;
      EXPECT_NEAR(slope({p}, axis), static_cast<double>(gradient[i]),
                  5e-3 * std::abs(static_cast<double>(gradient[i])) + 2e-4)
          << "element " << i;
    }
  }
}

TEST_F(GradientTest, TrainAndEvaluateAgreeOnTheLoss) {
  const double trained = trainer_.model->train(batch_);
  trainer_.engine->discard();
  EXPECT_EQ(trainer_.model->evaluate(batch_), trained);
}

// --- the same everywhere -------------------------------------------------------------------------------------------

TEST(Model, StartsAtTheLossOfAUniformGuess) {
  Trainer trainer(small_runtime(), in_memory(), small_model());
  trainer.initialize();
  EXPECT_NEAR(trainer.model->evaluate(batch_at(0, small_model())), std::log(256.0), 0.1);
}

TEST(Model, Learns) {
  Trainer trainer(small_runtime(), in_memory(), small_model());
  trainer.initialize();
  const std::vector<double> losses = trainer.steps(120);
  EXPECT_LT(losses.back(), 2.5);
}

TEST(Model, InitialValuesDoNotDependOnThePieces) {
  Trainer trainer(small_runtime(), in_memory(), small_model());
  trainer.initialize();
  const Initializer fill = trainer.model->initial_values();
  const ParameterId weight = trainer.engine->parameter("block.1.up.weight");
  std::vector<float> whole(100), pieces(100);
  fill(weight, 7, whole);
  for (std::size_t i = 0; i < 100; i += 20) fill(weight, 7 + i, std::span(pieces).subspan(i, 20));
  EXPECT_EQ(whole, pieces);
  std::vector<float> one(3);
  fill(trainer.engine->parameter("block.0.norm2.weight"), 0, one);
  EXPECT_THAT(one, testing::Each(1.0f));
  fill(trainer.engine->parameter("block.0.up.bias"), 0, one);
  EXPECT_THAT(one, testing::Each(0.0f));
}

TEST(Model, ABatchOfAnotherShapeIsRefusedAndNothingIsLost) {
  Trainer trainer(small_runtime(), in_memory(), small_model());
  trainer.initialize();
  const double loss = trainer.model->evaluate(batch_at(0, small_model()));
  GptOptions other = small_model();
  other.batch = 2;
  EXPECT_THROW(trainer.model->train(batch_at(0, other)), UsageError);
  EXPECT_EQ(trainer.model->evaluate(batch_at(0, small_model())), loss);
}

TEST(Model, ADeviceThatTheCpuCannotReadIsRefusedWithTheRemedy) {
  RuntimeOptions runtime = small_runtime();
  runtime.host_device.host_accessible = false;
  try {
    Trainer trainer(runtime, in_memory(), small_model());
    FAIL() << "kernels of the CPU would read it";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("PyTorch"));
  }
}

TEST(Model, ActivationsThatDoNotFitAreRefusedWithTheKey) {
  RuntimeOptions runtime = small_runtime();
  runtime.device_memory_bytes = 64 * kKiB;
  try {
    Trainer trainer(runtime, in_memory(), small_model());
    FAIL() << "64 KiB were enough";
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.need.key, "hoist.device_memory");
    EXPECT_THAT(error.what(), testing::HasSubstr("activations"));
  }
}

class PlacementTest : public testing::Test {
 protected:
  PlacementTest() : store_(testing::TempDir() + "/hoist_gpt_model_" + std::to_string(getpid())) {}
  ~PlacementTest() override { std::filesystem::remove_all(store_); }

  struct Result {
    std::vector<double> losses;
    std::vector<std::string> digests;
    friend bool operator==(const Result&, const Result&) = default;
  };
  Result result(Placement parameters, Placement optimizer, unsigned threads, std::uint64_t chaos_seed) {
    std::filesystem::remove_all(store_);
    RuntimeOptions runtime = small_runtime();
    runtime.host_device.chaos_seed = chaos_seed;
    EngineOptions engine = in_memory();
    engine.parameters = parameters;
    engine.optimizer = optimizer;
    engine.prefetch_elements = 20'000;
    engine.persistence_elements = 0;
    engine.live_elements_max = 40'000;
    if (parameters == Placement::nvme || optimizer == Placement::nvme) engine.store_directory = store_;
    GptOptions model = small_model();
    model.threads = threads;
    Trainer trainer(runtime, engine, model);
    trainer.initialize();
    Result r;
    r.losses = trainer.steps(4);
    r.digests = trainer.digests();
    return r;
  }
  const std::string store_;
};

TEST_F(PlacementTest, WhereStateLivesChangesNoBit) {
  const Result reference = result(Placement::device, Placement::pinned, 1, 0);
  EXPECT_EQ(result(Placement::pinned, Placement::pinned, 2, 0), reference);
  EXPECT_EQ(result(Placement::device, Placement::nvme, 2, 0), reference);
  EXPECT_EQ(result(Placement::nvme, Placement::nvme, 2, 0), reference);
  for (const std::uint64_t chaos : {1u, 2u}) {
    EXPECT_EQ(result(Placement::nvme, Placement::nvme, 3, chaos), reference) << "chaos seed " << chaos;
  }
}

// --- activations -----------------------------------------------------------------------------------------------------

struct ActivationRun {
  std::vector<double> losses;
  std::vector<std::string> digests;
  std::uint64_t device_bytes = 0, offloaded_bytes = 0;
};
ActivationRun run_with(ActivationPolicy policy, int held, std::uint64_t chaos_seed = 0) {
  RuntimeOptions runtime = small_runtime();
  runtime.host_device.chaos_seed = chaos_seed;
  EngineOptions engine = in_memory();
  engine.micro_batches_max = static_cast<unsigned>(held);
  if (held > 1) engine.micro_batch_order = MicroBatchOrder::vertical;
  GptOptions model = small_model();
  model.layers = 4;
  model.held_micro_batches = held;
  model.activations = policy;
  Trainer trainer(runtime, engine, model);
  trainer.initialize();
  ActivationRun run;
  for (std::uint64_t step = 0; step < 3; ++step) {
    std::vector<Batch> batches;
    for (int i = 0; i < held; ++i) batches.push_back(batch_at(step * 10 + static_cast<std::uint64_t>(i), model));
    run.losses.push_back(trainer.model->evaluate(batches[0]));  // a pass without a way back, between those with one
    run.losses.push_back(trainer.model->train(batches));
    trainer.engine->step();
  }
  run.digests = trainer.digests();
  run.device_bytes = trainer.model->device_bytes();
  run.offloaded_bytes = trainer.model->offloaded_bytes();
  return run;
}

TEST(ModelActivations, WhatBackwardFindsChangesNoBit) {
  for (const int held : {1, 3}) {
    SCOPED_TRACE(held);
    const ActivationRun recompute = run_with(ActivationPolicy::recompute, held);
    const ActivationRun keep = run_with(ActivationPolicy::keep, held);
    EXPECT_EQ(keep.losses, recompute.losses);
    EXPECT_EQ(keep.digests, recompute.digests);
    EXPECT_GT(keep.device_bytes, recompute.device_bytes);
    for (const std::uint64_t chaos : {0u, 5u, 6u}) {
      const ActivationRun offload = run_with(ActivationPolicy::offload, held, chaos);
      EXPECT_EQ(offload.losses, recompute.losses) << "chaos seed " << chaos;
      EXPECT_EQ(offload.digests, recompute.digests) << "chaos seed " << chaos;
      EXPECT_LT(offload.device_bytes, recompute.device_bytes);
      const auto input = static_cast<std::uint64_t>(30 * 24) * sizeof(float);
      EXPECT_EQ(offload.offloaded_bytes, 3u * 4 * static_cast<unsigned>(held) * input);
    }
  }
}

TEST(ModelActivations, AnOffloadThatDoesNotFitIsRefusedWithTheKey) {
  RuntimeOptions runtime = small_runtime();
  runtime.pinned_memory_bytes = 4 * kKiB;
  GptOptions model = small_model();
  model.activations = ActivationPolicy::offload;
  try {
    Trainer trainer(runtime, in_memory(), model);
    FAIL() << "4 KiB were enough";
  } catch (const BudgetError& error) {
    EXPECT_EQ(error.need.key, "hoist.pinned_memory");
    EXPECT_EQ(error.need.have_bytes, 4 * kKiB);
  }
}

// --- vertical order -------------------------------------------------------------------------------------------------

constexpr int kMicroBatches = 2;

// The loss and the gradients of one step of two micro-batches, by parameter.
struct OneStep {
  double loss = 0;
  std::vector<std::vector<float>> gradients;
};
OneStep one_step(MicroBatchOrder order, DType dtype) {
  EngineOptions options = in_memory();
  options.micro_batches_max = kMicroBatches;
  options.micro_batch_order = order;
  GptOptions shape = small_model(dtype);
  const bool vertical = order == MicroBatchOrder::vertical;
  shape.held_micro_batches = vertical ? kMicroBatches : 1;
  Trainer trainer(small_runtime(), options, shape);
  trainer.initialize();
  std::vector<Batch> batches;
  for (std::uint64_t i = 0; i < kMicroBatches; ++i) batches.push_back(batch_at(i, shape));
  OneStep step;
  if (vertical) {
    step.loss = trainer.model->train(batches);
  } else {
    for (int i = 0; i < kMicroBatches; ++i) {
      step.loss += trainer.model->train(batches[static_cast<std::size_t>(i)],
                                        {.micro_batch = i, .micro_batches = kMicroBatches}) /
                   kMicroBatches;
    }
  }
  for (std::uint32_t p = 0; p < trainer.engine->model().parameters().size(); ++p) {
    std::uint64_t count = 1;
    for (const auto extent : trainer.engine->model().parameters()[p].shape) count *= static_cast<std::uint64_t>(extent);
    step.gradients.emplace_back(count);
    trainer.engine->read({p}, State::gradient, 0, step.gradients.back());
  }
  trainer.engine->discard();
  return step;
}

// Every kernel adds whole micro-batches to a gradient, so the order of the sums is the same, but for the tied
// embedding, which the head and the embedding both add to.
TEST(ModelVertical, HasTheLossAndInFp32TheGradientsOfHorizontalOrder) {
  const OneStep across = one_step(MicroBatchOrder::horizontal, DType::fp32);
  const OneStep down = one_step(MicroBatchOrder::vertical, DType::fp32);
  EXPECT_EQ(down.loss, across.loss);
  ASSERT_EQ(down.gradients.size(), across.gradients.size());
  for (std::size_t p = 1; p < across.gradients.size(); ++p) EXPECT_EQ(down.gradients[p], across.gradients[p]) << p;
  for (std::size_t i = 0; i < across.gradients[0].size(); ++i) {
    ASSERT_NEAR(down.gradients[0][i], across.gradients[0][i], 1e-7 + 1e-5f * std::abs(across.gradients[0][i]));
  }
}

TEST(ModelVertical, InBf16GradientsDifferByRounding) {
  const OneStep across = one_step(MicroBatchOrder::horizontal, DType::bf16);
  const OneStep down = one_step(MicroBatchOrder::vertical, DType::bf16);
  EXPECT_EQ(down.loss, across.loss);
  for (std::size_t p = 0; p < across.gradients.size(); ++p) {
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < across.gradients[p].size(); ++i) {
      const double here = down.gradients[p][i], there = across.gradients[p][i];
      difference += (here - there) * (here - there);
      norm += there * there;
    }
    EXPECT_LT(std::sqrt(difference), std::sqrt(norm) / 256) << "parameter " << p;
  }
}

TEST(ModelVertical, ActivationsOfAllMicroBatchesCount) {
  GptOptions shape = small_model();
  Trainer one(small_runtime(), in_memory(), shape);
  shape.held_micro_batches = 3;
  Trainer three(small_runtime(), in_memory(), shape);
  const std::uint64_t kept =
      static_cast<std::uint64_t>(shape.batch * shape.context * shape.width) * sizeof(float) *
      static_cast<std::uint64_t>(shape.layers + 2);  // the blocks' and the head's inputs, and the gradient
  EXPECT_NEAR(static_cast<double>(three.model->device_bytes() - one.model->device_bytes()),
              2 * static_cast<double>(kept), 2048);
  three.initialize();
  EXPECT_THROW(three.model->train(std::vector<Batch>(4, batch_at(0, shape))), UsageError);
}

TEST(ModelRanks, TwoRanksSeeTheBatchOfOne) {
  GptOptions whole = small_model(DType::fp32);
  whole.batch = 4;
  Trainer alone(small_runtime(), in_memory(), whole);
  alone.initialize();
  const std::vector<double> expected = alone.steps(3);

  GptOptions half = whole;
  half.batch = 2;
  comm::ThreadGroup group(2);
  std::vector<double> losses[2];
  std::vector<std::string> digests[2];
  const auto rank_work = [&](int rank) {
    Trainer trainer(small_runtime(), in_memory(), half,
                    [&](const comm::CommunicatorOptions& options) { return group.join(rank, options); });
    trainer.initialize();
    losses[rank] = trainer.steps(3);
    digests[rank] = trainer.digests();
  };
  std::thread other([&] { rank_work(1); });
  rank_work(0);
  other.join();
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR((losses[0][i] + losses[1][i]) / 2, expected[i], 1e-5) << "step " << i;
  EXPECT_EQ(digests[0], digests[1]);
}

}  // namespace
}  // namespace hoist::gpt::model_test
