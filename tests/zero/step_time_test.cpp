// SPDX-License-Identifier: Apache-2.0
// Predicted times: the arithmetic, and real steps on a drive and with kernels whose speed is known.
#include <string>

#include <gtest/gtest.h>

#include <hoist/bench/timed_steps.hpp>
#include <hoist/tests/support/temp_directory.hpp>
#include <hoist/zero/predict/prediction.hpp>
#include <hoist/zero/predict/step_time.hpp>

namespace hoist::test {
namespace {

Prediction some_prediction() {
  Prediction p;
  p.phases.forward = {.nvme_read = 100, .host_to_device = 200, .wire = 50};
  p.phases.backward = {.nvme_read = 100, .host_to_device = 200, .device_to_host = 200, .wire = 100};
  p.phases.update = {.nvme_read = 1000, .nvme_write = 1200};
  p.step = p.phases.sum();
  p.update_memory_bytes = 2800;
  return p;
}

TEST(StepTime, OfNothingKnownIsNothing) {
  const StepTime time = predict_time(some_prediction(), {});
  EXPECT_EQ(time.least_seconds, 0);
  EXPECT_EQ(time.expected_seconds, 0);
}

TEST(StepTime, TheBusiestResourceIsTheLeast) {
  StepSpeeds speeds{.nvme_read = 10, .nvme_write = 5, .host_to_device = 100, .compute_seconds = 90};
  StepTime time = predict_time(some_prediction(), speeds);
  EXPECT_DOUBLE_EQ(time.busy(Resource::nvme), 1200 / 10.0 + 1200 / 5.0);
  EXPECT_DOUBLE_EQ(time.busy(Resource::host_to_device), 4);
  EXPECT_DOUBLE_EQ(time.least_seconds, 360);
  EXPECT_EQ(time.limit, Resource::nvme);

  speeds.nvme_mixed = 20;  // both directions overlap on this drive
  EXPECT_DOUBLE_EQ(predict_time(some_prediction(), speeds).busy(Resource::nvme), 2400 / 20.0);

  speeds.compute_seconds = 1000;
  time = predict_time(some_prediction(), speeds);
  EXPECT_EQ(time.limit, Resource::compute);
  EXPECT_DOUBLE_EQ(time.least_seconds, 1000);
}

TEST(StepTime, AnUpdateInStepComesAfterBackwardAndOthersHideUnderPasses) {
  Prediction p = some_prediction();
  const StepSpeeds speeds{.nvme_read = 10, .nvme_write = 10, .host_memory = 100, .compute_seconds = 300};
  // 100 of forward, 200 of backward, then (1000 + 1200) / 10 for the update.
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, 100 + 200 + 220);
  p.update_mode = UpdateMode::forward;
  p.trailing_bytes = 1200;
  // Forward now reads for 110 seconds; writing goes on under backward.
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, 110 + 200);
  p.read_ahead_bytes = 600;
  // Backward reads 700 bytes for 70 seconds, which nobody notices beside 200 of kernels, and forward 60 seconds less.
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, 100 + 200);
  p.read_ahead_bytes = 0;
  p.trailing_bytes = 200;
  // Buffers hold a sixth of it; the rest is written in forward, which takes (1100 + 1000) / 10.
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, 210 + 200);
  p.update_mode = UpdateMode::backward;
  // Backward reads and writes for (1100 + 1000) / 10.
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, 100 + 210);
}

TEST(StepTime, WhatTheDeviceUpdatesTakesItsTimeInEveryMode) {
  for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward, UpdateMode::backward}) {
    Prediction p = some_prediction();
    p.update_mode = mode;
    StepSpeeds speeds{.nvme_read = 10, .nvme_write = 10, .host_memory = 100, .compute_seconds = 300};
    const double without = predict_time(p, speeds).expected_seconds;
    p.device_update_bytes = 2800;
    EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, without) << "at a speed that nobody knows";
    speeds.device_memory = 70;
    const StepTime time = predict_time(p, speeds);
    EXPECT_DOUBLE_EQ(time.expected_seconds, without + 40);
    EXPECT_DOUBLE_EQ(time.busy(Resource::device_memory), 40);
    speeds.device_memory = 1;
    EXPECT_EQ(predict_time(p, speeds).limit, Resource::device_memory);
  }
}

TEST(StepTime, AnUpdateIsUnderOneOfSeveralPasses) {
  Prediction p = some_prediction();
  p.passes = 4;
  const StepSpeeds speeds{.nvme_read = 10, .nvme_write = 10, .host_memory = 100, .compute_seconds = 300};
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, 4 * (25 + 50) + 220);
  p.update_mode = UpdateMode::forward;
  p.trailing_bytes = 1200;
  // A pass reads for a quarter of 100 bytes, the first one for the update's 1000 as well: 102.5 seconds instead of 25.
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, 102.5 + 50 + 3 * (25 + 50));
  p.update_mode = UpdateMode::backward;
  // What it leaves is written under four forwards, each 25 bytes of reads and 300 of writes.
  EXPECT_DOUBLE_EQ(predict_time(p, speeds).expected_seconds, 4 * 32.5 + 102.5 + 3 * 50);
}

// What holds at every speed of the machine. bench_step_time judges how close the times come to what is expected.
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
  // The drive and the kernels have their speeds whatever the machine is. Only a clock's grain can beat them.
  EXPECT_GE(real.seconds, 0.98 * real.predicted.least_seconds - real.outside_seconds);
  // step() begins to read while backward's last kernels run, which the expectation leaves out, too.
  if (GetParam().pinned == bench::PinnedMemory::plenty) {
    EXPECT_GE(real.seconds, 0.8 * real.predicted.expected_seconds);
  }
  // A slow machine runs longer, and then its threads run or are ready to. Time in which none is must have its cause.
  EXPECT_GE(real.explained_or_running, kExplainedAtLeast);
  EXPECT_LE(real.explained, kExplainedAtMost) << "something is explained twice";
}

}  // namespace
}  // namespace hoist::test
