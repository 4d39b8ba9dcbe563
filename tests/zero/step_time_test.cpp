// SPDX-License-Identifier: Apache-2.0
// Predicted times: the arithmetic, and real steps on a drive and with kernels whose speed is known.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include <gtest/gtest.h>

#include <hoist/bench/timed_steps.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/temp_directory.hpp>
#include <hoist/zero/predict/prediction.hpp>
#include <hoist/zero/predict/step_time.hpp>

namespace hoist::test::step_time_test {
namespace {

// Two equal units; each has the bytes that are given, and its forward a quarter of the computation.
Prediction of_two(const UnitStep& bytes) {
  Prediction p;
  for (std::uint32_t u = 0; u < 2; ++u) {
    p.units.push_back(
        {.bytes = bytes, .parameters = 1, .update_memory_bytes = 1400, .shard_elements = 1, .trainable = true});
    for (const StepBytes& part : {bytes.forward_fetch, bytes.backward_fetch, bytes.gradient, bytes.update})
      p.step += part;
  }
  p.update_memory_bytes = 2800;
  p.update_buffers = 2;  // as many as there are pieces
  p.update_buffer_parameters = 1;
  p.update_buffer_bytes = 500;
  p.gradient_buffers = 2;
  p.gradient_buffer_bytes = 100;
  // Both are fetched at the beginning, and again for their backward.
  p.fetches = {{0, 0, 0, 0, 100}, {1, 0, 1, 2, 100}, {0, 1, 3, 3, 100}};
  p.gather_bytes = 300;
  return p;
}

const UnitStep kOffloaded{.forward_fetch = {.host_to_device = 100},
                          .backward_fetch = {.host_to_device = 100},
                          .gradient = {.device_to_host = 100},
                          .update = {.nvme_read = 500, .nvme_write = 600}};

TEST(StepTime, OfNothingKnownIsNothing) {
  const StepTime time = predict_time(of_two(kOffloaded), {});
  EXPECT_EQ(time.least_seconds, 0);
  EXPECT_EQ(time.expected_seconds, 0);
  EXPECT_EQ(time.gap(), 1);
}

TEST(StepTime, SpeedsThatAreNoNumbersAreRefused) {
  for (const double wrong : {-1.0, std::nan(""), HUGE_VAL}) {
    EXPECT_THROW(predict_time(of_two(kOffloaded), {.nvme_read = wrong}), UsageError);
    EXPECT_THROW(predict_time(of_two(kOffloaded), {.compute_seconds = wrong}), UsageError);
    EXPECT_THROW(predict_time(of_two(kOffloaded), {.compute_seconds = 1}, {.noise = wrong}), UsageError);
    EXPECT_THROW(overrun_of_plan(of_two(kOffloaded), {.compute_seconds = wrong}), UsageError);
  }
}

TEST(StepTime, TheBusiestResourceBounds) {
  StepSpeeds speeds{.nvme_read = 10, .nvme_write = 5, .host_to_device = 100, .compute_seconds = 90};
  StepTime time = predict_time(of_two(kOffloaded), speeds);
  EXPECT_DOUBLE_EQ(time.busy(Resource::nvme), 1000 / 10.0 + 1200 / 5.0);
  EXPECT_DOUBLE_EQ(time.busy(Resource::host_to_device), 4);
  EXPECT_DOUBLE_EQ(time.least_seconds, 340);
  EXPECT_EQ(time.limit, Resource::nvme);
  EXPECT_GE(time.simulated_seconds, 340);

  speeds.nvme_mixed = 20;  // both directions overlap on this drive
  EXPECT_DOUBLE_EQ(predict_time(of_two(kOffloaded), speeds).busy(Resource::nvme), 2000 / 20.0 + 200 / 5.0);

  speeds.compute_seconds = 1000;
  time = predict_time(of_two(kOffloaded), speeds);
  EXPECT_EQ(time.limit, Resource::compute);
  EXPECT_GE(time.least_seconds, 1000);
}

// By hand, with an update that takes 14 seconds a unit, copies of 1 second and 10, 10, 30 and 30 seconds of kernels.
TEST(StepTime, TheCriticalPathGoesFromNormToNorm) {
  Prediction p = of_two(kOffloaded);
  p.updates_under_forward = true;
  p.awaits_norm = true;
  const StepSpeeds speeds{
      .host_to_device = 100, .device_to_host = 100, .host_memory = 100, .compute_seconds = 80, .forward_share = 0.25};
  // The first unit is updated and goes up, kernels run under everything else, and the last gradient comes down.
  StepTime time = predict_time(p, speeds);
  EXPECT_DOUBLE_EQ(time.critical_path_seconds, 14 + 1 + 10 + std::max(10.0, 28 - 25.0 + 10) + 60 + 1);
  EXPECT_DOUBLE_EQ(time.least_seconds, time.critical_path_seconds);
  EXPECT_NEAR(time.expected_seconds, 14 + 1 + 10 + 4 + 10 + 60 + 1, 1e-9) << "the second unit goes up after 29";
  EXPECT_NEAR(time.waited(Resource::host_memory), 14 + 3, 1e-9);
  EXPECT_NEAR(time.waited(Resource::host_to_device) + time.waited(Resource::device_to_host), 1 + 1 + 1, 1e-9);
  // Without a norm, the update of a unit is under the passes of the other.
  p.awaits_norm = false;
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).critical_path_seconds, 80 + 1 + 14 + 1);
}

