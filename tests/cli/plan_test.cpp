// SPDX-License-Identifier: Apache-2.0
// What `hoist plan` says of a model before anything is started.
#include <filesystem>
#include <regex>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "plan_fixture.hpp"

namespace hoist::plan_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(Plan, RanksPlacementsAndTheFastestThatFitsIsFirst) {
  const auto result =
      run("plan --parameters 7e9 --device-memory 24GiB --pinned-memory 120GiB --tokens 4096" + std::string(kOneRank));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto report = json_of("plan.json");
  ASSERT_EQ(report["rows"].size(), 9u);
  EXPECT_EQ(report["parameters"], 7'000'000'000);
  // 16 bytes a parameter are 104 GiB: not on the device, and weights and state fit the pinned budget.
  EXPECT_EQ(row(report, "device", "device")["fits"], false);
  EXPECT_EQ(row(report, "pinned", "pinned")["fits"], true);
  EXPECT_EQ(report["best"], 0);
  EXPECT_EQ(best(report)["optimizer"], "pinned");
  for (std::size_t i = 1; i < report["rows"].size(); ++i) {
    const auto &faster = report["rows"][i - 1], &slower = report["rows"][i];
    EXPECT_GE(faster["fits"], slower["fits"]);
    if (faster["fits"] == slower["fits"] && faster["refusal"] == slower["refusal"]) {
      EXPECT_LE(faster["seconds"]["expected"], slower["seconds"]["expected"]);
    }
    EXPECT_GE(slower["seconds"]["gap"], 1 - 1e-6);
  }
  EXPECT_THAT(result.output, AllOf(HasSubstr("1.  "), HasSubstr("too little"), HasSubstr("the gap is"),
                                   HasSubstr("kernels wait for"), Not(HasSubstr("?"))));
}

TEST_F(Plan, TheReportHasTheFastestPlaceInAProgramsWords) {
  ASSERT_EQ(run("plan --parameters 7b --device-memory 24GiB --pinned-memory 120GiB" + std::string(kOneRank)).exit_code,
            0);
  const auto report = json_of("plan.json");
  EXPECT_EQ(report["parameters"], 7'000'000'000);
  EXPECT_EQ(report["per_rank"]["pinned_bytes"], best(report)["pinned"]["bytes"]);
  EXPECT_EQ(report["step_seconds"], best(report)["seconds"]["expected"]);
  EXPECT_EQ(report["lower_bound_seconds"], best(report)["seconds"]["least"]);
  EXPECT_LE(report["lower_bound_seconds"], report["step_seconds"].get<double>() * (1 + 1e-9));
  EXPECT_EQ(report["limiting_link"], best(report)["limit"]);
  ASSERT_EQ(report["links"].size(), 4u);
  EXPECT_EQ(report["links"][1]["name"], "host_to_device");
  EXPECT_EQ(report["links"][1]["bytes"], best(report)["step"]["host_to_device"]);
  EXPECT_GT(report["links"][1]["busy_share"], 0.0);
  EXPECT_EQ(report["links"][1]["wait_seconds"], best(report)["wait_seconds"]["host_to_device"]);
  // 8 operations a parameter and token, at 200 TFLOP/s.
  EXPECT_NEAR(best(report)["busy_seconds"]["compute"].get<double>(), 8 * 7e9 * 16384 / 200e12, 1e-6);

  ASSERT_EQ(run("plan --parameters 1e15 --json nothing.json").exit_code, 2) << "more than any model has";
  ASSERT_EQ(run("plan --parameters 1e12 --device-memory 1GiB --pinned-memory 1GiB --json nothing.json").exit_code, 0);
  EXPECT_EQ(json_of("nothing.json")["per_rank"], nullptr);
  EXPECT_EQ(json_of("nothing.json")["links"].size(), 0u);
}

// The textbook's figures for fp32 training, and hoist's beside them.
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

TEST_F(Plan, SaysWhatLimitsWhatItCostsAndWhatMoreWouldBring) {
  const auto result =
      run("plan --parameters 7e9 --device-memory 16GiB --pinned-memory 24GiB --tokens 4096" + std::string(kOneRank));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto report = json_of("plan.json");
  const auto found = best(report);
  EXPECT_EQ(found["parameters"], "nvme");
  EXPECT_EQ(found["optimizer"], "nvme");
  EXPECT_EQ(found["limit"], "nvme");
  EXPECT_GT(found["wait_seconds"]["nvme"], 0.0);
  const double written = found["step"]["nvme_write"], read = found["step"]["nvme_read"];
  EXPECT_NEAR(written / 7e9, 12, 0.1);
  EXPECT_NEAR(found["busy_seconds"]["nvme"].get<double>(), read / 6e9 + written / 3e9, 1e-6);
  const double seconds = report["step_seconds"];
  const double a_day = written * 86400 / seconds;
  EXPECT_NEAR(found["written_bytes_a_day"].get<double>() / a_day, 1, 1e-9);
  EXPECT_NEAR(found["drive_life_days"].get<double>() / (1.4e15 / a_day), 1, 1e-9);
  EXPECT_NEAR(report["energy_joules"].get<double>(), 1000 * seconds, 1e-6);
  EXPECT_NEAR(report["cost"]["rent"].get<double>(), 3.6 / 3600 * seconds, 1e-9);
  EXPECT_NEAR(report["cost"]["energy"].get<double>(), 1000 * seconds / 3.6e6 * 0.36, 1e-9);
  ASSERT_EQ(report["what_if"].size(), 2u);
  EXPECT_LT(report["what_if"][0]["step_seconds"], 0.8 * seconds) << "two drives instead of one";
  EXPECT_LT(report["what_if"][1]["step_seconds"], seconds) << "100 GB hold more than half of the state";
  // With so many tokens, a step takes what its kernels take, and with a tenth less it does not.
  const double tokens = report["free_tokens"];
  for (const double factor : {1.0, 0.9}) {
    ASSERT_EQ(run(fmt::format("plan --parameters 7e9 --device-memory 1TiB --pinned-memory 24GiB --tokens {}{}",
                              tokens * factor, kOneRank))
                  .exit_code,
              0);
    const auto same = row(json_of("plan.json"), "nvme", "nvme");
    const double compute = same["busy_seconds"]["compute"];
    EXPECT_NEAR(same["seconds"]["expected"].get<double>() / compute, factor == 1.0 ? 1.02 : 1.1,
                factor == 1.0 ? 0.02 : 0.08);
  }
  EXPECT_THAT(result.output, AllOf(HasSubstr("nvme busiest"), HasSubstr("TB are written"), HasSubstr("they last"),
                                   HasSubstr("one more drive"), HasSubstr("offloading costs no time"),
                                   HasSubstr("kJ of energy"), HasSubstr("EUR a step")));
}

TEST_F(Plan, ShowsADisturbedStepBesideThePlannedOne) {
  const std::string question =
      "plan --parameters 7e9 --device-memory 16GiB --pinned-memory 24GiB --tokens 4096" + std::string(kOneRank);
  ASSERT_EQ(run(question).exit_code, 0);
  const auto planned = json_of("plan.json");
  EXPECT_EQ(planned["disturbance"], nullptr);
  EXPECT_EQ(best(planned)["seconds"]["disturbed"], nullptr);
  const auto disturbed = [&](const std::string& options) {
    const auto result = run(question + options);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, HasSubstr("disturbed"));
    const auto report = json_of("plan.json");
    // The plan itself stays the same.
    EXPECT_EQ(report["step_seconds"], planned["step_seconds"]) << options;
    EXPECT_EQ(report["disturbance"]["step_seconds"], best(report)["seconds"]["disturbed"]) << options;
    return std::pair(report["disturbance"], result.output);
  };
  const double seconds = planned["step_seconds"];
  // The drives are the busiest.
  const auto [drive, text] = disturbed(" --slow-drive 2");
  EXPECT_EQ(drive["slow_drive"], 2);
  EXPECT_NEAR(drive["step_seconds"].get<double>() / seconds, 2, 0.1);
  EXPECT_THAT(text, HasSubstr("  if one drive takes 2 times as long: "));
  EXPECT_GE(disturbed(" --slow-rank 1.5").first["step_seconds"], seconds);
  const auto [noise, noise_text] = disturbed(" --noise 0.2 --slow-rank 1.1");
  EXPECT_GT(noise["step_seconds"], 1.05 * seconds);
  EXPECT_LT(noise["step_seconds"], 1.3 * seconds);
  EXPECT_THAT(noise_text,
              HasSubstr("  if one rank takes 1.1 times as long, each transfer and kernel takes up to 20 % longer: "));
  for (const char* wrong : {"--slow-drive 0.5", "--slow-rank 0", "--noise -1", "--noise nan"})
    EXPECT_EQ(run(question + " " + wrong).exit_code, 2) << wrong;
}

TEST_F(Plan, WaitsForLatencies) {
  const auto seconds = [&](double microseconds) {
    nlohmann::json machine = kMachine;
    machine["drives"]["latency_us"] = machine["device"]["copy_latency_us"] = machine["network"]["latency_us"] =
        microseconds;
    write("machine.json", machine.dump());
    EXPECT_EQ(run("plan --parameters 7e9 --tokens 64 --machine machine.json --world 8 --json plan.json").exit_code, 0);
    return json_of("plan.json")["step_seconds"].get<double>();
  };
  const double without = seconds(0);
  EXPECT_GE(seconds(100), without);
  EXPECT_GT(seconds(100'000), without + 0.1);
}

TEST_F(Plan, WaitsForFlushes) {
  const auto seconds = [&](double microseconds) {
    nlohmann::json machine = kMachine;
    machine["drives"]["flush_us"] = microseconds;
    write("machine.json", machine.dump());
    EXPECT_EQ(run("plan --parameters 7e9 --tokens 64" + std::string(kOneRank)).exit_code, 0);
    return row(json_of("plan.json"), "nvme", "nvme")["seconds"]["expected"].get<double>();
  };
  EXPECT_GT(seconds(1e6), seconds(0));
}

TEST_F(Plan, CountsActivations) {
  const auto device_bytes = [&](const std::string& arguments) {
    EXPECT_EQ(run("plan " + arguments + kOneRank).exit_code, 0);
    return best(json_of("plan.json"))["program_device_bytes"].get<double>();
  };
  // GPT-3's shape for 12 layers of width 1536 is 340 million parameters: 2 bytes an input, and 34 of one layer.
  EXPECT_NEAR(device_bytes("--parameters 339738624 --tokens 1000") / (1000 * 1536 * (2 * 12 + 34.0)), 1, 1e-6);
  write("vertical.json", R"({"gradient_accumulation_steps": 4, "hoist": {"micro_batch_order": "vertical"}})");
  write("horizontal.json", R"({"gradient_accumulation_steps": 4})");
  EXPECT_NEAR(device_bytes("vertical.json --parameters 339738624 --tokens 1000") / (1000 * 1536 * (2 * 12 + 34 / 4.0)),
              1, 1e-6);
  EXPECT_NEAR(device_bytes("horizontal.json --parameters 339738624 --tokens 1000") / (250 * 1536 * (2 * 12 + 34.0)), 1,
              1e-6);
  write("units.json", R"({"units": [{"name": "a", "parameters": 1000000}], "program_device_bytes": 12345})");
  EXPECT_EQ(device_bytes("--units units.json"), 12345);
}

TEST_F(Plan, AFrozenParameterHasNoGradientToCompute) {
  const auto compute_seconds = [&](const char* trainable) {
    write("units.json",
          fmt::format(R"({{"units": [{{"name": "a", "parameters": [{{"name": "a.weight", "shape": [1000000],
                                     "trainable": {}}}, {{"name": "a.adapter", "shape": [1000]}}]}}]}})",
                      trainable));
    EXPECT_EQ(run("plan --units units.json --tokens 1000" + std::string(kOneRank)).exit_code, 0);
    return best(json_of("plan.json"))["busy_seconds"]["compute"].get<double>();
  };
  const double trained = compute_seconds("true");
  EXPECT_GT(trained, 0);
  EXPECT_NEAR(compute_seconds("false") / trained, (6 * 1001000.0 + 2 * 1000) / (8 * 1001000.0), 1e-9);
}

