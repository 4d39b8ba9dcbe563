// SPDX-License-Identifier: Apache-2.0
// The loss scale follows DeepSpeed's rule step by step, and goes through a commit.
#include <array>
#include <cstring>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>

#include "loss_scale_golden.hpp"

namespace hoist::test::loss_scale_test {
namespace {

class GoldenScaleTest : public testing::TestWithParam<GoldenScales> {};
INSTANTIATE_TEST_SUITE_P(DeepSpeed, GoldenScaleTest, testing::ValuesIn(kGoldenScales),
                         [](const auto& golden) { return std::string(golden.param.name); });

TEST_P(GoldenScaleTest, EveryStepIsDeepSpeeds) {
  const GoldenScales& golden = GetParam();
  ASSERT_NO_THROW(check(golden.options));
  LossScaler scaler(golden.options);
  EXPECT_EQ(scaler.scale(), golden.options.scale);
  for (std::size_t step = 0; step < golden.scales.size(); ++step) {
    const bool overflow = golden.steps[step] == 'X';
    if (golden.scales[step] < 0) {
      const LossScaler::State before = scaler.state();
      EXPECT_THROW(scaler.update(overflow), Error) << "step " << step;
      EXPECT_EQ(scaler.state(), before);
      continue;
    }
    scaler.update(overflow);
    ASSERT_EQ(scaler.scale(), golden.scales[step]) << "step " << step;
    ASSERT_EQ(scaler.state().hysteresis_left, golden.hysteresis_left[step]) << "step " << step;
  }
}

// At every step of every case: what a commit keeps goes on as if nothing had happened.
TEST_P(GoldenScaleTest, GoesOnFromACommit) {
  const GoldenScales& golden = GetParam();
  for (std::size_t stop = 0; stop < golden.scales.size(); ++stop) {
    LossScaler before(golden.options);
    for (std::size_t step = 0; step < stop; ++step) before.update(golden.steps[step] == 'X');
    const auto kept = detail::decode(detail::encode("", {.scaler = before.state()}));
    ASSERT_TRUE(kept && kept->scaler);
    LossScaler after(golden.options);
    after.restore(*kept->scaler);
    ASSERT_EQ(after.state(), before.state());
    for (std::size_t step = stop; step < golden.scales.size() && golden.scales[step] >= 0; ++step) {
      after.update(golden.steps[step] == 'X');
      ASSERT_EQ(after.scale(), golden.scales[step]) << "stopped before step " << stop << ", step " << step;
    }
  }
}

TEST(LossScale, CasesReachEveryBranch) {
  std::size_t errors = 0, raised = 0, lowered = 0, counted = 0;
  for (const GoldenScales& golden : kGoldenScales) {
    double scale = golden.options.scale;
    for (std::size_t step = 0; step < golden.scales.size(); ++step) {
      const double next = golden.scales[step];
      errors += next < 0 ? 1u : 0u;
      raised += next > scale ? 1u : 0u;
      lowered += next >= 0 && next < scale ? 1u : 0u;
      counted += golden.steps[step] == 'X' && next == scale ? 1u : 0u;
      scale = next;
    }
  }
  EXPECT_GE(errors, 3u);
  EXPECT_GE(raised, 50u);
  EXPECT_GE(lowered, 50u);
  EXPECT_GE(counted, 20u);
}

TEST(LossScale, FixedNeverMoves) {
  LossScaler scaler({.scale = 128});
  for (int step = 0; step < 5000; ++step) scaler.update(step % 3 == 0);
  EXPECT_EQ(scaler.scale(), 128);
  scaler.restore({.scale = 4, .steps_without_overflow = 3, .hysteresis_left = 1});
  EXPECT_EQ(scaler.scale(), 128) << "the configuration's counts";
  EXPECT_EQ(LossScaler({.scale = 0.1}).scale(), static_cast<double>(0.1f)) << "as a loss is multiplied by it";
}

TEST(LossScale, StopsGrowing) {
  LossScaler scaler({.dynamic = true, .scale = 0x1.0p62, .window = 1});
  for (int step = 0; step < 100; ++step) scaler.update(false);
  EXPECT_EQ(scaler.scale(), kLossScaleMax);
}

TEST(LossScale, ALargerMinimumCountsFromTheRestoreOn) {
  LossScaler scaler({.dynamic = true, .scale = 65536, .hysteresis = 1, .scale_min = 512});
  scaler.restore({.scale = 64, .steps_without_overflow = 3, .hysteresis_left = 1});
  EXPECT_EQ(scaler.scale(), 512);
}

TEST(LossScale, ASmallerHysteresisCountsFromTheRestoreOn) {
  LossScaler scaler({.dynamic = true, .scale = 65536, .hysteresis = 2});
  scaler.restore({.scale = 1024, .hysteresis_left = 8});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1024);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 512) << "after two overflows, not eight";
}