TEST(StepTime, AnUpdateInStepComesAfterBackwardAndOthersHideUnderPasses) {
  Prediction p = of_two(kOffloaded);
  const StepSpeeds speeds{.nvme_read = 10, .nvme_write = 10, .host_memory = 1000, .compute_seconds = 300};
  const double in_step = predict_time(p, speeds).expected_seconds;
  EXPECT_NEAR(in_step, 300 + 120, 5) << "all is written in step(), and read before, under backward";
  p.updates_under_forward = true;
  EXPECT_NEAR(predict_time(p, speeds).expected_seconds, 300, 5) << "read under backward, written under forward";
  p.updates_under_forward = false;
  p.updates_under_backward = true;
  EXPECT_LT(predict_time(p, speeds).expected_seconds, in_step);
}

TEST(StepTime, TheFlushesOfACommitTakeTimeUnlessKernelsRunMeanwhile) {
  for (const bool forward : {true, false}) {
    Prediction p = of_two(kOffloaded);
    p.updates_under_forward = forward;
    p.updates_under_backward = !forward;
    const auto seconds = [&p](double commits, double flush, double compute) {
      p.commits = commits;
      const StepSpeeds speeds{.nvme_read = 10, .nvme_write = 10, .nvme_flush = flush, .compute_seconds = compute};
      return predict_time(p, speeds).expected_seconds;
    };
    const double without = seconds(1, 0, 30);
    EXPECT_DOUBLE_EQ(seconds(0, 5, 30), without) << "nothing is committed";
    if (!forward) {
      EXPECT_GT(seconds(1, 5, 30), without);  // the other mode reads the next step's records meanwhile
    }
    EXPECT_LE(seconds(1, 5, 30), without + 10 + 1e-9);
    EXPECT_LE(seconds(0.5, 5, 30), seconds(1, 5, 30)) << "every second step is committed";
    EXPECT_DOUBLE_EQ(seconds(1, 5, 3000), seconds(1, 0, 3000));
  }
}

TEST(StepTime, WhatTheDeviceUpdatesTakesItsTimeInEveryMode) {
  for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward, UpdateMode::backward}) {
    UnitStep bytes = kOffloaded;
    bytes.update = {};
    Prediction p = of_two(bytes);
    p.updates_under_forward = mode == UpdateMode::forward;
    p.updates_under_backward = mode == UpdateMode::backward;
    StepSpeeds speeds{.compute_seconds = 300};
    const double without = predict_time(p, speeds).expected_seconds;
    for (UnitWork& unit : p.units) unit.device_update_bytes = 1400;
    p.device_update_bytes = 2800;
    speeds.device_memory = 70;
    const StepTime time = predict_time(p, speeds);
    EXPECT_NEAR(time.expected_seconds, without + 40, 1e-9);
    EXPECT_DOUBLE_EQ(time.busy(Resource::device_memory), 40);
    speeds.device_memory = 1;
    EXPECT_EQ(predict_time(p, speeds).limit, Resource::device_memory);
  }
}

TEST(StepTime, StateInMemoryIsWrittenBeforeItChangesAgain) {
  UnitStep bytes = kOffloaded;
  bytes.update = {.nvme_write = 600};
  bytes.resident_write_bytes = 600;
  Prediction p = of_two(bytes);
  p.updates_under_forward = true;
  const StepTime time = predict_time(p, {.nvme_write = 10, .compute_seconds = 10});
  EXPECT_DOUBLE_EQ(time.least_seconds, 120);
  EXPECT_GE(time.simulated_seconds, 120 - 1e-9) << "writes do not pile up";
}

// Nothing is updated before the last commit is durable, not even a unit that the commit did not write: each step takes
// the updates of both units, and then the write of the second.
TEST(StepTime, UpdatesWaitForTheWholeLastCommit) {
  for (const bool backward : {false, true}) {
    UnitStep bytes = kOffloaded;
    bytes.update = {};
    Prediction p = of_two(bytes);
    p.updates_under_forward = !backward;
    p.updates_under_backward = backward;
    UnitWork& second = p.units[backward ? 0 : 1];
    second.bytes.update.nvme_write = second.bytes.resident_write_bytes = p.step.nvme_write = 1200;
    const StepTime time = predict_time(p, {.nvme_write = 10, .host_memory = 100, .compute_seconds = 0.8});
    EXPECT_NEAR(time.expected_seconds, 14 + 14 + 120, 1) << (backward ? "backward" : "forward");
  }
}