TEST_F(Plan, FollowsAConfiguration) {
  write("offload.json", R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}},
            "hoist": {"device_memory": "8GiB", "pinned_memory": "8GiB", "update_mode": "step", "optimizer_pinned_fraction": 0,
                      "measured": {"read_bytes_per_second": 6000000000, "write_bytes_per_second": 3000000000}}})");
  const auto result = run("plan offload.json --parameters 1e9 --world 2 --json plan.json --machine machine.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto configured = row(json_of("plan.json"), "pinned", "nvme");
  EXPECT_EQ(configured["configured"], true);
  EXPECT_EQ(configured["device"]["budget_bytes"], 8ull << 30);
  EXPECT_NEAR(configured["step"]["nvme_read"].get<double>(), 10 * 0.5e9, 0.1e9);
  EXPECT_NEAR(configured["busy_seconds"]["nvme"].get<double>(), 2 * (5 / 6.0 + 6 / 3.0), 0.1)
      << "two ranks share drives";
  EXPECT_GT(configured["busy_seconds"]["wire"], 0.0);
  EXPECT_THAT(result.output, AllOf(HasSubstr("(configured)"), HasSubstr("hoist.measured in offload.json, and not")));
  // hoist check says the same of the same configuration.
  ASSERT_EQ(run("check offload.json --parameters 1e9 --world 2 --machine machine.json --json check.json").exit_code, 0);
  EXPECT_EQ(json_of("check.json")["prediction"]["step"]["nvme_write"], configured["step"]["nvme_write"]);
}

