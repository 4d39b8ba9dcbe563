// SPDX-License-Identifier: Apache-2.0
// Every optimizer through the whole engine: where its state lives changes nothing, it resumes, it is counted byte by
// byte, and it is read back without its program. Records differ from optimizer to optimizer; these tests are about
// that.
#include <algorithm>
#include <cmath>
#include <map>
#include <ostream>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/optim_cpu/reference.hpp>
#include <hoist/tests/support/remembered.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "stored_values.hpp"

namespace hoist::test::optimizers_test {
namespace {

using optim::OptimizerKind;
using optim::OptimizerOptions;

constexpr Placement kDevice = Placement::device, kPinned = Placement::pinned, kNvme = Placement::nvme;

struct Choice {
  const char* name;
  OptimizerOptions matrices;
  OptimizerOptions vectors;  // fp32, a group of their own
  double state_bytes;        // of a bf16 parameter
};
std::ostream& operator<<(std::ostream& out, const Choice& choice) { return out << choice.name; }

const std::vector<Choice>& choices() {
  static const std::vector<Choice> kChoices{
      {"Adam", {.kind = OptimizerKind::adam, .learning_rate = 1e-2}, {.kind = OptimizerKind::adam}, 10},
      {"Adagrad",
       {.kind = OptimizerKind::adagrad, .learning_rate = 1e-2, .learning_rate_decay = 0.1, .initial_accumulator = 0.5},
       {.kind = OptimizerKind::adagrad, .weight_decay = 0},
       6},
      {"Lion", {.kind = OptimizerKind::lion, .learning_rate = 1e-3}, {.kind = OptimizerKind::lion}, 6},
      {"Momentum",
       {.kind = OptimizerKind::sgd, .learning_rate = 1e-2, .momentum = 0.9, .dampening = 0.5},
       {.kind = OptimizerKind::sgd, .learning_rate = 1e-2, .momentum = 0.5, .nesterov = true},
       6},
      {"Sgd", {.kind = OptimizerKind::sgd, .learning_rate = 1e-2}, {.kind = OptimizerKind::sgd}, 2},
      {"LionBesideSgd", {.kind = OptimizerKind::lion, .learning_rate = 1e-3}, {.kind = OptimizerKind::sgd}, 6},
      {"AdamWInHalf",
       {.learning_rate = 1e-2, .moments = MomentType::bf16},
       {.learning_rate = 1e-2, .moments = MomentType::bf16, .rounding_seed = 3},
       6},
      {"LionInHalf",
       {.kind = OptimizerKind::lion, .learning_rate = 1e-3, .moments = MomentType::bf16},
       {.kind = OptimizerKind::adagrad, .initial_accumulator = 0.25, .moments = MomentType::bf16},
       4},
      {"AdamWOfEightBits",
       {.learning_rate = 1e-2, .moments = MomentType::fp8, .remainder = RemainderType::int8},
       {.learning_rate = 1e-2, .moments = MomentType::fp8, .rounding_seed = 3},
       3.25},
      {"AdamMomentsOfEightBits",
       {.kind = OptimizerKind::adam, .learning_rate = 1e-2, .moments = MomentType::fp8},
       {.kind = OptimizerKind::sgd, .learning_rate = 1e-2, .momentum = 0.9, .moments = MomentType::fp8},
       4.25},
      {"LionOfEightBits",
       {.kind = OptimizerKind::lion,
        .learning_rate = 1e-3,
        .moments = MomentType::fp8,
        .remainder = RemainderType::int8},
       {.kind = OptimizerKind::adagrad, .initial_accumulator = 0.25, .moments = MomentType::fp8},
       2.25},
      {"AdamWMasterOf24Bits",
       {.learning_rate = 1e-2, .remainder = RemainderType::int8},
       {.learning_rate = 1e-2, .moments = MomentType::bf16},
       9},
      {"SgdBesideAdamW", {.kind = OptimizerKind::sgd, .learning_rate = 1e-2}, {.learning_rate = 2e-2}, 2},
  };
  return kChoices;
}

ToySetup setup_of(const Choice& choice, Placement parameters, Placement optimizer, const std::string& directory) {
  ToySetup setup = toy_setup(parameters, optimizer, directory);
  setup.engine.optimizer_defaults = choice.matrices;
  return setup;
}
ToyShape shape_of(const Choice& choice) { return {.vectors = choice.vectors}; }

constexpr std::uint64_t kSteps = 6;

const Digests& reference(const Choice& choice) {
  ToySetup simplest = setup_of(choice, kPinned, kPinned, "");
  simplest.engine.update_mode = UpdateMode::step;
  static std::map<std::string, Digests> made;
  return remembered(made, choice.name, [&] { return train_once(simplest, shape_of(choice), kSteps); });
}

class OptimizersTest : public testing::TestWithParam<Choice> {};
INSTANTIATE_TEST_SUITE_P(All, OptimizersTest, testing::ValuesIn(choices()),
                         [](const auto& choice) { return std::string(choice.param.name); });

TEST_P(OptimizersTest, PlacementChangesNothing) {
  const Digests& expected = reference(GetParam());
  struct Where {
    Placement parameters, optimizer;
    std::uint64_t chaos_seed;
    tiers::Durability durability;
  };
  constexpr auto kStep = tiers::Durability::step, kNone = tiers::Durability::none;
  for (const Where& where :
       {Where{kDevice, kDevice, 0, kStep}, Where{kPinned, kPinned, 0, kStep}, Where{kNvme, kNvme, 0, kStep},
        Where{kNvme, kNvme, 21, kNone}, Where{kDevice, kNvme, 22, kStep}, Where{kNvme, kPinned, 0, kStep}}) {
    for (const UpdateMode mode : {UpdateMode::automatic, UpdateMode::step}) {
      const bool nvme = where.parameters == kNvme || where.optimizer == kNvme;
      const TempDirectory directory;
      ToySetup setup = setup_of(GetParam(), where.parameters, where.optimizer, nvme ? directory / "store" : "");
      setup.runtime.host_device.chaos_seed = where.chaos_seed;
      setup.engine.durability = where.durability;
      setup.engine.update_mode = mode;
      EXPECT_EQ(train_once(setup, shape_of(GetParam()), kSteps), expected)
          << "parameters " << static_cast<int>(where.parameters) << ", optimizer " << static_cast<int>(where.optimizer)
          << ", mode " << static_cast<int>(mode);
    }
  }
}

TEST_P(OptimizersTest, ResumesInTheMiddle) {
  for (const auto& [parameters, optimizer] : {std::pair{kNvme, kNvme}, std::pair{kPinned, kPinned}}) {
    const TempDirectory directory;
    const ToySetup setup = setup_of(GetParam(), parameters, optimizer, directory / "store");
    std::vector<double> losses;
    {
      ToyProgram model(setup, shape_of(GetParam()));
      model.train(1, kSteps / 2);
      if (optimizer != kNvme) model.engine().save("middle", {}).wait();
      losses = model.losses;
    }
    ToyModel model(setup, shape_of(GetParam()));
    EXPECT_EQ(model.restore().step, kSteps / 2);
    model.losses = losses;
    model.train(kSteps / 2 + 1, kSteps);
    EXPECT_EQ(digests_of(model), reference(GetParam()));
  }
}

TEST_P(OptimizersTest, IsReadBackFromTheStore) {
  for (const int ranks : {1, 2}) {
    const TempDirectory directory;
    const ToySetup setup = setup_of(GetParam(), kNvme, kNvme, directory / "store");
    expect_stored(directory / "store", trained(ranks, setup, shape_of(GetParam()), 2));
  }
}

// The first element of every parameter, as the engine has it; zero where no such state is kept.
double first_value(Engine& engine, std::uint32_t parameter, State state) {
  std::vector<float> value(1, 0.0f);
  if (engine.keeps(ParameterId{parameter}, state)) engine.read(ParameterId{parameter}, state, 0, value);
  return static_cast<double>(value[0]);
}

// The largest of the first elements of a parameter, which share an exponent.
double largest_of_block(Engine& engine, std::uint32_t parameter, State state) {
  std::vector<float> values(kMomentBlock);
  engine.read(ParameterId{parameter}, state, 0, values);
  double largest = 0;
  for (const float value : values) largest = std::max(largest, std::abs(static_cast<double>(value)));
  return largest;
}

// In pieces that cut blocks of moments that share an exponent.
TEST_P(OptimizersTest, WhatIsReadAndWrittenAgainStaysAsItIs) {
  for (const auto& [parameters, optimizer] : {std::pair{kNvme, kNvme}, std::pair{kPinned, kPinned}}) {
    const TempDirectory directory;
    const ToySetup setup = setup_of(GetParam(), parameters, optimizer, optimizer == kNvme ? directory / "store" : "");
    ToyModel model(setup, shape_of(GetParam()));
    Engine& engine = model.initialize();
    model.train(1, 3);
    const StateValues before = values_of(engine);
    for (const auto& [which, values] : before) {
      const std::span<const float> all(values);
      const std::size_t first = all.size() / 3, count = all.size() / 3 + 5;
      engine.write(model.model().parameter(which.first), which.second, first, all.subspan(first, count));
    }
    EXPECT_EQ(values_of(engine), before);
    // The values that are read are those written, to half a step of the type.
    const ParameterId matrix = model.matrix(0);
    for (const State state : {State::moment1, State::moment2}) {
      if (!engine.keeps(matrix, state)) continue;
      std::vector<float> values(19), found(19);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = 3.0f + static_cast<float>(i) / 7;
      engine.write(matrix, state, 3, values);
      engine.read(matrix, state, 3, found);
      for (std::size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(found[i], values[i], 0x1.0p-5 * values[i]);
    }
  }
}

TEST_P(OptimizersTest, FollowsTheReference) {
  const ToyShape shape{.matrices = {64}, .norm = 32, .frozen = false, .tied = false, .vectors = GetParam().vectors};
  const ToySetup setup = setup_of(GetParam(), kPinned, kPinned, "");
  ToyModel model(setup, shape);
  Engine& engine = model.initialize();
  const auto parameters = model.model().parameters();
  std::vector<optim::ReferenceState> expected(parameters.size());
  for (std::uint32_t p = 0; p < parameters.size(); ++p)
    expected[p] = {.master = first_value(engine, p, State::master), .moment2 = first_value(engine, p, State::moment2)};
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    model.pass(step);
    std::vector<double> gradients(parameters.size());
    for (std::uint32_t p = 0; p < parameters.size(); ++p) gradients[p] = first_value(engine, p, State::gradient);
    const double clip = engine.step().clip_factor;
    for (std::uint32_t p = 0; p < parameters.size(); ++p) {
      const bool is_matrix = parameters[p].dtype == DType::bf16;
      const OptimizerOptions& options = is_matrix ? GetParam().matrices : GetParam().vectors;
      optim::reference_update(options, step, gradients[p] * clip, expected[p]);
      const double scale = std::abs(expected[p].master) + options.learning_rate;
      const bool is_short = is_matrix && options.remainder == RemainderType::int8;
      EXPECT_NEAR(first_value(engine, p, State::master), expected[p].master,
                  1e-5 * scale + (is_short ? 0x1.0p-15 * std::abs(expected[p].master) : 0))
          << "step " << step;
      if (is_short) expected[p].master = first_value(engine, p, State::master);
      const double m = expected[p].moment1, v = expected[p].moment2;
      if (options.moments != MomentType::fp32) {  // each step begins from what was stored, within a step of its type
        const bool fp8 = options.moments == MomentType::fp8;
        if (engine.keeps(ParameterId{p}, State::moment1)) {
          const double least = fp8 ? 0x1.0p-10 * largest_of_block(engine, p, State::moment1) : 0;
          EXPECT_NEAR(first_value(engine, p, State::moment1), m,
                      std::max((fp8 ? 0x1.0p-4 : 0x1.0p-8) * std::abs(m), least));
        }
        if (engine.keeps(ParameterId{p}, State::moment2)) {
          const double least = fp8 ? 0x1.0p-18 * largest_of_block(engine, p, State::moment2) : 0;
          EXPECT_NEAR(first_value(engine, p, State::moment2), v, std::max((fp8 ? 0x1.0p-4 : 0x1.0p-7) * v, least));
        }
        expected[p] = {.master = expected[p].master,
                       .moment1 = first_value(engine, p, State::moment1),
                       .moment2 = first_value(engine, p, State::moment2)};
        continue;
      }
      if (engine.keeps(ParameterId{p}, State::moment1)) {
        EXPECT_NEAR(first_value(engine, p, State::moment1), m, 1e-5 * (std::abs(m) + std::abs(gradients[p])));
      }
      if (engine.keeps(ParameterId{p}, State::moment2)) {
        EXPECT_NEAR(first_value(engine, p, State::moment2), v, 1e-5 * v);
      }
    }
  }
}

// Random bits belong to parameters and blocks to places in the model, so ranks that see the same gradients end alike.
TEST_P(OptimizersTest, HowManyRanksShareTheStateChangesNothing) {
  ToySetup setup = setup_of(GetParam(), kPinned, kPinned, "");
  setup.engine.gradient_clipping = 0;  // a norm is added up in the order of ranks
  const auto digests_with = [&](int ranks) {
    Digests digests;
    on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup, join, shape_of(GetParam()));
      model.equal_gradients = true;
      model.initialize();
      model.train(1, 3);
      const Digests mine = digests_of(model);
      if (rank == 0) digests = mine;
    });
    return digests;
  };
  const Digests alone = digests_with(1);
  EXPECT_EQ(digests_with(2), alone);
  EXPECT_EQ(digests_with(4), alone);
}

