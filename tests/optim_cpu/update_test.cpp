// SPDX-License-Identifier: Apache-2.0
// The kernels against the double-precision reference and against a scalar float text of the documented order.
#include <cmath>

#include <hoist/optim_cpu/reference.hpp>

#include "tiles.hpp"

namespace hoist::optim::test::update_test {
namespace {

// The order of update.hpp in plain C++; must agree to the bit.
struct ScalarState {
  float p, m, v;
};

float flushed(float x) { return std::fabs(x) < 0x1.0p-126f ? 0.0f : x; }

float product(float a, float b) { return a * b; }

// (a * x) + (b * y), each rounded
float mixed(float a, float x, float b, float y) {
  const float left = a * x;
  const float right = b * y;
  return left + right;
}

bool has_moment1(Formula formula) { return formula != Formula::adagrad && formula != Formula::sgd; }
bool has_moment2(Formula formula) {
  return formula == Formula::adamw || formula == Formula::adam || formula == Formula::adagrad;
}

float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? 0.0f : x; }

void scalar_step(const UpdateCoefficients& c, float g, ScalarState& s) {
  g = g * c.gradient_scale;
  if (c.formula == Formula::adamw || c.formula == Formula::lion) {
    s.p = s.p * c.decay_factor;
  } else if (c.l2 != 0) {
    g = g + product(c.l2, s.p);
  }
  float m = s.m, v = s.v, change = 0;
  switch (c.formula) {
    case Formula::adamw:
    case Formula::adam: {
      m = mixed(c.beta1, s.m, c.one_minus_beta1, g);
      const float scaled = c.one_minus_beta2 * g;
      v = mixed(c.beta2, s.v, scaled, g);
      const float corrected = std::sqrt(v) / c.root_bias2;
      const float denominator = corrected + c.epsilon;
      change = product(c.step_size, m) / denominator;
      break;
    }
    case Formula::adagrad: {
      v = s.v + product(g, g);
      const float denominator = std::sqrt(v) + c.epsilon;
      change = product(c.step_size, g) / denominator;
      break;
    }
    case Formula::lion:
      change = c.step_size * sign(mixed(c.beta1, s.m, c.one_minus_beta1, g));
      m = mixed(c.beta2, s.m, c.one_minus_beta2, g);
      break;
    case Formula::momentum:
      m = mixed(c.beta1, s.m, c.one_minus_beta1, g);
      change = c.step_size * (c.gradient_part == 0 ? m : mixed(c.gradient_part, g, c.moment_part, m));
      break;
    case Formula::sgd:
      change = c.step_size * g;
      break;
  }
  s.p = s.p - change;
  if (has_moment1(c.formula)) s.m = flushed(m);
  if (has_moment2(c.formula)) s.v = flushed(v);
}

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

void expect_state(const Tile& tile, const std::vector<ScalarState>& right, const std::string& what) {
  for (std::size_t i = 0; i < right.size(); ++i) {
    if (std::isnan(right[i].p)) {
      ASSERT_TRUE(std::isnan(tile.split_value(i))) << what << ", element " << i;
      continue;
    }
    ASSERT_EQ(bits_of(tile.split_value(i)), bits_of(right[i].p)) << what << ", element " << i;
    ASSERT_EQ(bits_of(tile.moment1[i]), bits_of(right[i].m)) << what << ", element " << i;
    ASSERT_EQ(bits_of(tile.moment2[i]), bits_of(right[i].v)) << what << ", element " << i;
  }
}

class DocumentedOrder : public ::testing::TestWithParam<std::tuple<NamedOptions, DType, bool>> {};

TEST_P(DocumentedOrder, EveryInstructionSetFollowsItToTheBit) {
  const auto& [optimizer, dtype, extreme] = GetParam();
  const OptimizerOptions& options = optimizer.options;
  constexpr std::size_t kCount = 8192 + 5;
  constexpr std::uint64_t kSeed = 4242;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    Rng rng(kSeed);
    Tile tile(kCount, dtype, 3);
    extreme ? fill_extreme(tile, rng) : fill_ordinary(tile, rng);
    std::vector<ScalarState> right(kCount);
    for (std::size_t i = 0; i < kCount; ++i) right[i] = {tile.master_array[i], tile.moment1[i], tile.moment2[i]};
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const UpdateCoefficients c(options, step, 0.25);
      for (std::size_t i = 0; i < kCount; ++i) scalar_step(c, tile.gradient_value(i), right[i]);
      (void)update_tile(c, tile.split());
      expect_state(tile, right, name + ", step " + std::to_string(step) + ", seed " + std::to_string(kSeed));
      new_gradients(tile, rng);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, DocumentedOrder,
                         ::testing::Combine(::testing::ValuesIn(every_optimizer()), ::testing::ValuesIn(kDTypes),
                                            ::testing::Bool()));

struct Worst {
  double master = 0, moment1 = 0, moment2 = 0;
};

// Runs `steps` steps beside the reference. Errors are measured against what each quantity is made of, as differences of
// nearly equal terms have no relative accuracy: masters against the distance they may have moved (steps * learning rate
// plus their own magnitude), moments against the largest gradient (its square) seen, or themselves where sums made them
// larger than that.
Worst against_reference(const OptimizerOptions& options, DType dtype, int steps, std::uint64_t seed) {
  constexpr std::size_t kCount = 1024 + 7;
  constexpr double kScale = 0.125;  // exact in float, so both sides see one gradient
  Rng rng(seed);
  Tile tile(kCount, dtype);
  std::vector<ReferenceState> reference(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    tile.set_master(i, static_cast<float>(0.1 * (rng.uniform() - 0.5)));
    reference[i].master = static_cast<double>(tile.master_array[i]);
  }
  double largest = 0;  // gradient, the L2 term included; of a running sum the largest it can grow to
  for (int step = 1; step <= steps; ++step) {
    new_gradients(tile, rng);
    const UpdateCoefficients c(options, static_cast<std::uint64_t>(step), kScale);
    for (std::size_t i = 0; i < kCount; ++i) {
      const double gradient = static_cast<double>(tile.gradient_value(i)) * kScale;
      const bool decays_apart = options.kind == OptimizerKind::adamw || options.kind == OptimizerKind::lion;
      const double l2 = decays_apart ? 0 : options.weight_decay * reference[i].master;
      largest = std::max(largest, std::fabs(gradient + l2) / (1 - options.momentum));
      reference_update(options, static_cast<std::uint64_t>(step), gradient, reference[i]);
    }
    EXPECT_TRUE(update_tile(c, tile.split()));
  }
  Worst worst;
  for (std::size_t i = 0; i < kCount; ++i) {
    const double reach = std::fabs(reference[i].master) + steps * options.learning_rate;
    worst.master =
        std::max(worst.master, std::fabs(static_cast<double>(tile.split_value(i)) - reference[i].master) / reach);
    const double scale1 = std::max(largest, std::fabs(reference[i].moment1));
    const double scale2 = std::max(largest * largest, reference[i].moment2);
    worst.moment1 =
        std::max(worst.moment1, std::fabs(static_cast<double>(tile.moment1[i]) - reference[i].moment1) / scale1);
    worst.moment2 =
        std::max(worst.moment2, std::fabs(static_cast<double>(tile.moment2[i]) - reference[i].moment2) / scale2);
  }
  return worst;
}

// Every float operation errs by at most 2^-24 of its result, and an old error of a moment decays with its beta: first
// moments can be at most 3 / (1 - beta1) roundings away, second ones 4 / (1 - beta2), and are much nearer since the
// signs are random. With coefficients that floats hold exactly nothing else separates the two.
class AgainstReference : public ::testing::TestWithParam<std::tuple<NamedOptions, DType, bool>> {};

constexpr double kRounding = 0x1.0p-24;

TEST_P(AgainstReference, StaysWithinRoundingOverManySteps) {
  const auto& [optimizer, dtype, bias_correction] = GetParam();
  OptimizerOptions options = optimizer.options;
  options.bias_correction = bias_correction;
  options.momentum = options.momentum == 0 ? 0 : 0.875;
  options.dampening = options.dampening == 0 ? 0 : 0.5;
  options.learning_rate_decay = 0x1.0p-4;
  options.learning_rate = 0x1.0p-10;
  options.beta1 = 0.875;
  options.beta2 = 1 - 0x1.0p-10;
  options.weight_decay = 0x1.0p-4;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (const std::uint64_t seed : {1u, 2u}) {
      const Worst worst = against_reference(options, dtype, 300, seed);
      EXPECT_LT(worst.master, 16 * kRounding) << name << " seed " << seed;
      EXPECT_LT(worst.moment1, (options.momentum > 0 ? 24 : 16) * kRounding) << name << " seed " << seed;
      EXPECT_LT(worst.moment2, 64 * kRounding) << name << " seed " << seed;
    }
  }
}