// "auto" leaves a setting to the plan, as its absence does.
TEST_F(Plan, ChoosesWhatSaysAuto) {
  const std::string head = R"({"zero_optimization": {"stage": 3)";
  write("absent.json", head + "}}");
  write("auto.json", head + R"(, "stage3_prefetch_bucket_size": "auto", "stage3_max_live_parameters": "auto",
            "sub_group_size": "auto"}})");
  const auto seconds = [&](const std::string& file) {
    const auto result = run("plan " + file + " --parameters 7e9 --tokens 2048 --json plan.json --machine " +
                            HOIST_SOURCE_DIR + "/machines/h100-8.json");
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return best(json_of("plan.json"))["seconds"]["expected"].get<double>();
  };
  EXPECT_DOUBLE_EQ(seconds("auto.json"), seconds("absent.json"));
}

// A file that does not ask for it gets no scratch space from the engine, so none in the plan. Without a file it is
// open.
TEST_F(Plan, SpillsGradientsWhereTheConfigurationSays) {
  const auto found = [&](const std::string& config) {
    const auto result =
        run("plan " + config + " --parameters 7e9 --device-memory 16GiB --pinned-memory 8GiB" + kOneRank);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return row(json_of("plan.json"), "nvme", "nvme");
  };
  const auto config = [&](const char* hoist) {
    write("spill.json",
          std::string(R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}, "hoist": )") +
              hoist + "}");
    return "spill.json";
  };
  const auto plain = found(config("{}")), asked = found(config(R"({"gradient_spill": true})")), open = found("");
  EXPECT_EQ(plain["fits"], false);
  EXPECT_EQ(plain["spilled_gradients"]["units"], 0);
  EXPECT_EQ(asked["fits"], true);
  EXPECT_EQ(open["fits"], true);
  EXPECT_EQ(asked["spilled_gradients"], open["spilled_gradients"]);
  EXPECT_GT(open["spilled_gradients"]["units"], 0);
}

