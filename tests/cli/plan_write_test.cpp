// SPDX-License-Identifier: Apache-2.0
// What `hoist plan --write` changes in a configuration, and that later commands take it.
#include <filesystem>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "plan_fixture.hpp"

namespace hoist::plan_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The written configuration is accepted and, planned again, gives the same plan.
TEST_F(Plan, WritesTheFastestPlacementThatFits) {
  for (const char* budgets :
       {"--device-memory 60GiB --pinned-memory 400GiB", "--device-memory 16GiB --pinned-memory 24GiB",
        "--device-memory 24GiB --pinned-memory 60GiB"}) {
    const auto result =
        run(fmt::format("plan --parameters 7e9 --tokens 4096 {} --write planned.json{}", budgets, kOneRank));
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    const auto found = best(json_of("plan.json"));
    const auto checked = run("check planned.json");
    EXPECT_EQ(checked.exit_code, 0) << checked.errors;
    const auto again_written = run("plan --parameters 7e9 --write planned.json" + std::string(kOneRank));
    EXPECT_EQ(again_written.exit_code, 2);
    EXPECT_THAT(again_written.errors, HasSubstr("--write planned.json: the file exists"));
    ASSERT_EQ(run("plan planned.json --parameters 7e9 --tokens 4096 --json again.json --machine machine.json --world 1")
                  .exit_code,
              0);
    const auto again = row(json_of("again.json"), found["parameters"].get<std::string>().c_str(),
                           found["optimizer"].get<std::string>().c_str());
    EXPECT_EQ(again["configured"], true) << budgets;
    EXPECT_EQ(again["fits"], true) << budgets;
    EXPECT_EQ(again["step"], found["step"]) << budgets;
    EXPECT_EQ(again["pinned"]["bytes"], found["pinned"]["bytes"]) << budgets;
    EXPECT_NEAR(again["seconds"]["expected"].get<double>(), found["seconds"]["expected"].get<double>(), 1e-9);
    std::filesystem::remove(path("planned.json"));
  }
  // The plan puts state on NVMe into the configuration's directory, whichever section or key names it.
  const std::string offload = R"("device": "nvme", "nvme_path": "/mine"})";
  for (const std::string& text :
       {R"({"zero_optimization": {"stage": 3, "offload_optimizer": {)" + offload + "}}",
        R"({"zero_optimization": {"stage": 3, "offload_param": {)" + offload + "}}",
        std::string(R"({"hoist": {"checkpoint_path": "/mine"}})"),
        std::string(R"({"hoist": {"checkpoint_path": "/mine"},
                        "zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "/other"}}})"),
        std::string(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})")}) {
    write("own.json", text);
    const auto planned =
        run("plan own.json --parameters 70e9 --pinned-memory 200GiB --write own.json" + std::string(kOneRank));
    ASSERT_EQ(planned.exit_code, 0) << text << planned.output << planned.errors;
    EXPECT_EQ(best(json_of("plan.json"))["parameters"], "nvme");
    EXPECT_EQ(run("check own.json").exit_code, 0) << test::contents_of(path("own.json"));
    EXPECT_EQ(test::contents_of(path("own.json")).find("/mine") != std::string::npos,
              text.find("/mine") != std::string::npos);
  }
  write("another.json", "{}");
  const auto over_another = run("plan own.json --parameters 1e9 --write another.json" + std::string(kOneRank));
  EXPECT_EQ(over_another.exit_code, 2);
  EXPECT_THAT(over_another.errors, HasSubstr("--write another.json: the file exists"));
  EXPECT_EQ(test::contents_of(path("another.json")), "{}");
  // What fits memory needs no drive, wherever the configuration has its state.
  write("drive.json", R"({"zero_optimization": {"stage": 3, "offload_optimizer": {)" + offload + "}}");
  ASSERT_EQ(run("plan drive.json --parameters 1e9" + std::string(kOneRank)).exit_code, 0);
  EXPECT_EQ(row(json_of("plan.json"), "device", "pinned")["nvme"]["bytes"], 0);
  // The rest of the configuration stays, comments included.
  write("mine.json", "{\n  // mine\n  \"gradient_clipping\": 0.5,\n  \"hoist\": {\"update_mode\": \"step\"}\n}\n");
  ASSERT_EQ(run("plan mine.json --parameters 7e9 --write mine.json" + std::string(kOneRank)).exit_code, 0);
  EXPECT_THAT(test::contents_of(path("mine.json")), AllOf(HasSubstr("// mine"), HasSubstr("\"gradient_clipping\": 0.5"),
                                                          HasSubstr("\"update_mode\": \"step\"")));
  const auto nothing = run("plan --parameters 7e9 --device-memory 1MiB --pinned-memory 1MiB --write none.json");
  EXPECT_EQ(nothing.exit_code, 2);
  EXPECT_THAT(nothing.errors, HasSubstr("nothing fits, so none.json was not written"));
  EXPECT_FALSE(std::filesystem::exists(path("none.json")));
}