TEST_P(OptimizersTest, BytesArePredictedCountedAndMinimal) {
  const Choice& choice = GetParam();
  const ToyShape shape{
      .matrices = {1 << 18, 1 << 18}, .norm = 32, .frozen = false, .tied = false, .vectors = choice.vectors};
  const TempDirectory directory;
  ToySetup setup = setup_of(choice, kNvme, kNvme, directory / "store");
  setup.runtime.pinned_memory_bytes = 128 * kMiB;
  setup.engine.reuse_distance_elements = 0;  // every use fetches
  ToyModel model(setup, shape);
  const Prediction predicted = predict(setup.runtime, setup.engine, model.model(), 1);
  Engine& engine = model.initialize();
  model.train(1, 2);
  engine.settle();
  EXPECT_EQ(model.runtime().pinned_budget().peak_bytes(), predicted.pinned.bytes);
  const MovedBytes moved = model.bytes_moved(3, 4);
  const double steps = 2.0 * static_cast<double>(model.model().parameter_count());
  const double read = static_cast<double>(moved[Link::nvme_read]) / steps;
  const double written = static_cast<double>(moved[Link::nvme_write]) / steps;
  EXPECT_NEAR(read, choice.state_bytes + 4, 0.05);  // weights twice: with the record, and for the backward pass
  EXPECT_NEAR(written, choice.state_bytes + 2, 0.05);
  const StepBytes formula = engine.formula_bytes();
  EXPECT_NEAR(static_cast<double>(formula.nvme_read) * 2 / steps, read, 0.05);
  EXPECT_NEAR(static_cast<double>(formula.nvme_write) * 2 / steps, written, 0.05);
  EXPECT_EQ(predicted.step.nvme_read, formula.nvme_read);
  EXPECT_EQ(predicted.step.nvme_write, formula.nvme_write);
}