TEST_F(Plan, DividesStatesAsTheConfigurationSays) {
  write("ratio.json", R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.25}},
                          "hoist": {"device": "cuda", "device_memory": "20GiB", "pinned_memory": "20GiB"}})");
  const auto result = run("plan ratio.json --parameters 1e9" + std::string(kOneRank));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto report = json_of("plan.json");
  const auto configured = row(report, "device", "pinned");
  EXPECT_EQ(configured["configured"], true);
  const double share = configured["device_state"]["share"];
  EXPECT_GT(share, 0.65);
  EXPECT_LE(share, 0.75);
  EXPECT_NEAR(configured["step"]["device_to_host"].get<double>(), (1 - share) * 2e9, 1e7);
  EXPECT_NEAR(configured["busy_seconds"]["host_memory"].get<double>(), (1 - share) * 26e9 / 200e9, 0.01);
  EXPECT_NEAR(configured["busy_seconds"]["device_memory"].get<double>(), share * 26e9 / 1000e9, 0.001);
  EXPECT_THAT(result.output, HasSubstr("device / pinned ("));
  EXPECT_EQ(row(report, "pinned", "pinned")["device_state"]["share"], 0.0) << "beside offloaded weights it is 1";
  EXPECT_EQ(row(report, "device", "device")["device_state"]["share"], 1.0);
}