// Values that are no section, and keys that belong to the placement before.
TEST_F(Plan, WritesOverWhatTheOldPlacementNeeded) {
  for (const char* text :
       {R"({"zero_optimization": true})", R"({"zero_optimization": {"stage": 3, "offload_optimizer": null}})",
        R"({"steps_per_print": Infinity})",
        R"({"zero_optimization": {"stage": 3, "cpu_offload": true, "cpu_offload_params": true}})",
        R"({"gradient_clipping": 0, "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
            "hoist": {"update_mode": "backward"}})",
        R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "hoist": {"update_mode": "forward"}})",
        R"({"zero_optimization": {"prefetch_bucket_size": "auto", "max_live_parameters": "auto"}})"}) {
    write("own.json", text);
    const auto planned = run("plan own.json --parameters 1e8 --write own.json" + std::string(kOneRank));
    EXPECT_EQ(planned.exit_code, 0) << text << planned.errors;
    EXPECT_EQ(best(json_of("plan.json"))["optimizer"], "device");
    const auto checked = run("check own.json --json report.json");
    EXPECT_EQ(checked.exit_code, 0) << test::contents_of(path("own.json")) << checked.errors;
    EXPECT_EQ(json_of("report.json")["placement"]["optimizer"], "device") << text;
  }
}

constexpr const char* kOnNvme = R"({"zero_optimization": {"stage": 3,
  "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}, "hoist": )";

// A placement in memory has no commits. The written file says nothing of them that outlives this placement.
TEST_F(Plan, WritesNoDurabilityThatALaterPlanWouldKeep) {
  for (const char* hoist : {"{}", R"({"durability": "auto"})", ""}) {
    const bool is_given = *hoist != '\0';
    std::filesystem::remove(path("own.json"));
    if (is_given) write("own.json", kOnNvme + std::string(hoist) + "}");
    const auto small = run(std::string("plan ") + (is_given ? "own.json" : "") + " --parameters 1e8 --write own.json" +
                           std::string(kOneRank));
    ASSERT_EQ(small.exit_code, 0) << small.errors;
    EXPECT_THAT(small.output, HasSubstr("commits: none: there is no store, so nothing can be saved or resumed; "
                                        "hoist.checkpoint_path names one"));
    const std::string question = "plan own.json --parameters 70e9 --pinned-memory 200GiB --write own.json";
    const auto large = run(question + kOneRank);
    ASSERT_EQ(large.exit_code, 0) << large.errors;
    EXPECT_THAT(large.output, HasSubstr("commits: every step"));
    ASSERT_EQ(run("check own.json --json report.json").exit_code, 0);
    EXPECT_EQ(json_of("report.json")["placement"]["durability"], "step") << test::contents_of(path("own.json"));
  }
  write("keeps.json", R"({"hoist": {"checkpoint_path": "/n", "durability": "none"}})");
  const auto keeps = run("plan keeps.json --parameters 1e8 --write keeps.json" + std::string(kOneRank));
  EXPECT_THAT(keeps.output, HasSubstr("commits: when the program saves"));
  EXPECT_THAT(test::contents_of(path("keeps.json")), HasSubstr(R"("durability": "none")"));
}

