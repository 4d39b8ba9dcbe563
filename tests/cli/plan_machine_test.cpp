// SPDX-License-Identifier: Apache-2.0
// The machines that `hoist plan` plans for: from files, assumed, and measured.
#include <cstdlib>
#include <filesystem>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <hoist/core/processors.hpp>
#include <hoist/platform/free_memory.hpp>

#include "plan_fixture.hpp"

namespace hoist::plan_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Nothing has to be typed, and what nobody measured is said.
TEST_F(Plan, WithoutAMachineAssumesOneAndSaysSo) {
  const auto result = run("plan --parameters 1e9 --json plan.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, AllOf(HasSubstr("machine: assumed to be 32 nodes of 8 H100; give --machine"),
                                   HasSubstr("assumed: device.compute_tflops"), Not(HasSubstr("?"))));
  const auto report = json_of("plan.json");
  EXPECT_EQ(best(report)["parameters"], "device");
  EXPECT_GT(row(report, "device", "device")["device"]["least_bytes"], 14ull * 1000 * 1000 * 1000);
  for (const auto& each : report["rows"]) EXPECT_GT(each["seconds"]["expected"], 0.0);
  // The file in the source tree is the same machine.
  const auto named =
      run("plan --parameters 1e9 --world 1 --json named.json --machine " HOIST_SOURCE_DIR "/machines/h100-8x32.json");
  ASSERT_EQ(named.exit_code, 0) << named.errors;
  EXPECT_EQ(json_of("named.json")["rows"], report["rows"]);
}

TEST_F(Plan, EveryMachineFileIsReadAndUsesAllOfItsDevices) {
  for (const auto& [name, world] :
       {std::pair("laptop", 1), {"h200-4-drives", 1}, {"gh200", 1}, {"gb10", 1}, {"h100-8", 8}, {"h100-8x32", 256}}) {
    const auto result = run(fmt::format(
        "plan --parameters 3e9 --tokens 2048 --json plan.json --machine {}/machines/{}.json", HOIST_SOURCE_DIR, name));
    ASSERT_EQ(result.exit_code, 0) << name << result.errors;
    EXPECT_EQ(json_of("plan.json")["world_size"], world) << name;
    EXPECT_NE(json_of("plan.json")["best"], nullptr) << name;
  }
}

// A model whose state fills most of the memory: its device and pinned bytes are together no more than there is.
TEST_F(Plan, AnIntegratedGpuAndItsProcessorsHaveOneBudget) {
  constexpr std::uint64_t kBudget = 119 * kGiB - 119 * kGiB / 10;
  const auto result =
      run("plan --parameters 6e9 --tokens 2048 --json plan.json --write written.json --machine " HOIST_SOURCE_DIR
          "/machines/gb10.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("memory: GPU and processors share one; hoist.device_memory and "
                                       "hoist.pinned_memory are parts of it"));
  bool some_fit = false;
  const auto report = json_of("plan.json");
  for (const auto& each : report["rows"]) {
    if (!each["fits"]) continue;
    some_fit = true;
    const std::uint64_t together =
        each["device"]["bytes"].get<std::uint64_t>() + each["pinned"]["bytes"].get<std::uint64_t>();
    EXPECT_LE(together, kBudget) << each;
  }
  EXPECT_TRUE(some_fit);
  const auto written = json_of("written.json")["hoist"];
  EXPECT_LE(*parse_bytes(written["device_memory"].get<std::string>()) +
                *parse_bytes(written["pinned_memory"].get<std::string>()),
            kBudget);
  // With two memories of the same size the same model has both.
  auto separate = nlohmann::json::parse(test::contents_of(HOIST_SOURCE_DIR "/machines/gb10.json"));
  separate["device"].erase("memory");
  separate["device"]["memory_gib"] = 119;
  write("separate.json", separate.dump());
  ASSERT_EQ(run("plan --parameters 6e9 --tokens 2048 --json separate_plan.json --machine separate.json").exit_code, 0);
  const auto row_of = [&](const char* file) { return row(json_of(file), "device", "pinned"); };
  EXPECT_TRUE(row_of("separate_plan.json")["fits"]);
  EXPECT_GT(row_of("separate_plan.json")["device"]["budget_bytes"].get<std::uint64_t>() +
                row_of("separate_plan.json")["pinned"]["budget_bytes"].get<std::uint64_t>(),
            2 * kBudget - 16 * kGiB);
}