// With PyTorch's default betas the coefficients are rounded too, as they are there: beta is off by up to 2^-25, which
// the average amplifies by 1 / (1 - beta).
TEST_P(AgainstReference, DefaultCoefficientsAddTheirOwnRounding) {
  const auto& [optimizer, dtype, bias_correction] = GetParam();
  OptimizerOptions options = default_options(optimizer.options.kind);
  options.momentum = optimizer.options.momentum;
  options.dampening = optimizer.options.dampening;
  options.nesterov = optimizer.options.nesterov;
  options.bias_correction = bias_correction;
  const Worst worst = against_reference(options, dtype, 300, 3);
  // Lion moves by the same amount every step, so that its roundings may all be alike: half of one a step.
  EXPECT_LT(worst.master, (options.kind == OptimizerKind::lion ? 300 / 2 : 64) * kRounding);
  EXPECT_LT(worst.moment1, (16 + 1 / (1 - options.beta1)) * kRounding);
  EXPECT_LT(worst.moment2, (64 + 1 / (1 - options.beta2)) * kRounding);
}

INSTANTIATE_TEST_SUITE_P(All, AgainstReference,
                         ::testing::Combine(::testing::ValuesIn(every_optimizer()), ::testing::ValuesIn(kDTypes),
                                            ::testing::Bool()));