// A configuration that asks for commits of steps gets a placement that has them, and keeps the key.
TEST_F(Plan, ADurabilityThatIsGivenNeedsAStore) {
  for (const auto& [given, commits] :
       {std::pair(R"({"every": 5})", "commits: every 5 steps"), std::pair(R"("step")", "commits: every step")}) {
    write("own.json", fmt::format("{}{{\"durability\": {}}}}}", kOnNvme, given));
    for (const char* size : {"70e9 --pinned-memory 200GiB", "1e8", "1e8"}) {
      const auto planned = run(fmt::format("plan own.json --parameters {} --write own.json{}", size, kOneRank));
      ASSERT_EQ(planned.exit_code, 0) << planned.errors;
      EXPECT_THAT(planned.output, AllOf(HasSubstr(commits), Not(HasSubstr("durability is"))));
      const std::string written = test::contents_of(path("own.json"));
      EXPECT_THAT(written, HasSubstr(fmt::format("\"durability\": {}", given)));
      const auto report = json_of("plan.json");
      EXPECT_GT(best(report)["nvme"]["bytes"], 0);
      for (const char* parameters : {"device", "pinned"})
        EXPECT_THAT(row(report, parameters, "pinned")["refusal"].get<std::string>(),
                    HasSubstr(fmt::format("hoist.durability: {} needs optimizer state or weights on NVMe; leave this "
                                          "key out to plan with both in memory, too",
                                          given)));
      EXPECT_EQ(run("check own.json").exit_code, 0) << written;
    }
  }
}

// The kernels take so long that all copies are hidden.
TEST_F(Plan, PrefersTheConfiguredPlacementAtEqualTime) {
  nlohmann::json machine = kMachine;
  machine["device"]["compute_tflops"] = 0.1;
  write("machine.json", machine.dump());
  const std::string on_nvme = R"({"device": "nvme", "nvme_path": "/n"})";
  for (const auto& [parameters, name] : {std::pair(on_nvme, "nvme"), std::pair(std::string("{}"), "device")}) {
    write("own.json", fmt::format(R"({{"zero_optimization": {{"stage": 3, "offload_param": {},
                                                             "offload_optimizer": {}}}}})",
                                  parameters, on_nvme));
    ASSERT_EQ(run("plan own.json --parameters 1e9" + std::string(kOneRank)).exit_code, 0);
    const auto found = best(json_of("plan.json")), first = row(json_of("plan.json"), "device", "pinned");
    EXPECT_EQ(found["parameters"], name);
    EXPECT_EQ(found["optimizer"], "nvme");
    EXPECT_EQ(found["seconds"]["expected"], first["seconds"]["expected"]);
  }
  // Without a configuration, the one that needs no drive.
  ASSERT_EQ(run("plan --parameters 1e9" + std::string(kOneRank)).exit_code, 0);
  EXPECT_EQ(best(json_of("plan.json"))["optimizer"], "pinned");
}

// The written file keeps what its placement can have. What it replaces is printed, with the reason.
TEST_F(Plan, SaysWhichGivenKeysTheWrittenFileReplaces) {
  const auto written = [&](const char* hoist, const char* model) {
    write("own.json", kOnNvme + std::string(hoist) + "}");
    const auto planned = run(fmt::format("plan own.json --parameters {} --write own.json{}", model, kOneRank));
    EXPECT_EQ(planned.exit_code, 0) << planned.errors;
    EXPECT_EQ(run("check own.json").exit_code, 0) << test::contents_of(path("own.json"));
    const std::size_t at = planned.output.find("written to own.json\n");
    return test::contents_of(path("own.json")) + planned.output.substr(std::min(at, planned.output.size()));
  };
  const auto mode = written(R"({"update_mode": "forward"})", "1e8");
  EXPECT_THAT(mode, AllOf(HasSubstr(R"("update_mode": "auto")"),
                          HasSubstr("written to own.json\n  hoist.update_mode is \"auto\" there, not \"forward\": "
                                    "\"forward\" needs offloaded optimizer states; set zero_optimization.")));
  const auto spill = written(R"({"gradient_spill": true})", "1e8");
  EXPECT_THAT(spill, AllOf(HasSubstr(R"("gradient_spill": false)"),
                           HasSubstr("written to own.json\n  hoist.gradient_spill is false there, not true: gradients "
                                     "go to NVMe only beside optimizer state or weights that are there")));
  // On NVMe, whether or not gradients fit pinned memory.
  for (const char* model : {"20e9 --pinned-memory 200GiB", "20e9 --device-memory 16GiB --pinned-memory 24GiB"}) {
    const auto kept = written(R"({"update_mode": "forward", "gradient_spill": true})", model);
    EXPECT_THAT(kept, AllOf(HasSubstr(R"("update_mode": "forward", "gradient_spill": true)"),
                            testing::EndsWith("written to own.json\n")));
  }
  // All gradients fit beside the planned fraction of the state, but "true" would put room for larger buffers first.
  nlohmann::json machine = kMachine;
  machine["device"]["compute_tflops"] = 0.1;
  write("machine.json", machine.dump());
  EXPECT_THAT(written(R"({"durability": {"every": 7}, "gradient_spill": true})", "7e9 --pinned-memory 14GiB"),
              AllOf(HasSubstr(R"("gradient_spill": false)"),
                    HasSubstr("hoist.gradient_spill is false there, not true: all gradients fit pinned memory; with "
                              "true, some would leave it for larger buffers\n")));
}

