// SPDX-License-Identifier: Apache-2.0
// What `hoist plan` says of a model before anything is started.
#include <regex>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "program.hpp"

namespace hoist {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Plan : public test::ProgramTest {
 protected:
  // The row of the report with this placement.
  nlohmann::json row(const nlohmann::json& report, const char* parameters, const char* optimizer) {
    for (const auto& row : report["rows"])
      if (row["parameters"] == parameters && row["optimizer"] == optimizer) return row;
    ADD_FAILURE() << "no row " << parameters << " / " << optimizer;
    return {};
  }
};

constexpr const char* kSpeeds =
    " --nvme-read 6 --nvme-write 3 --host-to-device 25 --device-to-host 25 --host-memory 200 --device-bandwidth 1000"
    " --compute-seconds 5";

TEST_F(Plan, FindsTheFastestPlaceThatFits) {
  const auto result =
      run("plan --parameters 7e9 --device-memory 24GiB --pinned-memory 120GiB --json plan.json" + std::string(kSpeeds));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto report = json_of("plan.json");
  ASSERT_EQ(report["rows"].size(), 9u);
  EXPECT_EQ(report["parameters"], 7'000'000'000);
  // 16 bytes a parameter are 104 GiB: not on the device, and weights and state fit the pinned budget.
  EXPECT_EQ(row(report, "device", "device")["fits"], false);
  EXPECT_EQ(row(report, "pinned", "pinned")["fits"], true);
  const auto best = report["rows"][report["best"].get<std::size_t>()];
  EXPECT_EQ(best["optimizer"], "pinned");
  EXPECT_EQ(best["fits"], true);
  EXPECT_EQ(best["limit"], "compute");
  for (const auto& other : report["rows"])
    if (other["fits"] == true) {
      EXPECT_GE(other["seconds"]["expected"], best["seconds"]["expected"]);
    }
  EXPECT_THAT(result.output, AllOf(HasSubstr("(fastest)"), HasSubstr("too little"), HasSubstr("compute busiest")));
  EXPECT_THAT(result.output, Not(HasSubstr("no speed was given")));
}

TEST_F(Plan, TheReportHasTheFastestPlaceInAProgramsWords) {
  ASSERT_EQ(
      run("plan --parameters 7b --device-memory 24GiB --pinned-memory 120GiB --json plan.json" + std::string(kSpeeds))
          .exit_code,
      0);
  const auto report = json_of("plan.json");
  const auto best = report["rows"][report["best"].get<std::size_t>()];
  EXPECT_EQ(report["parameters"], 7'000'000'000);
  EXPECT_EQ(report["per_rank"]["pinned_bytes"], best["pinned"]["bytes"]);
  EXPECT_EQ(report["step_seconds"], best["seconds"]["expected"]);
  EXPECT_EQ(report["lower_bound_seconds"], best["seconds"]["least"]);
  EXPECT_LE(report["lower_bound_seconds"], report["step_seconds"]);
  EXPECT_EQ(report["limiting_link"], best["limit"]);
  ASSERT_EQ(report["links"].size(), 4u);
  EXPECT_EQ(report["links"][1]["name"], "host_to_device");
  EXPECT_EQ(report["links"][1]["bytes"], best["step"]["host_to_device"]);
  EXPECT_GT(report["links"][1]["busy_share"], 0.0);

  ASSERT_EQ(run("plan --parameters 1e15 --device-memory 1GiB --pinned-memory 1GiB --json nothing.json").exit_code, 2)
      << "more than any model has";
  ASSERT_EQ(run("plan --parameters 1e12 --device-memory 1GiB --pinned-memory 1GiB --json nothing.json").exit_code, 0);
  EXPECT_EQ(json_of("nothing.json")["per_rank"], nullptr);
  EXPECT_EQ(json_of("nothing.json")["links"].size(), 0u);
}

// The figures of ZeRO's papers, and hoist's beside them.
TEST_F(Plan, TabulatesTheStages) {
  ASSERT_EQ(run("plan --parameters 7e9 --world 8 --json plan.json").exit_code, 0);
  const auto report = json_of("plan.json");
  const auto gigabytes = [&](const nlohmann::json& table, int stage, const char* offload, const char* scheme) {
    for (const auto& row : table)
      if (row["stage"] == stage && row["offload"] == offload && row["scheme"] == scheme)
        return row["bytes_per_gpu"].get<double>() / 1e9;
    ADD_FAILURE() << "no row of stage " << stage << ", " << offload << ", " << scheme;
    return 0.0;
  };
  const double expected[] = {112, 63, 38.5, 14};
  for (int stage = 0; stage <= 3; ++stage) {
    EXPECT_NEAR(gigabytes(report["zero_table"], stage, "none", "textbook"), expected[stage], 1e-6);
    // hoist divides gradients and states at every stage, and weights have 16 bits.
    EXPECT_LT(gigabytes(report["zero_table"], stage, "none", "hoist"), expected[std::max(stage, 2)] + 2);
    EXPECT_LT(gigabytes(report["zero_table"], stage, "optimizer", "hoist"), 17) << "14 and a unit's gradients";
  }
  EXPECT_LT(gigabytes(report["zero_table"], 3, "all", "hoist"), 2);
  ASSERT_EQ(run("plan --parameters 70e9 --world 8 --json large.json").exit_code, 0);
  EXPECT_NEAR(gigabytes(json_of("large.json")["zero_table"], 3, "optimizer", "textbook"), 17.5, 1e-6);
}

TEST_F(Plan, NamesTheLinkThatLimitsAndHowLongDrivesLast) {
  const auto result =
      run("plan --parameters 7e9 --device-memory 8GiB --pinned-memory 24GiB --endurance 1.4PB "
          "--json plan.json" +
          std::string(kSpeeds));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto report = json_of("plan.json");
  const auto best = report["rows"][report["best"].get<std::size_t>()];
  EXPECT_EQ(best["parameters"], "nvme");
  EXPECT_EQ(best["optimizer"], "nvme");
  EXPECT_EQ(best["limit"], "nvme");
  const double written = best["step"]["nvme_write"], read = best["step"]["nvme_read"];
  EXPECT_NEAR(written / 7e9, 12, 0.1);
  EXPECT_NEAR(read / 7e9, 14, 0.3);  // a few units are still there when backward begins
  EXPECT_NEAR(best["busy_seconds"]["nvme"].get<double>(), read / 6e9 + written / 3e9, 1e-6);
  const double a_day = written * 86400 / best["seconds"]["expected"].get<double>();
  EXPECT_NEAR(best["written_bytes_a_day"].get<double>() / a_day, 1, 1e-9);
  EXPECT_NEAR(best["drive_life_days"].get<double>() / (1.4e15 / a_day), 1, 1e-9);
  EXPECT_THAT(result.output, AllOf(HasSubstr("nvme busiest"), HasSubstr("TB are written"), HasSubstr("they last")));
}

TEST_F(Plan, FollowsAConfiguration) {
  write("offload.json", R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "hoist": {"device_memory": "4GiB", "pinned_memory": "8GiB", "update_mode": "step",
                      "measured": {"read_bytes_per_second": 6000000000, "write_bytes_per_second": 3000000000}}})");
  const auto result = run("plan offload.json --parameters 1e9 --world 2 --network 10 --json plan.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto configured = row(json_of("plan.json"), "pinned", "nvme");
  EXPECT_EQ(configured["configured"], true);
  EXPECT_EQ(configured["device"]["budget_bytes"], 4ull << 30);
  EXPECT_NEAR(configured["step"]["nvme_read"].get<double>(), 10 * 0.5e9, 0.1e9);
  EXPECT_NEAR(configured["busy_seconds"]["nvme"].get<double>(), 5 / 6.0 + 6 / 3.0, 0.05);
  EXPECT_GT(configured["busy_seconds"]["wire"], 0.0);
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("(configured)"), HasSubstr("no speed was given"), HasSubstr("--host-memory")));
  // hoist check says the same of the same configuration.
  ASSERT_EQ(run("check offload.json --parameters 1e9 --world 2 --json check.json").exit_code, 0);
  EXPECT_EQ(json_of("check.json")["prediction"]["step"], configured["step"]);
  EXPECT_EQ(json_of("check.json")["prediction"]["pinned"]["bytes"], configured["pinned"]["bytes"]);
}

TEST_F(Plan, DividesStatesAsTheConfigurationSays) {
  write("ratio.json", R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.25}},
                          "hoist": {"device": "cuda", "device_memory": "20GiB", "pinned_memory": "20GiB"}})");
  const auto result = run("plan ratio.json --parameters 1e9 --json plan.json" + std::string(kSpeeds));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto report = json_of("plan.json");
  const auto configured = row(report, "device", "pinned");
  EXPECT_EQ(configured["configured"], true);
  const double share = configured["device_state"]["share"];
  EXPECT_GT(share, 0.65);
  EXPECT_LE(share, 0.75);
  EXPECT_NEAR(configured["step"]["device_to_host"].get<double>(), (1 - share) * 2e9, 1e7);
  EXPECT_NEAR(configured["busy_seconds"]["host_memory"].get<double>(), (1 - share) * 26e9 / 200e9, 0.01);
  EXPECT_THAT(result.output, HasSubstr("device / pinned ("));
  EXPECT_THAT(row(report, "pinned", "pinned")["refusal"], HasSubstr("offload_optimizer.ratio"));
  EXPECT_EQ(row(report, "device", "device")["device_state"]["share"], 1.0);
}