TEST(Reference, FirstStepsAgreeWithPaperByHand) {
  OptimizerOptions options;
  options.learning_rate = 0.1;
  options.weight_decay = 0.5;
  options.epsilon = 0;
  ReferenceState state{1.0, 0.0, 0.0};
  // With bias correction and no epsilon the first step moves by exactly learning_rate * sign(gradient).
  reference_update(options, 1, -3.0, state);
  EXPECT_NEAR(state.master, 1.0 * (1 - 0.1 * 0.5) + 0.1, 1e-12);
  EXPECT_NEAR(state.moment1, -0.3, 1e-12);
  EXPECT_NEAR(state.moment2, 0.009, 1e-12);
  // L2: the gradient is -3 + 0.5 * 1.
  state = {1.0, 0.0, 0.0};
  options.kind = OptimizerKind::adam;
  reference_update(options, 1, -3.0, state);
  EXPECT_NEAR(state.master, 1.1, 1e-12);
  EXPECT_NEAR(state.moment1, -0.25, 1e-12);
  EXPECT_NEAR(state.moment2, 0.00625, 1e-12);
  // Without bias correction the first step is sqrt(1 - beta2) / (1 - beta1) times smaller than the corrected one.
  state = {1.0, 0.0, 0.0};
  options.bias_correction = false;
  options.weight_decay = 0;
  reference_update(options, 1, -3.0, state);
  EXPECT_NEAR(state.master, 1.0 + 0.1 * 0.3 / std::sqrt(0.009), 1e-12);
}

TEST(Reference, OtherOptimizersByHand) {
  // Adagrad: the first step is learning_rate * sign(gradient), the second learning_rate / (1 + decay) * g / sqrt(sum).
  OptimizerOptions adagrad{.kind = OptimizerKind::adagrad,
                           .learning_rate = 0.1,
                           .epsilon = 0,
                           .weight_decay = 0,
                           .learning_rate_decay = 0.25};
  ReferenceState state{1.0, 0.0, 0.0};
  reference_update(adagrad, 1, -3.0, state);
  EXPECT_NEAR(state.master, 1.1, 1e-12);
  reference_update(adagrad, 2, 4.0, state);
  EXPECT_NEAR(state.moment2, 25.0, 1e-12);
  EXPECT_NEAR(state.master, 1.1 - 0.1 / 1.25 * 4.0 / 5.0, 1e-12);
  // Lion: the sign of the mix with beta1 moves the weight, the one with beta2 is kept.
  OptimizerOptions lion{
      .kind = OptimizerKind::lion, .learning_rate = 0.1, .beta1 = 0.5, .beta2 = 0.75, .weight_decay = 0.5};
  state = {1.0, 2.0, 0.0};
  reference_update(lion, 1, -3.0, state);
  EXPECT_NEAR(state.master, 0.95 + 0.1, 1e-12);
  EXPECT_NEAR(state.moment1, 0.75 * 2 - 0.25 * 3, 1e-12);
  state = {1.0, 2.0, 0.0};
  reference_update(lion, 1, -2.0, state);
  EXPECT_NEAR(state.master, 0.95, 1e-12) << "neither up nor down";
  // SGD: the first step takes the gradient whole, dampening begins with the second.
  OptimizerOptions sgd{.kind = OptimizerKind::sgd, .learning_rate = 0.1, .weight_decay = 0.5};
  state = {2.0, 0.0, 0.0};
  reference_update(sgd, 1, 3.0, state);
  EXPECT_NEAR(state.master, 2.0 - 0.1 * 4.0, 1e-12);
  sgd.weight_decay = 0;
  sgd.momentum = 0.5;
  sgd.dampening = 0.25;
  state = {2.0, 0.0, 0.0};
  reference_update(sgd, 1, 4.0, state);
  EXPECT_NEAR(state.master, 1.6, 1e-12);
  reference_update(sgd, 2, 8.0, state);
  EXPECT_NEAR(state.moment1, 0.5 * 4 + 0.75 * 8, 1e-12);
  EXPECT_NEAR(state.master, 1.6 - 0.8, 1e-12);
  sgd.dampening = 0;
  sgd.nesterov = true;
  state = {2.0, 0.0, 0.0};
  reference_update(sgd, 1, 4.0, state);
  EXPECT_NEAR(state.master, 2.0 - 0.1 * (4 + 0.5 * 4), 1e-12);
}

