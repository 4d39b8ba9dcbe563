// SPDX-License-Identifier: Apache-2.0
// Learning-rate schedules, step by step: against DeepSpeed's own values, and against the formulas where they bend.
#include <cmath>
#include <limits>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/update/learning_rate.hpp>

#include "learning_rate_golden.hpp"

namespace hoist::learning_rate_test {
namespace {

constexpr auto kLinear = WarmupShape::linear;

struct Case {
  LearningRateSchedule schedule;
  double group_rate = 1;
};

// The schedules behind kGoldenRates, by name.
const std::map<std::string_view, Case>& cases() {
  using Momentum = OneCycleRate::Momentum;
  static const std::map<std::string_view, Case> all{
      {"warmup_log", {WarmupRate{.min_rate = 1e-5, .max_rate = 2e-3, .steps = 10}, 5e-4}},
      {"warmup_group_rate", {WarmupRate{.steps = 7, .shape = kLinear}, 5e-4}},
      {"warmup_one_step", {WarmupRate{.max_rate = 1e-3, .steps = 1}, 5e-4}},
      {"decay_linear",
       {WarmupDecayRate{.warmup = {.min_rate = 1e-6, .max_rate = 3e-4, .steps = 8, .shape = kLinear},
                        .total_steps = 30},
        1e-3}},
      {"decay_log", {WarmupDecayRate{.warmup = {.max_rate = 1e-3, .steps = 5}, .total_steps = 20}, 1e-2}},
      {"decay_too_short", {WarmupDecayRate{.warmup = {.max_rate = 1e-3, .steps = 6}, .total_steps = 3}, 1e-2}},
      {"cosine",
       {WarmupCosineRate{.total_steps = 25, .warmup_min_ratio = 0.1, .cosine_min_ratio = 0.05, .warmup_steps = 5},
        6e-4}},
      {"cosine_linear", {WarmupCosineRate{.total_steps = 25, .warmup_steps = 6, .shape = kLinear}, 6e-4}},
      {"cosine_too_short", {WarmupCosineRate{.total_steps = 2, .warmup_steps = 6}, 6e-4}},
      {"cycle",
       {OneCycleRate{
           .min_rate = 1e-4, .max_rate = 1e-3, .first_steps = 8, .decay_rate = 0.5, .decay_interval_steps = 3}}},
      {"cycle_uneven",
       {OneCycleRate{.min_rate = 1e-4,
                     .max_rate = 1e-3,
                     .first_steps = 5,
                     .second_steps = 11,
                     .momentum = Momentum{.min_beta1 = 0.85, .max_beta1 = 0.99}}}},
      {"cycle_stairs",
       {OneCycleRate{.min_rate = 1e-4,
                     .max_rate = 1e-3,
                     .first_steps = 9,
                     .second_steps = 6,
                     .first_stairs = 3,
                     .second_stairs = 2,
                     .momentum = std::nullopt}}},
      {"range_continuous", {RangeTestRate{.min_rate = 1e-5, .interval_steps = 4, .growth = 2.5}}},
      {"range_staircase", {RangeTestRate{.min_rate = 1e-5, .interval_steps = 4, .growth = 2.5, .staircase = true}}},
  };
  return all;
}

// Equal but for the last bits, which depend on the order of a few operations.
void expect_same(double ours, double theirs) { EXPECT_NEAR(ours, theirs, 1e-13 * std::max(1e-6, std::abs(theirs))); }

TEST(LearningRate, IsDeepSpeedsAtEveryStep) {
  EXPECT_EQ(test::kGoldenRates.size(), cases().size());
  for (const test::GoldenRates& golden : test::kGoldenRates) {
    const Case& c = cases().at(golden.name);
    ASSERT_NO_THROW(check(c.schedule));
    ASSERT_GE(golden.rates.size(), 40u);
    for (std::size_t n = 0; n < golden.rates.size(); ++n) {
      SCOPED_TRACE(std::string(golden.name) + " step " + std::to_string(n));
      expect_same(learning_rate(c.schedule, n, c.group_rate), golden.rates[n]);
      const auto betas = scheduled_betas(c.schedule, n);
      ASSERT_EQ(betas.has_value(), !golden.beta1.empty());
      if (!betas) continue;
      expect_same(betas->beta1, golden.beta1[n]);
      EXPECT_EQ(betas->beta2, 0.99);
    }
  }
}

// The same from the published formulas, written here as they are there: the index of the schedule is one less than the
// number of applied steps.
TEST(LearningRate, WarmupFollowsItsFormula) {
  const double low = 2e-5, high = 7e-4;
  for (const double length : {2., 5., 1000.}) {
    const auto steps = static_cast<std::uint64_t>(length);
    const LearningRateSchedule logarithmic = WarmupRate{.min_rate = low, .max_rate = high, .steps = steps};
    const LearningRateSchedule linear = WarmupRate{.min_rate = low, .max_rate = high, .steps = steps, .shape = kLinear};
    for (std::uint64_t n = 1; n <= 2 * steps; ++n) {
      const double index = static_cast<double>(n - 1);
      expect_same(learning_rate(logarithmic, n, 1),
                  index < length ? low + (high - low) * std::log(index + 1) / std::log(length) : high);
      expect_same(learning_rate(linear, n, 1), index < length ? low + (high - low) * index / length : high);
    }
  }
}

TEST(LearningRate, CosineFollowsItsFormula) {
  const LearningRateSchedule schedule =
      WarmupCosineRate{.total_steps = 100, .cosine_min_ratio = 0.2, .warmup_steps = 10, .shape = kLinear};
  for (std::uint64_t n = 11; n < 150; ++n) {
    const double progress = std::min(1.0, (static_cast<double>(n) - 10) / 90);
    expect_same(learning_rate(schedule, n, 3e-4), 3e-4 * (0.2 + 0.8 * 0.5 * (1 + std::cos(M_PI * progress))));
  }
}

TEST(LearningRate, ConstantIsTheGroupsOwn) {
  EXPECT_EQ(learning_rate({}, 0, 0.25), 0.25);
  EXPECT_EQ(learning_rate({}, 1'000'000, 0.25), 0.25);
  EXPECT_FALSE(scheduled_betas({}, 3).has_value());
}

TEST(LearningRate, EndsAreReached) {
  const LearningRateSchedule decay = WarmupDecayRate{.warmup = {.max_rate = 1e-3, .steps = 10}, .total_steps = 50};
  EXPECT_EQ(learning_rate(decay, 51, 1), 0.0);
  EXPECT_EQ(learning_rate(decay, 11, 1), 1e-3);
  const LearningRateSchedule cycle = OneCycleRate{.min_rate = 1e-4, .max_rate = 1e-2, .first_steps = 7};
  EXPECT_DOUBLE_EQ(learning_rate(cycle, 7, 1), 1e-2);
  EXPECT_DOUBLE_EQ(learning_rate(cycle, 14, 1), 1e-4);
  EXPECT_DOUBLE_EQ(scheduled_betas(cycle, 7)->beta1, 0.8);
  EXPECT_DOUBLE_EQ(scheduled_betas(cycle, 14)->beta1, 0.9);
}

TEST(LearningRate, IsARateForever) {
  for (const auto& [name, c] : cases()) {
    for (const std::uint64_t n : {std::uint64_t{1} << 53, std::numeric_limits<std::uint64_t>::max()}) {
      const double rate = learning_rate(c.schedule, n, c.group_rate);
      EXPECT_TRUE(std::isfinite(rate) && rate >= 0) << name << " step " << n << ": " << rate;
    }
  }
}

std::string key_of_refusal(const LearningRateSchedule& schedule) {
  try {
    check(schedule);
  } catch (const ConfigError& error) {
    return error.key;
  }
  return "accepted";
}

TEST(LearningRate, ValuesWithoutMeaningAreRefusedByKey) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(key_of_refusal(ConstantRate{}), "accepted");
  EXPECT_EQ(key_of_refusal(WarmupRate{.min_rate = -1}), "scheduler.params.warmup_min_lr");
  EXPECT_EQ(key_of_refusal(WarmupRate{.max_rate = nan}), "scheduler.params.warmup_max_lr");
  EXPECT_EQ(key_of_refusal(WarmupDecayRate{}), "scheduler.params.total_num_steps");
  EXPECT_EQ(key_of_refusal(WarmupCosineRate{}), "scheduler.params.total_num_steps");
  EXPECT_EQ(key_of_refusal(WarmupCosineRate{.total_steps = 9, .cosine_min_ratio = -1}),
            "scheduler.params.cos_min_ratio");
  EXPECT_EQ(key_of_refusal(OneCycleRate{.first_steps = 0}), "scheduler.params.cycle_first_step_size");
  EXPECT_EQ(key_of_refusal(OneCycleRate{.momentum = OneCycleRate::Momentum{.max_beta1 = 1.0}}),
            "scheduler.params.cycle_max_mom");
  EXPECT_EQ(key_of_refusal(RangeTestRate{.interval_steps = 0}), "scheduler.params.lr_range_test_step_size");
  EXPECT_EQ(key_of_refusal(RangeTestRate{.growth = nan}), "scheduler.params.lr_range_test_step_rate");
}

}  // namespace
}  // namespace hoist::learning_rate_test