TEST_F(Plan, RanksThatAreAloneInTheirNodesUseTheNetwork) {
  auto machine = kMachine;
  machine["nodes"] = 4;
  machine["gpus_per_node"] = 1;
  const auto seconds_over = [&](const nlohmann::json& network) {
    machine["network"] = network;
    write("machine.json", machine.dump());
    EXPECT_EQ(run("plan --parameters 7e9 --machine machine.json --json plan.json").exit_code, 0);
    return best(json_of("plan.json"))["seconds"]["expected"].get<double>();
  };
  const double slow = seconds_over({{"between_nodes_gb_per_s", 1}});
  EXPECT_EQ(slow, seconds_over({{"between_nodes_gb_per_s", 1}, {"in_node_gb_per_s", 100}}));
  EXPECT_GT(slow, 2 * seconds_over({{"between_nodes_gb_per_s", 100}}));
}

// Two batch sizes imply the third, and gradients of several micro-batches are sums.
TEST_F(Plan, CountsMicroBatchesThatAreImplied) {
  const auto pinned_of = [&](const std::string& text) {
    write("batch.json", text);
    EXPECT_EQ(run("plan batch.json --parameters 7e9" + std::string(kOneRank)).exit_code, 0);
    return row(json_of("plan.json"), "pinned", "pinned")["pinned"]["bytes"];
  };
  const auto implied = pinned_of(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2})");
  EXPECT_EQ(implied, pinned_of(R"({"gradient_accumulation_steps": 4})"));
  EXPECT_NE(implied, pinned_of("{}"));
}

TEST_F(Plan, CountsWhatTheProgramPins) {
  const auto result = run("plan --parameters 1e9 --json plan.json");
  EXPECT_THAT(result.output, HasSubstr("not counted: pinned memory that the program takes"));
  write("alone.json", R"({"units": [{"name": "a", "parameters": 1000000}]})");
  ASSERT_EQ(run("plan --units alone.json --json plan.json").exit_code, 0);
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
  const auto plan = [&](const std::string& budgets) {
    return run("plan --parameters 7e9 --tokens 1024 " + budgets + kOneRank).output;
  };
  const std::string nothing = plan("--device-memory 1MiB --pinned-memory 1MiB");
  EXPECT_THAT(nothing, HasSubstr("nothing fits: nvme / nvme is closest, with --device-memory "));
  // The value that is named is enough, and no larger than necessary.
  std::smatch found;
  ASSERT_TRUE(std::regex_search(nothing, found,
                                std::regex("--device-memory (\\d+)MiB and --pinned-memory (\\d+)MiB at least")));
  const int device = std::stoi(found[1]), pinned = std::stoi(found[2]);
  const auto with = [&](int device_mib, int pinned_mib) {
    return plan(fmt::format("--device-memory {}MiB --pinned-memory {}MiB", device_mib, pinned_mib));
  };
  EXPECT_THAT(with(device, pinned), Not(HasSubstr("nothing fits")));
  EXPECT_THAT(with(device - 1, pinned), HasSubstr("nothing fits"));
  EXPECT_THAT(with(device, pinned - 1), HasSubstr("nothing fits"));
  // Drives are full, too.
  nlohmann::json machine = kMachine;
  machine["drives"]["capacity_gb"] = 100;
  write("machine.json", machine.dump());
  EXPECT_THAT(plan("--device-memory 16GiB --pinned-memory 24GiB"), HasSubstr("of drives for a rank at least"));
}