TEST(Options, DefaultsArePyTorchsAndLionsPapers) {
  EXPECT_EQ(default_options(OptimizerKind::adamw).weight_decay, 0.01);
  EXPECT_EQ(default_options(OptimizerKind::adam).weight_decay, 0);
  EXPECT_EQ(default_options(OptimizerKind::adagrad).learning_rate, 1e-2);
  EXPECT_EQ(default_options(OptimizerKind::adagrad).epsilon, 1e-10);
  EXPECT_EQ(default_options(OptimizerKind::lion).learning_rate, 1e-4);
  EXPECT_EQ(default_options(OptimizerKind::lion).beta2, 0.99);
  EXPECT_EQ(default_options(OptimizerKind::sgd).learning_rate, 1e-3);
  for (const auto& [name, options] : every_optimizer()) {
    EXPECT_NO_THROW(check(options)) << name;
    EXPECT_NO_THROW(check(default_options(options.kind))) << name;
  }
}

TEST(Options, StateIsWhatTheFormulaKeeps) {
  EXPECT_EQ(state_of({.kind = OptimizerKind::sgd}), OptimizerState::none);
  EXPECT_EQ(state_of({.kind = OptimizerKind::sgd, .momentum = 0.1}), OptimizerState::momentum);
  EXPECT_EQ(state_of({.kind = OptimizerKind::adam}), state_of({.kind = OptimizerKind::adamw}));
  EXPECT_EQ(moment_count(OptimizerState::none), 0u);
  EXPECT_EQ(moment_count(OptimizerState::momentum), 1u);
  EXPECT_EQ(moment_count(OptimizerState::lion), 1u);
  EXPECT_EQ(moment_count(OptimizerState::adagrad), 1u);
  EXPECT_EQ(moment_count(OptimizerState::adam), 2u);
}

TEST(Coefficients, AreTheFormulaRoundedOnce) {
  OptimizerOptions options;
  options.learning_rate = 1e-3;
  options.beta1 = 0.9;
  options.beta2 = 0.95;
  options.weight_decay = 0.1;
  for (const std::uint64_t step : {1u, 2u, 3u, 10u, 1000u, 1000000u}) {
    const UpdateCoefficients c(options, step, 0.3);
    const auto t = static_cast<double>(step);
    EXPECT_EQ(c.gradient_scale, 0.3f);
    EXPECT_EQ(c.beta1, 0.9f);
    EXPECT_EQ(c.one_minus_beta1, static_cast<float>(1 - 0.9));
    EXPECT_EQ(c.one_minus_beta2, static_cast<float>(1 - 0.95));
    EXPECT_FLOAT_EQ(c.step_size, static_cast<float>(1e-3 / (1 - std::pow(0.9, t))));
    EXPECT_FLOAT_EQ(c.root_bias2, static_cast<float>(std::sqrt(1 - std::pow(0.95, t))));
    EXPECT_EQ(c.decay_factor, static_cast<float>(1 - 1e-3 * 0.1));
    EXPECT_EQ(c.l2, 0.1f);
  }
  options.bias_correction = false;
  const UpdateCoefficients c(options, 3, 1.0);
  EXPECT_EQ(c.step_size, 1e-3f);
  EXPECT_EQ(c.root_bias2, 1.0f);
}

TEST(CoefficientsDeathTest, StepZeroIsABug) {
  EXPECT_DEATH(UpdateCoefficients(OptimizerOptions{}, 0, 1.0), "counted from 1");
}

// adam and adamw differ exactly in where the decay enters.
TEST(Variants, DecayEntersWhereItShould) {
  OptimizerOptions options;
  options.weight_decay = 0.5;
  options.learning_rate = 0.1;
  for (const OptimizerKind variant : {OptimizerKind::adamw, OptimizerKind::adam}) {
    options.kind = variant;
    Tile tile(40, DType::fp32);
    for (std::size_t i = 0; i < 40; ++i) tile.set_master(i, 2.0f);  // gradients and moments are zero
    ASSERT_TRUE(update_tile(UpdateCoefficients(options, 1, 1.0), tile.split()));
    for (std::size_t i = 0; i < 40; ++i) {
      if (variant == OptimizerKind::adamw) {
        EXPECT_FLOAT_EQ(tile.split_value(i), 2.0f * 0.95f);
        EXPECT_EQ(tile.moment1[i], 0.0f);
      } else {  // L2 alone is a gradient of 1: one full step of the learning rate
        EXPECT_FLOAT_EQ(tile.split_value(i), 1.9f);
        EXPECT_FLOAT_EQ(tile.moment1[i], 0.1f);
      }
    }
  }
}

}  // namespace
}  // namespace hoist::optim::test::update_test