TEST_F(Plan, WithoutBudgetsSaysWhatIsNeeded) {
  const auto result = run("plan --parameters 1e9 --json plan.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto report = json_of("plan.json");
  EXPECT_GT(row(report, "device", "device")["device"]["least_bytes"], 14ull * 1000 * 1000 * 1000);
  EXPECT_EQ(row(report, "device", "device")["device"]["budget_bytes"], nullptr);
  EXPECT_EQ(row(report, "device", "device")["limit"], nullptr) << "no speed is known";
  EXPECT_THAT(result.output, HasSubstr("at least"));
}

TEST_F(Plan, AnUpdateOnTheDeviceTakesTime) {
  const std::string question =
      "plan --parameters 1e9 --nvme-read 6 --nvme-write 3 --host-to-device 25 --device-to-host 25 --host-memory 200 "
      "--compute-seconds 5 --json plan.json";
  auto result = run(question);
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto without = row(json_of("plan.json"), "device", "device");
  EXPECT_EQ(without["not_counted"], nlohmann::json::array({"--device-bandwidth"}));
  EXPECT_THAT(result.output, HasSubstr("no speed was given: --device-bandwidth\n"));

  result = run(question + " --device-bandwidth 1000");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto with = row(json_of("plan.json"), "device", "device");
  EXPECT_NEAR(with["busy_seconds"]["device_memory"].get<double>(), 26e9 / 1000e9, 1e-4);
  EXPECT_NEAR(with["seconds"]["expected"].get<double>() - without["seconds"]["expected"].get<double>(), 0.026, 1e-4);
  EXPECT_EQ(with["not_counted"], nlohmann::json::array());
  EXPECT_EQ(row(json_of("plan.json"), "nvme", "nvme")["busy_seconds"]["device_memory"], 0.0);
}

TEST_F(Plan, CountsWhatTheProgramPins) {
  const auto result = run("plan --parameters 1e9 --json plan.json");
  EXPECT_THAT(result.output, HasSubstr("not counted: pinned memory that the program takes"));
  const auto alone = row(json_of("plan.json"), "nvme", "nvme")["pinned"]["least_bytes"].get<std::uint64_t>();
  write("units.json", R"({"units": [{"name": "a", "parameters": 1000000}], "program_pinned_bytes": 5368709120})");
  const auto pinning = run("plan --units units.json --json plan.json");
  ASSERT_EQ(pinning.exit_code, 0) << pinning.errors;
  EXPECT_GT(row(json_of("plan.json"), "nvme", "nvme")["pinned"]["least_bytes"].get<std::uint64_t>(), 5ull << 30);
  EXPECT_LT(alone, 5ull << 30);
  EXPECT_THAT(pinning.output, HasSubstr("5.0 GiB of the pinned memory are the program's own"));
  write("offload.json", R"({"hoist": {"pinned_memory": "4GiB", "device_memory": "4GiB"}})");
  const auto checked = run("check offload.json --units units.json --json check.json");
  EXPECT_THAT(checked.output,
              AllOf(HasSubstr("5.0 GiB of the pinned memory are the program's own"), HasSubstr("does not fit")));
  EXPECT_EQ(json_of("check.json")["prediction"]["program_pinned_bytes"], 5ull << 30);
}

TEST_F(Plan, WhatFitsNowhereIsSaid) {
  const auto result = run("plan --parameters 7e9 --device-memory 1MiB --pinned-memory 1MiB");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.output, HasSubstr("nothing fits: nvme / nvme is closest, with --device-memory "));
  // What is named is enough, and no more than that.
  std::smatch found;
  ASSERT_TRUE(std::regex_search(result.output, found,
                                std::regex("--device-memory (\\d+)MiB and --pinned-memory (\\d+)MiB at least")));
  const int device = std::stoi(found[1]), pinned = std::stoi(found[2]);
  const auto plan = [&](int device_mib, int pinned_mib) {
    return run(fmt::format("plan --parameters 7e9 --device-memory {}MiB --pinned-memory {}MiB", device_mib, pinned_mib))
        .output;
  };
  EXPECT_THAT(plan(device, pinned), Not(HasSubstr("nothing fits")));
  EXPECT_THAT(plan(device - 1, pinned), HasSubstr("nothing fits"));
  EXPECT_THAT(plan(device, pinned - 1), HasSubstr("nothing fits"));
}