TEST(StepTime, DisturbancesMakeStepsLonger) {
  Prediction p = of_two(kOffloaded);
  p.updates_under_forward = true;
  const StepSpeeds speeds{.nvme_read = 10, .nvme_write = 10, .host_memory = 1000, .compute_seconds = 300};
  const double planned = predict_time(p, speeds).expected_seconds;
  EXPECT_NEAR(predict_time(p, speeds, {.slow_rank = 2}).expected_seconds, 2 * planned, 0.1 * planned);
  EXPECT_NEAR(predict_time(p, speeds, {.slow_drive = 3}).expected_seconds, 3 * 220, 0.1) << "the drives limit it";
  const double noisy = predict_time(p, speeds, {.noise = 0.1}).expected_seconds;
  EXPECT_GT(noisy, planned);
  EXPECT_LT(noisy, 1.1 * planned + 1);
}

TEST(StepTime, APlanHoldsNoMoreThanThereIs) {
  Prediction p = of_two(kOffloaded);
  p.updates_under_forward = true;
  const StepSpeeds speeds{
      .nvme_read = 10, .nvme_write = 10, .host_to_device = 1, .host_memory = 1000, .compute_seconds = 300};
  EXPECT_EQ(overrun_of_plan(p, speeds), "");
  p.gather_bytes = 100;  // both units are brought before the first computes
  EXPECT_NE(overrun_of_plan(p, speeds).find("gather memory hold 200 bytes, and have 100"), std::string::npos)
      << overrun_of_plan(p, speeds);
}

// Plans of real memory plans, on real machines: none ever exceeds a budget, and none beats its lower bound.
TEST(StepTime, NoPlanExceedsABudgetOrBeatsItsBound) {
  RuntimeOptions runtime{
      .device = platform::DeviceKind::host, .device_memory_bytes = 4 * kGiB, .pinned_memory_bytes = 8 * kGiB};
  const Model model = uniform_model(1'000'000'000, 24);
  const StepSpeeds speeds{.nvme_read = 6e9,
                          .nvme_write = 3e9,
                          .host_to_device = 25e9,
                          .device_to_host = 25e9,
                          .wire = 10e9,
                          .host_memory = 40e9,
                          .device_memory = 1e12,
                          .compute_seconds = 3};
  constexpr std::array kAll{Placement::device, Placement::pinned, Placement::nvme};
  for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward, UpdateMode::backward}) {
    for (const Placement parameters : kAll) {
      for (const Placement optimizer : {Placement::pinned, Placement::nvme}) {
        for (const unsigned micro_batches : {1u, 3u}) {
          EngineOptions engine{.parameters = parameters, .optimizer = optimizer, .store_directory = "/nowhere"};
          engine.update_mode = mode;
          engine.micro_batches_max = micro_batches;
          if (mode == UpdateMode::backward) engine.gradient_clipping = 0;
          const Prediction p = predict(runtime, engine, model, 2);
          EXPECT_EQ(overrun_of_plan(p, speeds), "");
          const StepTime time = predict_time(p, speeds);
          EXPECT_GE(time.simulated_seconds, (1 - 1e-6) * time.least_seconds)
              << static_cast<int>(mode) << static_cast<int>(parameters) << static_cast<int>(optimizer) << micro_batches;
        }
      }
    }
  }
}

// This test checks only what holds at every speed of the machine. bench_step_time measures how close real times are to
// the expected ones.
constexpr int kWindows = 3;
constexpr double kExplainedAtLeast = 0.99;
constexpr double kExplainedAtMost = 1.02;

class StepTimeOf : public testing::TestWithParam<bench::TimedCell> {};
INSTANTIATE_TEST_SUITE_P(Cells, StepTimeOf, testing::ValuesIn(bench::kTimedCells),
                         [](const auto& cell) { return std::string(cell.param.name); });

TEST_P(StepTimeOf, NoStepBeatsThePredictionAndNoTimeIsLost) {
  const TempDirectory directory;
  const bench::TimedSteps real = bench::time_steps(GetParam(), directory.path(), kWindows);
  RecordProperty("seconds", std::to_string(real.seconds));
  RecordProperty("expected", std::to_string(real.predicted.expected_seconds));
  RecordProperty("explained", std::to_string(real.explained));
  // The speeds of the drive and the kernels are fixed, so a step can be faster only by the resolution of the clock.
  EXPECT_GE(real.seconds, 0.98 * real.predicted.least_seconds - real.outside_seconds);
  // step() begins to read while backward's last kernels run, which the expectation leaves out, too.
  if (GetParam().pinned == bench::PinnedMemory::plenty) {
    EXPECT_GE(real.seconds, 0.8 * real.predicted.expected_seconds);
  }
  // On a slow machine a step takes longer because threads run or are ready to run. All other time must have a known
  // cause.
  EXPECT_GE(real.explained_or_running, kExplainedAtLeast);
  EXPECT_LE(real.explained, kExplainedAtMost) << "something is explained twice";
}

}  // namespace
}  // namespace hoist::test::step_time_test