// A store knows whose state it holds: another optimizer would take one moment for another.
TEST(StoreOfAnOptimizer, IsRefusedToAnotherOne) {
  for (const Choice& mine : choices()) {
    const TempDirectory directory;
    (void)train_once(setup_of(mine, kNvme, kNvme, directory / "store"), shape_of(mine), 1);
    for (const Choice& other : choices()) {
      const bool same = optim::state_form(mine.matrices) == optim::state_form(other.matrices) &&
                        optim::state_form(mine.vectors) == optim::state_form(other.vectors);
      const ToySetup setup = setup_of(other, kNvme, kNvme, directory / "store");
      ToyModel model(setup, shape_of(other));
      if (same) {
        EXPECT_EQ(model.restore().step, 1u) << mine.name << " by " << other.name;
      } else {
        EXPECT_THROW(model.restore(), StoreError) << mine.name << " by " << other.name;
      }
    }
  }
}

TEST(StoreOfAnOptimizer, OfAdamWIsContinuedByAdam) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(kNvme, kNvme, directory / "store");
  (void)train_once(setup, {}, 1);
  setup.engine.optimizer_defaults.kind = OptimizerKind::adam;
  ToyModel model(setup);
  EXPECT_EQ(model.restore().step, 1u);
  model.train(2, 2);
}

TEST(OptimizerSettings, AreChecked) {
  const ToySetup setup = toy_setup(kPinned, kPinned);
  Runtime runtime(setup.runtime);
  const auto start = [&](const GroupOptions& group) {
    ToyModel(runtime, setup.engine, {.vectors = group}).initialize();
  };
  EXPECT_THROW(start({.learning_rate = -1}), UsageError);
  EXPECT_THROW(start({.beta1 = 1}), UsageError);
  EXPECT_THROW(start({.kind = OptimizerKind::sgd, .nesterov = true}), UsageError);
  EXPECT_THROW(start({.kind = OptimizerKind::sgd, .momentum = 0.9, .dampening = 0.1, .nesterov = true}), UsageError);
  EXPECT_NO_THROW(start({.kind = OptimizerKind::sgd, .momentum = 0.9, .nesterov = true}));
}

}  // namespace
}  // namespace hoist::test::optimizers_test