// Each of two budgets has room, and the memory that both are parts of has not.
TEST_F(Plan, SaysWhatOneMemoryLacksForBothBudgets) {
  const auto result = run("plan --parameters 2e9 --json plan.json --machine " HOIST_SOURCE_DIR "/machines/laptop.json");
  const auto both = row(json_of("plan.json"), "device", "pinned");
  EXPECT_EQ(both["fits"], false);
  EXPECT_EQ(both["device"]["fits"], true);
  EXPECT_EQ(both["pinned"]["fits"], true);
  EXPECT_THAT(result.output,
              testing::ContainsRegex("device / pinned .* does not fit: [0-9.]+ GiB too little together"));
}

// The link is seven times as fast as PCIe, so the state may be in the processors' memory.
TEST_F(Plan, ACoherentLinkIsSaidAndUsed) {
  const std::string arguments = " --parameters 20e9 --tokens 16384 --machine " HOIST_SOURCE_DIR "/machines/";
  const auto coherent = run("plan --json gh200.json" + arguments + "gh200.json");
  ASSERT_EQ(coherent.exit_code, 0) << coherent.errors;
  EXPECT_THAT(coherent.output, HasSubstr("reach each other's, at 375 GB/s up and 297 GB/s down"));
  ASSERT_EQ(run("plan --json h200.json" + arguments + "h200-4-drives.json").exit_code, 0);
  const auto seconds = [&](const char* file) {
    return row(json_of(file), "pinned", "pinned")["seconds"]["expected"].get<double>();
  };
  EXPECT_LT(seconds("gh200.json"), seconds("h200.json"));
}

TEST_F(Plan, RefusesMemoryThatAGpuCannotHave) {
  auto machine = nlohmann::json::parse(test::contents_of(HOIST_SOURCE_DIR "/machines/gb10.json"));
  const auto refusal = [&] {
    write("bad.json", machine.dump());
    const auto result = run("plan --parameters 1e9 --machine bad.json");
    EXPECT_EQ(result.exit_code, 2);
    return result.errors;
  };
  machine["device"]["memory_gib"] = 64;
  EXPECT_THAT(refusal(), HasSubstr("device.memory_gib: an integrated GPU has no memory of its own"));
  machine["device"]["memory"] = "unified";
  EXPECT_THAT(refusal(), HasSubstr("device.memory: "));
  machine["device"]["memory"] = 1;
  EXPECT_THAT(refusal(), HasSubstr("\"coherent\""));
}