TEST(LossScale, OptionsWithoutMeaningAreRefused) {
  const auto refused = [](const LossScaleOptions& options, const char* key) {
    try {
      check(options);
      ADD_FAILURE() << key << " was accepted";
    } catch (const ConfigError& error) {
      EXPECT_EQ(error.key, key);
    }
  };
  refused({.scale = 0}, "fp16.loss_scale");
  refused({.scale = -1}, "fp16.loss_scale");
  refused({.scale = 0x1.0p65}, "fp16.loss_scale");
  refused({.dynamic = true, .scale = 8, .window = 0}, "fp16.loss_scale_window");
  refused({.dynamic = true, .scale = 8, .hysteresis = 0}, "fp16.hysteresis");
  refused({.dynamic = true, .scale = 8, .scale_min = 0}, "fp16.min_loss_scale");
  refused({.dynamic = true, .scale = 8, .scale_min = 16}, "fp16.initial_scale_power");
  EXPECT_NO_THROW(check({.dynamic = true, .scale = 8, .scale_min = 8}));
  EXPECT_NO_THROW(check({}));
}

// --- in a commit -----------------------------------------------------------------------------------------------------

TEST(CommitState, KeepsScalerAndProgramBytes) {
  const std::vector<std::byte> program{std::byte{1}, std::byte{2}, std::byte{3}};
  const LossScaler::State scaler{.scale = 1024, .steps_without_overflow = 77, .hysteresis_left = 2};
  const auto bytes = detail::encode("a name", {.scaler = scaler, .program = program});
  EXPECT_EQ(bytes.size(), 256 + program.size());
  EXPECT_STREQ(reinterpret_cast<const char*>(bytes.data()), "a name");
  const auto state = detail::decode(bytes);
  ASSERT_TRUE(state);
  EXPECT_EQ(state->scaler, scaler);
  EXPECT_EQ(state->program, program);
  EXPECT_FALSE(detail::decode(std::span(bytes).first(255)));
}

// The bytes themselves, so that a later version cannot move them unnoticed.
TEST(CommitState, ScalerLiesWhereTheFormatSays) {
  const auto bytes = detail::encode(
      "", {.scaler = LossScaler::State{.scale = 2, .steps_without_overflow = 0x0102, .hysteresis_left = 3}});
  std::array<unsigned char, 64> expected{'h', 'o', 'i', 's', 't', 'L', 'S', '1', 0, 0, 0, 0, 0, 0, 0, 0x40, 2, 1};
  expected[24] = 3;
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(static_cast<unsigned char>(bytes[192 + i]), expected[i]) << "byte " << 192 + i;
}

// Versions without loss scaling wrote a name and zeros, or a very long name.
TEST(CommitState, OlderCommitsHaveNoScaler) {
  std::vector<std::byte> old(256 + 5);
  old[256] = std::byte{9};
  const auto state = detail::decode(old);
  ASSERT_TRUE(state);
  EXPECT_FALSE(state->scaler);
  EXPECT_EQ(state->program.size(), 5u);
  EXPECT_EQ(state->program[0], std::byte{9});
  std::fill(old.begin(), old.begin() + 255, std::byte{'n'});
  EXPECT_FALSE(detail::decode(old)->scaler);
  EXPECT_EQ(detail::encode("step", {.program = {}}), [] {
    std::vector<std::byte> plain(256);
    std::memcpy(plain.data(), "step", 4);
    return plain;
  }()) << "without a scaler a commit is as it always was";
}

TEST(CommitState, DamagedScalersAreNotBelieved) {
  for (const double scale : {0.0, -1.0, 0x1.0p65, std::numeric_limits<double>::quiet_NaN()}) {
    const auto bytes = detail::encode("", {.scaler = LossScaler::State{.scale = scale}});
    EXPECT_FALSE(detail::decode(bytes)->scaler) << scale;
  }
}

}  // namespace
}  // namespace hoist::test::loss_scale_test
