// SPDX-License-Identifier: Apache-2.0
// The kernels against the double-precision reference and against a scalar float text of the documented order.
#include <cmath>

#include <hoist/optim_cpu/reference.hpp>

#include "tiles.hpp"

namespace hoist::optim::test {
namespace {

// The order of adam.hpp in plain C++; must agree to the bit.
struct ScalarState {
  float p, m, v;
};

float flushed(float x) { return std::fabs(x) < 0x1.0p-126f ? 0.0f : x; }

void scalar_step(const AdamCoefficients& c, float g, ScalarState& s) {
  g = g * c.gradient_scale;
  if (c.variant == AdamVariant::adam) {
    const float l2 = c.l2 * s.p;
    g = g + l2;
  } else {
    s.p = s.p * c.decay_factor;
  }
  const float m1 = c.beta1 * s.m;
  const float m2 = c.one_minus_beta1 * g;
  const float m = m1 + m2;
  const float v1 = c.beta2 * s.v;
  const float scaled = c.one_minus_beta2 * g;
  const float v2 = scaled * g;
  const float v = v1 + v2;
  const float root = std::sqrt(v);
  const float corrected = root / c.root_bias2;
  const float denominator = corrected + c.epsilon;
  const float numerator = c.step_size * m;
  const float change = numerator / denominator;
  s = {s.p - change, flushed(m), flushed(v)};
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

class DocumentedOrder : public ::testing::TestWithParam<std::tuple<AdamVariant, DType, bool>> {};

TEST_P(DocumentedOrder, EveryInstructionSetFollowsItToTheBit) {
  const auto [variant, dtype, extreme] = GetParam();
  constexpr std::size_t kCount = 8192 + 5;
  constexpr std::uint64_t kSeed = 4242;
  AdamOptions options;
  options.variant = variant;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    Rng rng(kSeed);
    Tile tile(kCount, dtype, 3);
    extreme ? fill_extreme(tile, rng) : fill_ordinary(tile, rng);
    std::vector<ScalarState> right(kCount);
    for (std::size_t i = 0; i < kCount; ++i) right[i] = {tile.master_array[i], tile.moment1[i], tile.moment2[i]};
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const AdamCoefficients c(options, step, 0.25);
      for (std::size_t i = 0; i < kCount; ++i) scalar_step(c, tile.gradient_value(i), right[i]);
      (void)adam_update(c, tile.split());
      expect_state(tile, right, name + ", step " + std::to_string(step) + ", seed " + std::to_string(kSeed));
      new_gradients(tile, rng);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, DocumentedOrder,
                         ::testing::Combine(::testing::ValuesIn(kVariants), ::testing::ValuesIn(kDTypes),
                                            ::testing::Bool()));

struct Worst {
  double master = 0, moment1 = 0, moment2 = 0;
};

// Runs `steps` steps beside the reference. Errors are measured against what each quantity is made of, as differences of
// nearly equal terms have no relative accuracy: masters against the distance they may have moved (steps * learning rate
// plus their own magnitude), moments against the largest gradient (its square) seen.
Worst against_reference(const AdamOptions& options, DType dtype, int steps, std::uint64_t seed) {
  constexpr std::size_t kCount = 1024 + 7;
  constexpr double kScale = 0.125;  // exact in float, so both sides see one gradient
  Rng rng(seed);
  Tile tile(kCount, dtype);
  std::vector<ReferenceState> reference(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    tile.set_master(i, static_cast<float>(0.1 * (rng.uniform() - 0.5)));
    reference[i].master = static_cast<double>(tile.master_array[i]);
  }
  double largest = 0;  // gradient, the L2 term included
  for (int step = 1; step <= steps; ++step) {
    new_gradients(tile, rng);
    const AdamCoefficients c(options, static_cast<std::uint64_t>(step), kScale);
    for (std::size_t i = 0; i < kCount; ++i) {
      const double gradient = static_cast<double>(tile.gradient_value(i)) * kScale;
      const double l2 = options.variant == AdamVariant::adam ? options.weight_decay * reference[i].master : 0;
      largest = std::max(largest, std::fabs(gradient + l2));
      reference_adam(options, static_cast<std::uint64_t>(step), gradient, reference[i]);
    }
    EXPECT_TRUE(adam_update(c, tile.split()));
  }
  Worst worst;
  for (std::size_t i = 0; i < kCount; ++i) {
    const double reach = std::fabs(reference[i].master) + steps * options.learning_rate;
    worst.master =
        std::max(worst.master, std::fabs(static_cast<double>(tile.split_value(i)) - reference[i].master) / reach);
    worst.moment1 =
        std::max(worst.moment1, std::fabs(static_cast<double>(tile.moment1[i]) - reference[i].moment1) / largest);
    worst.moment2 = std::max(
        worst.moment2, std::fabs(static_cast<double>(tile.moment2[i]) - reference[i].moment2) / (largest * largest));
  }
  return worst;
}

// Every float operation errs by at most 2^-24 of its result, and an old error of a moment decays with its beta: first
// moments can be at most 3 / (1 - beta1) roundings away, second ones 4 / (1 - beta2), and are much nearer since the
// signs are random. With coefficients that floats hold exactly nothing else separates the two.
class AgainstReference : public ::testing::TestWithParam<std::tuple<AdamVariant, DType, bool>> {};

constexpr double kRounding = 0x1.0p-24;

TEST_P(AgainstReference, StaysWithinRoundingOverManySteps) {
  const auto [variant, dtype, bias_correction] = GetParam();
  AdamOptions options;
  options.variant = variant;
  options.bias_correction = bias_correction;
  options.learning_rate = 0x1.0p-10;
  options.beta1 = 0.875;
  options.beta2 = 1 - 0x1.0p-10;
  options.weight_decay = 0x1.0p-4;
  for (const auto& name : supported_instruction_sets()) {
    const Forced forced(name);
    for (const std::uint64_t seed : {1u, 2u}) {
      const Worst worst = against_reference(options, dtype, 300, seed);
      EXPECT_LT(worst.master, 16 * kRounding) << name << " seed " << seed;
      EXPECT_LT(worst.moment1, 16 * kRounding) << name << " seed " << seed;
      EXPECT_LT(worst.moment2, 64 * kRounding) << name << " seed " << seed;
    }
  }
}

// With PyTorch's default betas the coefficients are rounded too, as they are there: beta is off by up to 2^-25, which
// the average amplifies by 1 / (1 - beta).
TEST_P(AgainstReference, DefaultCoefficientsAddTheirOwnRounding) {
  const auto [variant, dtype, bias_correction] = GetParam();
  AdamOptions options;
  options.variant = variant;
  options.bias_correction = bias_correction;
  const Worst worst = against_reference(options, dtype, 300, 3);
  EXPECT_LT(worst.master, 64 * kRounding);
  EXPECT_LT(worst.moment1, (16 + 1 / (1 - options.beta1)) * kRounding);
  EXPECT_LT(worst.moment2, (64 + 1 / (1 - options.beta2)) * kRounding);
}

INSTANTIATE_TEST_SUITE_P(All, AgainstReference,
                         ::testing::Combine(::testing::ValuesIn(kVariants), ::testing::ValuesIn(kDTypes),
                                            ::testing::Bool()));

TEST(Reference, FirstStepsAgreeWithPaperByHand) {
  AdamOptions options;
  options.learning_rate = 0.1;
  options.weight_decay = 0.5;
  options.epsilon = 0;
  ReferenceState state{1.0, 0.0, 0.0};
  // With bias correction and no epsilon the first step moves by exactly learning_rate * sign(gradient).
  reference_adam(options, 1, -3.0, state);
  EXPECT_NEAR(state.master, 1.0 * (1 - 0.1 * 0.5) + 0.1, 1e-12);
  EXPECT_NEAR(state.moment1, -0.3, 1e-12);
  EXPECT_NEAR(state.moment2, 0.009, 1e-12);
  // L2: the gradient is -3 + 0.5 * 1.
  state = {1.0, 0.0, 0.0};
  options.variant = AdamVariant::adam;
  reference_adam(options, 1, -3.0, state);
  EXPECT_NEAR(state.master, 1.1, 1e-12);
  EXPECT_NEAR(state.moment1, -0.25, 1e-12);
  EXPECT_NEAR(state.moment2, 0.00625, 1e-12);
  // Without bias correction the first step is sqrt(1 - beta2) / (1 - beta1) times smaller than the corrected one.
  state = {1.0, 0.0, 0.0};
  options.bias_correction = false;
  options.weight_decay = 0;
  reference_adam(options, 1, -3.0, state);
  EXPECT_NEAR(state.master, 1.0 + 0.1 * 0.3 / std::sqrt(0.009), 1e-12);
}

TEST(Coefficients, AreTheFormulaRoundedOnce) {
  AdamOptions options;
  options.learning_rate = 1e-3;
  options.beta1 = 0.9;
  options.beta2 = 0.95;
  options.weight_decay = 0.1;
  for (const std::uint64_t step : {1u, 2u, 3u, 10u, 1000u, 1000000u}) {
    const AdamCoefficients c(options, step, 0.3);
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
  const AdamCoefficients c(options, 3, 1.0);
  EXPECT_EQ(c.step_size, 1e-3f);
  EXPECT_EQ(c.root_bias2, 1.0f);
}

TEST(CoefficientsDeathTest, StepZeroIsABug) { EXPECT_DEATH(AdamCoefficients(AdamOptions{}, 0, 1.0), "counted from 1"); }

// adam and adamw differ exactly in where the decay enters.
TEST(Variants, DecayEntersWhereItShould) {
  AdamOptions options;
  options.weight_decay = 0.5;
  options.learning_rate = 0.1;
  for (const AdamVariant variant : kVariants) {
    options.variant = variant;
    Tile tile(40, DType::fp32);
    for (std::size_t i = 0; i < 40; ++i) tile.set_master(i, 2.0f);  // gradients and moments are zero
    ASSERT_TRUE(adam_update(AdamCoefficients(options, 1, 1.0), tile.split()));
    for (std::size_t i = 0; i < 40; ++i) {
      if (variant == AdamVariant::adamw) {
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
}  // namespace hoist::optim::test