TEST_F(Plan, RefusesAMachineFileThatIsNotOne) {
  const auto refusal = [&](const nlohmann::json& machine) {
    write("bad.json", machine.dump());
    const auto result = run("plan --parameters 1e9 --machine bad.json");
    EXPECT_EQ(result.exit_code, 2) << machine;
    EXPECT_THAT(result.errors, HasSubstr("bad.json: "));
    return result.errors;
  };
  // Each number that is needed, missing, of another type, and out of range.
  for (const auto& [section, members] : kMachine.items()) {
    if (!members.is_object() || section == "rates" || section == "network") continue;
    for (const auto& [key, value] : members.items()) {
      if (key == "endurance_tb_written") continue;
      nlohmann::json machine = kMachine;
      machine[section].erase(key);
      EXPECT_THAT(refusal(machine), HasSubstr(section + "." + key + ": is missing"));
      for (const nlohmann::json& wrong :
           {nlohmann::json("fast"), nlohmann::json(-1), nlohmann::json(1e300), nlohmann::json({1})}) {
        machine[section][key] = wrong;
        EXPECT_THAT(refusal(machine), HasSubstr(section + "." + key + ": "));
      }
    }
  }
  nlohmann::json machine = kMachine;
  machine["drives"]["read_gib_per_s"] = 6;
  EXPECT_THAT(refusal(machine), HasSubstr("drives.read_gib_per_s: unknown key"));
  machine = kMachine;
  machine["gpus_per_node"] = 1.5;
  EXPECT_THAT(refusal(machine), HasSubstr("gpus_per_node: 1.5 is not an integer from 0 to 64"));
  machine = kMachine;
  machine["assumed"] = {"device.memory"};
  EXPECT_THAT(refusal(machine), HasSubstr("assumed: \"device.memory\" is not a key of a number"));
  machine = kMachine;
  machine["drives"]["directories"] = {"/a", "/b"};
  EXPECT_THAT(refusal(machine), HasSubstr("drives.directories: has 2 directories for 1 drives"));
  machine = kMachine;
  machine.erase("name");
  EXPECT_THAT(refusal(machine), HasSubstr("name: "));
  EXPECT_THAT(refusal(nlohmann::json::array()), HasSubstr("describes a machine"));
  write("twice.json", R"({"nodes": 1, "nodes": 2})");
  EXPECT_THAT(run("plan --parameters 1e9 --machine twice.json").errors, HasSubstr("given twice"));
  write("half.json", R"({"nodes": 1,)");
  EXPECT_THAT(run("plan --parameters 1e9 --machine half.json").errors, HasSubstr("is not JSON"));
  EXPECT_EQ(run("plan --parameters 1e9 --machine missing.json").exit_code, 2);
  EXPECT_THAT(run("plan --parameters 1e9 --machine machine.json --world 9").errors,
              HasSubstr("machine for tests has 8"));
  machine = kMachine;
  machine.erase("network");
  write("alone.json", machine.dump());
  EXPECT_THAT(run("plan --parameters 1e9 --machine alone.json --world 2").errors,
              HasSubstr("network.in_node_gb_per_s"));
}

// Measured once, then read: the second plan takes no time for it.
TEST_F(Plan, MeasuresThisMachineOnceAndWritesAConfigurationForIt) {
  std::filesystem::create_directories(path("drive"));
  // Small enough to take seconds.
  const std::string command = "plan --parameters 3e6 --tokens 64 --machine this --path drive --json plan.json";
  ::setenv("XDG_CACHE_HOME", path("cache").c_str(), 1);
  const auto first = run(command + " --write planned.json");
  ASSERT_EQ(first.exit_code, 0) << first.errors;
  EXPECT_THAT(first.output, AllOf(HasSubstr("measured now; kept in"), HasSubstr("written to planned.json")));
  const std::string cached = test::contents_of(path("cache/hoist/machine.json"));
  EXPECT_THAT(run(command).output, HasSubstr("measured before"));
  EXPECT_EQ(test::contents_of(path("cache/hoist/machine.json")), cached);
  auto full_drive = nlohmann::json::parse(cached);  // as it was then
  full_drive["drives"]["capacity_gb"] = 0.001;
  write("cache/hoist/machine.json", full_drive.dump());
  EXPECT_THAT(run(command).output, Not(HasSubstr("does not fit"))) << "what is free is asked each time";
  write("cache/hoist/machine.json", "{");
  EXPECT_THAT(run(command).output, HasSubstr("measured now")) << "a damaged cache is measured again";
  if (const Processors all = current_processors(); all.size() > 1) {
    bind_current_thread({all.front()});
    EXPECT_THAT(run(command).output, HasSubstr("measured now")) << "other processors have other speeds";
    bind_current_thread(all);
  }
  // Where any user can make files, another one could have put a measurement, or a link to a file of this user's.
  std::filesystem::create_directories(path("shared"));
  const auto without_home =
      run("--version >/dev/null; env -u HOME -u XDG_CACHE_HOME TMPDIR=shared '" HOIST_PROGRAM "' " + command);
  EXPECT_EQ(without_home.exit_code, 0) << without_home.errors;
  EXPECT_THAT(without_home.errors, HasSubstr("is not kept for the next time: neither XDG_CACHE_HOME nor HOME is set"));
  EXPECT_TRUE(std::filesystem::is_empty(path("shared")));
  write("no_folder", "");
  ::setenv("XDG_CACHE_HOME", path("no_folder").c_str(), 1);
  const auto unkept = run(command);
  EXPECT_EQ(unkept.exit_code, 0) << unkept.errors;
  EXPECT_THAT(unkept.errors, HasSubstr("the measurement is not kept"));
  ::unsetenv("XDG_CACHE_HOME");
  EXPECT_TRUE(std::filesystem::is_empty(path("drive"))) << "its files are removed";
  // It is a machine file, and hoist check takes what was written, for this machine and model.
  write("kept.json", cached);
  EXPECT_EQ(run("plan --parameters 3e6 --tokens 64 --machine kept.json").exit_code, 0);
  const auto checked = run("check planned.json --parameters 3e6");
  EXPECT_EQ(checked.exit_code, 0) << checked.errors << checked.output;
}