// Without a configuration as with one that names these places: every step is a commit, in one of two extents.
TEST_F(Plan, ReservesWhatCommitsTake) {
  ASSERT_EQ(run("plan --parameters 1e9 --json plan.json").exit_code, 0);
  for (const char* parameters : {"device", "pinned", "nvme"})
    EXPECT_NEAR(row(json_of("plan.json"), parameters, "nvme")["nvme"]["bytes"].get<double>(), 24e9, 0.1e9);
  EXPECT_NEAR(row(json_of("plan.json"), "pinned", "nvme")["step"]["nvme_write"].get<double>(), 12e9, 0.1e9);
  EXPECT_EQ(row(json_of("plan.json"), "pinned", "pinned")["nvme"]["bytes"], 0);
  write("none.json", R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}},
                         "hoist": {"durability": "none"}})");
  ASSERT_EQ(run("plan none.json --parameters 1e9 --json plan.json").exit_code, 0);
  EXPECT_NEAR(row(json_of("plan.json"), "nvme", "nvme")["nvme"]["bytes"].get<double>(), 12e9, 0.1e9);
}

// Tables of tiles grow with the model: what equal layers share is held once, or this would take 1 GB.
TEST_F(Plan, TakesModelsOfHundredsOfBillions) {
  const auto result = run("plan --parameters 100B --json plan.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(row(json_of("plan.json"), "nvme", "nvme")["fits"], true);
}

TEST_F(Plan, MarksPlacesThatNoEngineWouldTake) {
  auto result = run("plan --parameters 1e9 --json plan.json" + std::string(kSpeeds));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  auto report = json_of("plan.json");
  EXPECT_EQ(row(report, "device", "device")["refusal"], nullptr);
  EXPECT_EQ(row(report, "pinned", "device")["fits"], false);
  EXPECT_THAT(row(report, "pinned", "device")["refusal"], HasSubstr("updated there"));
  EXPECT_THAT(result.output, HasSubstr("refused, pinned / device, nvme / device: zero_optimization"));

  // Three ranks are not cut into groups of two, wherever the state is.
  write("groups.json", R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}})");
  result = run("plan groups.json --parameters 1e6 --world 3 --json plan.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  report = json_of("plan.json");
  EXPECT_EQ(report["best"], nullptr);
  for (const auto& each : report["rows"]) EXPECT_THAT(each["refusal"], HasSubstr("groups of 2")) << each;
  EXPECT_THAT(result.output, HasSubstr("nothing fits: every placement is refused"));
}

TEST_F(Plan, RefusesWhatItCannotUse) {
  const auto refusal = [&](const std::string& arguments) {
    const auto result = run("plan " + arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments << result.output;
    return result.errors;
  };
  EXPECT_THAT(refusal(""), HasSubstr("--parameters"));
  EXPECT_THAT(refusal("--parameters many"), HasSubstr("is not a count"));
  EXPECT_THAT(refusal("--parameters 1e9 --device-memory lots"),
              HasSubstr("--device-memory lots is not a number of bytes"));
  EXPECT_THAT(refusal("--parameters 1e9 --nvme-read -1"), HasSubstr("--nvme-read"));
  EXPECT_THAT(refusal("--parameters 1e9 --nvme-read nan"), HasSubstr("is not a number from"));
  EXPECT_THAT(refusal("--parameters 1e9 --tokens 4096"), HasSubstr("belong together"));
  EXPECT_THAT(refusal("--parameters 1e9 --tokens 4096 --tflops 100 --compute-seconds 1"), HasSubstr("already"));
  EXPECT_THAT(refusal("missing.json --parameters 1e9"), HasSubstr("missing.json"));
}

}  // namespace
}  // namespace hoist