// The old placement ignores some keys that the written file's placement obeys: the file still means what was planned.
TEST_F(Plan, WritesWhatItPlannedWhicheverKeysTheOldPlacementIgnored) {
  nlohmann::json machine = kMachine;
  machine["device"]["memory_gib"] = 24;
  machine["host"]["memory_gib"] = 62;
  write("machine.json", machine.dump());
  const auto same = [&](const std::string& zero, const char* hoist, const std::string& arguments) {
    write("own.json", R"({"zero_optimization": {"stage": 3, )" + zero + R"(}, "hoist": )" + hoist + "}");
    const auto planned = run("plan own.json --write own.json " + arguments + kOneRank);
    ASSERT_EQ(planned.exit_code, 0) << zero << planned.errors;
    const std::string written = test::contents_of(path("own.json"));
    EXPECT_EQ(run("check own.json --machine machine.json --world 1 " + arguments).exit_code, 0) << written;
    const auto before = best(json_of("plan.json"));
    ASSERT_EQ(run("plan own.json " + arguments + kOneRank).exit_code, 0) << written;
    const auto after = row(json_of("plan.json"), before["parameters"].get<std::string>().c_str(),
                           before["optimizer"].get<std::string>().c_str());
    EXPECT_EQ(after["configured"], true);
    for (const char* figure : {"device", "pinned", "nvme", "step"}) {
      if (!before[figure].contains("bytes"))
        EXPECT_EQ(before[figure], after[figure]) << figure << written;
      else
        EXPECT_EQ(before[figure]["bytes"], after[figure]["bytes"]) << figure << written;
    }
  };
  const std::string ratio = R"("offload_optimizer": {"device": "cpu", "ratio": 0.3})";
  same(R"("offload_param": {"device": "cpu"}, )" + ratio, "{}", "--parameters 3e9");
  same(R"("offload_param": {"device": "nvme", "nvme_path": "/n"}, )" + ratio, R"({"moments_dtype": "fp8"})",
       "--parameters 3e9");
  same(ratio, "{}", "--parameters 1e9");
  for (const char* device : {"cpu", "nvme", "none"})
    same(fmt::format(R"("offload_param": {{"device": "{}", "max_in_cpu": 1e9, "nvme_path": "/n"}}, )", device) +
             R"("offload_optimizer": {"device": "nvme", "nvme_path": "/n"})",
         R"({"gradient_spill": true})", "--parameters 20e9");
}

// The names of a store's drives are in its first block, which they may make larger.
TEST_F(Plan, WritesForDrivesThatTheMachineNames) {
  nlohmann::json machine = kMachine;
  machine["device"]["memory_gib"] = 24;
  machine["host"]["memory_gib"] = 62;
  machine["drives"]["count"] = 2;
  machine["drives"]["directories"] = {"/first/" + std::string(3000, 'a'), "/second/" + std::string(3000, 'b')};
  write("machine.json", machine.dump());
  const auto planned = run("plan --parameters 20e9 --write named.json" + std::string(kOneRank));
  ASSERT_EQ(planned.exit_code, 0) << planned.errors;
  EXPECT_EQ(json_of("named.json")["zero_optimization"]["offload_optimizer"]["nvme_path"],
            machine["drives"]["directories"]);
  machine["drives"]["capacity_gb"] = 100;
  machine["drives"]["directories"] = {"/first", "/second"};
  write("machine.json", machine.dump());
  EXPECT_EQ(run("plan --parameters 20e9" + std::string(kOneRank)).exit_code, 0);
  EXPECT_THAT(json_of("plan.json")["rows"].dump(),
              AllOf(HasSubstr("NVMe at /first/hoist: "), Not(HasSubstr("planned"))));
}

}  // namespace
}  // namespace hoist::plan_test