TEST_F(Plan, OfThisMachineRefusesAPlaceThatCannotBeMade) {
  write("file", "no directory");
  const std::string nvme = fmt::format(R"({{"device": "nvme", "nvme_path": "{}"}})", path("file/store"));
  write("wrong.json", fmt::format(R"({{"zero_optimization": {{"stage": 3, "offload_optimizer": {}}}}})", nvme));
  ::setenv("XDG_CACHE_HOME", path("cache").c_str(), 1);
  const auto planned = run("plan wrong.json --parameters 10M --tokens 64 --machine this --path . --json plan.json");
  ::unsetenv("XDG_CACHE_HOME");
  EXPECT_EQ(planned.exit_code, 0) << planned.errors;  // there are places in memory
  EXPECT_THAT(planned.output, HasSubstr("file is not a directory"));
  EXPECT_THAT(row(json_of("plan.json"), "pinned", "nvme")["refusal"].dump(), HasSubstr("nvme_path: "));
  EXPECT_EQ(row(json_of("plan.json"), "pinned", "pinned")["refusal"], nullptr);
}

// A process under `ulimit -v` has less than the machine, as one beside others has.
TEST_F(Plan, OfThisMachineAsksWhatIsFree) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need terabytes of addresses";
#endif
  std::filesystem::create_directories(path("drive"));
  const auto total = static_cast<double>(platform::host_memory().total_bytes);
  write("half.json",
        fmt::format(R"({{"hoist": {{"device": "host", "device_memory": "512MiB", "pinned_memory": "{:.0f}"}}}})",
                    0.6 * total));
  const std::string command =
      fmt::format("plan half.json --parameters {:.0f} --tokens 64 --machine this --path drive", total / 32);
  ::setenv("XDG_CACHE_HOME", path("cache").c_str(), 1);
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  const rlimit before = limit;
  limit.rlim_cur = static_cast<rlim_t>(total / 2);
  ::setrlimit(RLIMIT_AS, &limit);
  const auto planned = run(command + " --json plan.json");
  ::setrlimit(RLIMIT_AS, &before);
  ::unsetenv("XDG_CACHE_HOME");
  ASSERT_EQ(planned.exit_code, 0) << planned.errors;
  const auto pinned = row(json_of("plan.json"), "pinned", "pinned");
  EXPECT_THAT(planned.output, HasSubstr("more than the machine has free: planned with")) << pinned.dump();
  EXPECT_THAT(pinned["problems"].dump(), HasSubstr("host memory: ")) << planned.output;
}

}  // namespace
}  // namespace hoist::plan_test
