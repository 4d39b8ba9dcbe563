// SPDX-License-Identifier: Apache-2.0
// The section "scheduler": which schedule it becomes, with DeepSpeed's defaults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/config/config.hpp>
#include <hoist/config/setting.hpp>

namespace hoist::schedule_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;

Config with_schedule(const std::string& type, const std::string& params, const std::string& before = "") {
  return Config::parse("{" + before + R"("scheduler": {"type": ")" + type + R"(", "params": {)" + params + "}}}",
                       "test.json");
}

template <typename Rate>
Rate schedule(const Config& config) {
  return std::get<Rate>(config.engine.learning_rate_schedule);
}

TEST(Schedule, NoneIsTheDefault) {
  for (const char* text : {"{}", R"({"scheduler": {}})", R"({"scheduler": {"params": {}}})",
                           R"({"scheduler": {"type": "auto"}})", R"({"scheduler": {"type": null}})"}) {
    const Config config = Config::parse(text, "test.json");
    EXPECT_TRUE(std::holds_alternative<ConstantRate>(config.engine.learning_rate_schedule)) << text;
  }
}

TEST(Schedule, WarmupTakesTheOptimizersRateUnlessToldAnother) {
  const auto plain = schedule<WarmupRate>(with_schedule("WarmupLR", ""));
  EXPECT_EQ(plain.min_rate, 0.0);
  EXPECT_FALSE(plain.max_rate.has_value());
  EXPECT_EQ(plain.steps, 1000u);
  EXPECT_EQ(plain.shape, WarmupShape::logarithmic);
  const auto full = schedule<WarmupRate>(with_schedule(
      "warmuplr", R"("warmup_min_lr": 1e-6, "warmup_max_lr": 1e-3, "warmup_num_steps": 1e2, "warmup_type": "linear")"));
  EXPECT_EQ(full.min_rate, 1e-6);
  EXPECT_EQ(full.max_rate, 1e-3);
  EXPECT_EQ(full.steps, 100u);
  EXPECT_EQ(full.shape, WarmupShape::linear);
}

TEST(Schedule, WarmupDecayHasItsOwnDefaultRate) {
  EXPECT_EQ(schedule<WarmupDecayRate>(with_schedule("WarmupDecayLR", R"("total_num_steps": 9)")).warmup.max_rate,
            0.001);
  const auto automatic =
      schedule<WarmupDecayRate>(with_schedule("WarmupDecayLR", R"("total_num_steps": 9, "warmup_max_lr": "auto")"));
  EXPECT_FALSE(automatic.warmup.max_rate.has_value()) << "the optimizer's, as trainers fill it in";
  EXPECT_EQ(automatic.total_steps, 9u);
}

TEST(Schedule, CosineIsAShareOfTheOptimizersRate) {
  const auto cosine = schedule<WarmupCosineRate>(with_schedule(
      "WarmupCosineLR",
      R"("total_num_steps": 500, "warmup_num_steps": 20, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2)"));
  EXPECT_EQ(cosine.total_steps, 500u);
  EXPECT_EQ(cosine.warmup_steps, 20u);
  EXPECT_EQ(cosine.warmup_min_ratio, 0.1);
  EXPECT_EQ(cosine.cosine_min_ratio, 0.2);
}

TEST(Schedule, OneCycleMovesBetasAndSaysSo) {
  const Config config = with_schedule("OneCycle", R"("cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3)",
                                      R"("optimizer": {"params": {"betas": [0.9, 0.95]}}, )");
  const auto cycle = schedule<OneCycleRate>(config);
  ASSERT_TRUE(cycle.momentum.has_value()) << "DeepSpeed's default";
  EXPECT_EQ(cycle.momentum->min_beta1, 0.8);
  EXPECT_EQ(cycle.first_steps, 2000u);
  EXPECT_FALSE(cycle.second_steps.has_value());
  EXPECT_THAT(config.warnings, Contains(HasSubstr("betas is not used")));
  const auto fixed = schedule<OneCycleRate>(
      with_schedule("OneCycle", R"("cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_momentum": false)"));
  EXPECT_FALSE(fixed.momentum.has_value());
}

TEST(Schedule, RangeTest) {
  const auto range = schedule<RangeTestRate>(
      with_schedule("LRRangeTest", R"("lr_range_test_step_size": 7, "lr_range_test_staircase": true)"));
  EXPECT_EQ(range.min_rate, 0.001);
  EXPECT_EQ(range.interval_steps, 7u);
  EXPECT_TRUE(range.staircase);
}

TEST(Schedule, AnEndBeforeTheWarmupsIsSaid) {
  EXPECT_THAT(with_schedule("WarmupDecayLR", R"("total_num_steps": 10)").warnings,
              Contains(HasSubstr("ends before the warm-up of 1000 steps")));
}

// Only what counts is shown as in effect.
TEST(Schedule, SettingsOfOtherSchedulesAreNotInEffect) {
  const Config config = with_schedule("WarmupLR", "");
  for (const ConfigSetting& setting : config.settings()) {
    EXPECT_FALSE(setting.row->path.starts_with("scheduler.params.cycle")) << setting.row->path;
  }
}

}  // namespace
}  // namespace hoist::schedule_test