// Budgets do not make a machine larger: hoist check, asked about the same machine, says the same.
TEST_F(Plan, BudgetsBeyondTheMachineFitNothing) {
  nlohmann::json machine = kMachine;
  machine["device"]["memory_gib"] = 24;
  machine["host"]["memory_gib"] = 62;
  write("machine.json", machine.dump());
  write("large.json", R"({"zero_optimization": {"stage": 3},
                          "hoist": {"device": "cuda", "device_memory": "70GiB", "pinned_memory": "200GiB"}})");
  const std::string arguments = " --parameters 4e9 --machine machine.json --world 1";
  EXPECT_EQ(run("check large.json" + arguments).exit_code, 2);
  const auto planned = run("plan large.json --json plan.json --write written.json" + arguments);
  EXPECT_EQ(planned.exit_code, 2);
  EXPECT_FALSE(std::filesystem::exists(path("written.json")));
  EXPECT_THAT(planned.output, AllOf(HasSubstr("exceeds the machine (configured)"), HasSubstr("nothing fits"),
                                    HasSubstr("hoist.device_memory is 70.0 GiB, all of it taken at the start, and "
                                              "24.0 GiB is free")));
  const auto device = row(json_of("plan.json"), "device", "device");
  EXPECT_EQ(device["fits"], false);
  EXPECT_THAT(device["problems"].dump(), HasSubstr("memory of a GPU: 5"));
  EXPECT_THAT(run("plan --device-memory 80GiB" + arguments).output, HasSubstr("nothing fits"));
  EXPECT_EQ(run("plan --device-memory 20GiB --pinned-memory 50GiB --write written.json" + arguments).exit_code, 0);
  EXPECT_EQ(run("check written.json" + arguments).exit_code, 0);
  // A budget that is too small hides none that is too large.
  EXPECT_THAT(run("plan --device-memory 70GiB --pinned-memory 1MiB" + arguments).output,
              AllOf(HasSubstr("--pinned-memory "), HasSubstr("all of it taken at the start")));
  // No budget that the machine has not got is advised, and no placement that has not fitted either.
  const auto tokens = run("plan --tokens 1e6" + arguments);
  EXPECT_THAT(tokens.output, AllOf(HasSubstr("nothing fits"), HasSubstr("memory of a GPU: "),
                                   HasSubstr("needed, 24.0 GiB free"), Not(HasSubstr("--device-memory")),
                                   Not(HasSubstr("needs less")), HasSubstr("take more ranks or a larger machine")));
  // Full drives leave the placement closest that takes least memory; the others' memory would not be there.
  machine["drives"]["capacity_gb"] = 1;
  write("machine.json", machine.dump());
  const auto drives = run("plan --parameters 40e9 --machine machine.json --world 1");
  EXPECT_THAT(drives.output, AllOf(HasSubstr("nothing fits: nvme / nvme is closest"), Not(HasSubstr("needs less"))));
}

// As with a configuration that names these placements, every step is a commit, in one of two extents.
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
  auto result = run("plan --parameters 1e9" + std::string(kOneRank));
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  auto report = json_of("plan.json");
  EXPECT_EQ(row(report, "device", "device")["refusal"], nullptr);
  EXPECT_EQ(row(report, "pinned", "device")["fits"], false);
  EXPECT_THAT(row(report, "pinned", "device")["refusal"], HasSubstr("updated there"));
  EXPECT_THAT(result.output, HasSubstr("refused, pinned / device, nvme / device: zero_optimization"));

  // Three ranks are not cut into groups of two, wherever the state is.
  write("groups.json",
        R"({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "hoist": {"device": "host"}})");
  result = run("plan groups.json --parameters 1e6 --world 3");
  EXPECT_EQ(result.exit_code, 2) << result.output;
  EXPECT_THAT(result.errors, HasSubstr("groups of 2"));
}

TEST_F(Plan, RefusesWhatItCannotUse) {
  const auto refusal = [&](const std::string& arguments) {
    const auto result = run("plan " + arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments << result.output;
    return result.errors;
  };
  EXPECT_THAT(refusal(""), HasSubstr("--parameters"));
  EXPECT_THAT(refusal("--parameters 1e9 --device-memory 0"), HasSubstr("less than 4 KiB"));
  write("seven.json", R"({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 7})");
  EXPECT_THAT(refusal("seven.json --world 2 --parameters 1e8"), HasSubstr("times 2 ranks"));
  EXPECT_THAT(refusal("--parameters many"), HasSubstr("is not a count"));
  EXPECT_THAT(refusal("--parameters 1e9 --device-memory lots"),
              HasSubstr("--device-memory lots is not a number of bytes"));
  EXPECT_THAT(refusal("--parameters 1e9 --tokens 0"), HasSubstr("--tokens"));
  EXPECT_THAT(refusal("--parameters 1e9 --tokens nan"), HasSubstr("--tokens"));
  EXPECT_THAT(refusal("--parameters 1e9 --path ."), HasSubstr("belongs to --machine this"));
  EXPECT_THAT(refusal("--parameters 1e9 --machine this --path missing"), HasSubstr("missing"));
  EXPECT_THAT(refusal("missing.json --parameters 1e9"), HasSubstr("missing.json"));
}

}  // namespace
}  // namespace hoist::plan_test
