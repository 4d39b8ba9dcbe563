// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <hoist/core/units.hpp>

#include "progress.hpp"

namespace hoist::gpt::report_test {
namespace {

using testing::HasSubstr;
using testing::Not;

RunRecord example() {
  RunRecord record;
  record.device = "host device (CPU memory, 2 cores)";
  record.parameters = 1000;
  record.world_size = 1;
  record.steps = {{.step = 1, .loss = 5.5, .seconds = 2.0, .gradient_norm = 3.25},
                  {.step = 2, .loss = 4.5, .seconds = 2.0, .gradient_norm = 1}};
  record.digests = {"0123456789abcdef", "1123456789abcdef", "2123456789abcdef"};
  record.tiers = {.device = {.budget_bytes = 100, .peak_bytes = 90},
                  .pinned = {.budget_bytes = 200, .peak_bytes = 80},
                  .nvme = {.budget_bytes = 300, .peak_bytes = 300}};
  for (std::size_t i = 0; i < kLinkCount; ++i)
    record.links[i] = {.bytes = 1000 * (i + 1), .busy = std::chrono::milliseconds(500)};
  record.waits[static_cast<std::size_t>(WaitCause::nvme)] = std::chrono::seconds(1);
  record.compute = std::chrono::seconds(2);
  record.tokens_per_step = 512;
  record.formula = StepBytes{.nvme_read = 500, .nvme_write = 1000, .host_to_device = 1500, .device_to_host = 2000};
  record.committed_step = 2;
  return record;
}

TEST(Report, HasExactlyTheFieldsOfTheFormat) {
  const auto json = nlohmann::json::parse(report_json(example()));
  const auto expected = nlohmann::json::parse(R"json({
    "device": "host device (CPU memory, 2 cores)", "parameters": 1000, "world_size": 1,
    "steps": [{"step": 1, "loss": 5.5, "seconds": 2.0, "gradient_norm": 3.25}, {"step": 2, "loss": 4.5, "seconds": 2.0, "gradient_norm": 1.0}],
    "digest": {"master": "0123456789abcdef", "moment1": "1123456789abcdef", "moment2": "2123456789abcdef"},
    "tiers": {"device": {"budget_bytes": 100, "peak_bytes": 90}, "pinned": {"budget_bytes": 200, "peak_bytes": 80},
              "nvme": {"budget_bytes": 300, "peak_bytes": 300}},
    "links": {"nvme_read": {"bytes": 1000, "busy_seconds": 0.5}, "nvme_write": {"bytes": 2000, "busy_seconds": 0.5},
              "host_to_device": {"bytes": 3000, "busy_seconds": 0.5}, "device_to_host": {"bytes": 4000, "busy_seconds": 0.5},
              "wire": {"bytes": 5000, "busy_seconds": 0.5}},
    "wait_seconds": {"nvme": 1.0, "host_to_device": 0.0, "device_to_host": 0.0, "optimizer": 0.0, "comm": 0.0},
    "compute_seconds": 2.0, "offloaded_bytes": 0, "tokens_per_step": 512,
    "communication_to_computation": 0.0, "committed_step": 2})json");
  EXPECT_EQ(json, expected);
}

TEST(Report, WhatIsUnknownIsNull) {
  RunRecord record = example();
  record.committed_step.reset();
  record.steps[0].loss = NAN;
  const auto json = nlohmann::json::parse(report_json(record));
  EXPECT_TRUE(json["committed_step"].is_null());
  EXPECT_TRUE(json["steps"][0]["loss"].is_null());
}

TEST(ClosingTable, ComparesWithTheFormulaAndAccountsForTime) {
  const std::string table = closing_table(example());
  EXPECT_THAT(table, HasSubstr("2 steps in 4.0 s, loss 5.500 -> 4.500"));
  EXPECT_THAT(table, HasSubstr("host device (CPU memory, 2 cores)"));
  EXPECT_THAT(table, HasSubstr("1.0000"));  // NVMe read: 1000 bytes in 2 steps of 500
  EXPECT_THAT(table, HasSubstr("50.0 %"));  // kernels: 2 of 4 seconds
  EXPECT_THAT(table, HasSubstr("25.0 %"));  // NVMe
  EXPECT_THAT(table, HasSubstr("90.0 %"));  // device peak
  EXPECT_THAT(table, Not(HasSubstr("between ranks")));
  RunRecord four = example();
  four.world_size = 4;
  EXPECT_THAT(closing_table(four), HasSubstr("between ranks"));
}

TEST(Report, CommunicationToComputationIsWaitingForRanksOverKernels) {
  RunRecord record = example();
  record.world_size = 4;
  record.waits[static_cast<std::size_t>(WaitCause::comm)] = std::chrono::milliseconds(500);
  EXPECT_DOUBLE_EQ(communication_to_computation(record), 0.25);
  EXPECT_THAT(closing_table(record), HasSubstr("communication to computation: 0.250"));
  record.compute = Nanoseconds(0);
  EXPECT_EQ(communication_to_computation(record), 0);
  EXPECT_THAT(closing_table(example()), Not(HasSubstr("communication to computation")));
}

TEST(ClosingTable, SaysWhatWasSkipped) {
  EXPECT_THAT(closing_table(example()), Not(HasSubstr("skipped")));
  RunRecord record = example();
  for (StepRecord& step : record.steps) step.loss_scale = 32768;
  record.steps.front().applied = false;
  EXPECT_THAT(closing_table(record), HasSubstr("1 of them skipped"));
  EXPECT_THAT(closing_table(record), HasSubstr("loss scale 32768 at the end"));
  const auto json = nlohmann::json::parse(report_json(record));
  EXPECT_EQ(json["steps"][0]["loss_scale"], 32768);
  EXPECT_EQ(json["steps"][0]["applied"], false);
  EXPECT_EQ(json["steps"][1]["applied"], true);
}

TEST(ClosingTable, SurvivesARunWithoutSteps) {
  RunRecord record = example();
  record.steps.clear();
  EXPECT_THAT(closing_table(record), HasSubstr("1000 parameters"));
}

// --- progress ------------------------------------------------------------------------------------------------------

std::string shown(const ProgressOptions& options, int steps, Nanoseconds apart) {
  std::FILE* file = std::tmpfile();
  ProgressOptions with_file = options;
  with_file.out = file;
  Progress progress(with_file);
  const Tiers tiers{.device = {.budget_bytes = 2 * kMiB, .held_bytes = kMiB},
                    .pinned = {.budget_bytes = 4 * kMiB, .held_bytes = 3 * kMiB}};
  TimePoint now{};
  for (int step = 1; step <= steps; ++step) {
    now += apart;
    progress.show({.step = options.first_step + static_cast<std::uint64_t>(step), .loss = 2.5, .seconds = 0.5}, tiers,
                  now);
  }
  progress.finish();
  std::string text(static_cast<std::size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), file), text.size());
  std::fclose(file);
  return text;
}

TEST(Progress, ALineSaysWhatMatters) {
  const std::string text = shown({.last_step = 241, .tokens_per_step = 512}, 1, std::chrono::seconds(1));
  EXPECT_EQ(text,
            "step 1/241  loss 2.500  1024 tokens/s  device 1.0 MiB/2.0 MiB  pinned 3.0 MiB/4.0 MiB  2m00s left\n");
}

TEST(Progress, OnATerminalOneLineIsRewrittenOnceASecond) {
  const std::string text =
      shown({.last_step = 100, .tokens_per_step = 1, .rewrite = true}, 100, std::chrono::milliseconds(100));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\r'), 11);  // 10 s, and the last
  EXPECT_THAT(text, HasSubstr("\rstep 100/100"));
}

TEST(Progress, ElsewhereALineEveryFewSecondsAndAtBothEnds) {
  const std::string text =
      shown({.first_step = 5, .last_step = 105, .tokens_per_step = 1}, 100, std::chrono::milliseconds(500));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 11);  // 50 s, a line every 5, and the last
  EXPECT_THAT(text, HasSubstr("step 6/105"));
  EXPECT_THAT(text, HasSubstr("step 105/105"));
}

}  // namespace
}  // namespace hoist::gpt::report_test
