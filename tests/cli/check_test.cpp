// SPDX-License-Identifier: Apache-2.0
// What `hoist check` predicts and refuses, and that no command overwrites a file that it reads.
#include <algorithm>
#include <filesystem>
#include <regex>
#include <sstream>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <hoist/core/units.hpp>
#include <hoist/platform/device.hpp>

#include "program.hpp"

namespace hoist::check_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

class Check : public test::ProgramTest {};

TEST_F(Check, SaysWhatEachTierMustHold) {
  write("good.json",
        R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "nvme"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
            "hoist": {"measured": {"read_bytes_per_second": 2000000000,
            "write_bytes_per_second": 1000000000, "mixed_bytes_per_second": 1000000000}}})");
  write("units.json", R"({"units": [{"name": "a", "parameters": 1000000}, {"name": "b", "parameters": 2e6}]})");
  const auto result = run("check good.json --world 2 --units units.json --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("3000000 parameters (2 units of units.json) on 2 ranks"));
  EXPECT_THAT(result.output, HasSubstr("s a step for the drives at their measured speed"));
  const auto prediction = json_of("report.json")["prediction"];
  EXPECT_EQ(prediction["parameters"], 3000000);
  for (const char* tier : {"device", "pinned"}) {
    EXPECT_EQ(prediction[tier]["fits"], true) << tier;
    EXPECT_GT(prediction[tier]["bytes"], 0) << tier;
  }
  // A half of 3 million parameters, two extents of 12 bytes each.
  EXPECT_GE(prediction["nvme"]["bytes"], 36000000);
  EXPECT_LT(prediction["nvme"]["bytes"], 60000000);
  EXPECT_GT(prediction["least_nvme_seconds"], 0.0);
  EXPECT_THAT(run("check good.json --parameters 7B").output, HasSubstr("7000000000 parameters"));
}

TEST_F(Check, BatchesWhoseProductIsNoNumberAreRefused) {
  write("huge.json",
        R"({"train_batch_size": 4611686018427387904, "train_micro_batch_size_per_gpu": 4611686018427387904})");
  const auto result = run("check huge.json --parameters 1e6 --world 4");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors,
              HasSubstr("is not a multiple of train_micro_batch_size_per_gpu 4611686018427387904 times 4 ranks"));
}

TEST_F(Check, EachStepThatIsKeptTakesTwelveBytesAParameter) {
  const auto nvme_bytes = [&](int kept) {
    write("keeping.json", R"({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
                              "hoist": {"keep_steps": )" +
                              std::to_string(kept) + "}}");
    const auto result = run("check keeping.json --parameters 100M --json report.json");
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    if (kept > 0) {
      EXPECT_THAT(result.output, HasSubstr("; named checkpoints that stay: " + std::to_string(kept)));
    }
    return json_of("report.json")["prediction"]["nvme"]["bytes"].get<double>();
  };
  const double without = nvme_bytes(0);
  EXPECT_NEAR((nvme_bytes(1) - without) / 100e6, 12, 0.1);
  EXPECT_NEAR((nvme_bytes(3) - without) / 100e6, 36, 0.3);
}

// Its file system must have room, beside the store's where both are on one.
TEST_F(Check, AMirrorTakesTheSpaceOfAStore) {
  const auto report = [&](const std::string& hoist, const char* size) {
    write("mirrored.json", R"({"hoist": {"checkpoint_path": ")" + path("store") + "\"" + hoist + "}}");
    const auto result = run(fmt::format("check mirrored.json --parameters {} --json report.json", size));
    auto json = json_of("report.json");
    json["exit_code"] = result.exit_code;
    return json;
  };
  const std::string mirror = R"(, "mirror": {"path": ")" + path("mirror") + "\"}";
  const auto without = report("", "1e6"), with = report(mirror, "1e6");
  EXPECT_EQ(without["prediction"]["mirror"]["bytes"], 0);
  EXPECT_NEAR(with["prediction"]["mirror"]["bytes"].get<double>(), 24e6, 1e6);
  EXPECT_EQ(with["exit_code"], 0);
  const auto drive = [](const nlohmann::json& of) { return of["machine"]["memories"].back(); };
  EXPECT_THAT(drive(with)["name"].get<std::string>(), ContainsRegex("NVMe at .*store/hoist and mirror at"));
  EXPECT_NEAR(drive(with)["bytes"].get<double>() - drive(without)["bytes"].get<double>(), 24e6 + 12e6, 2e6);
  // A machine file does not say where a mirror is.
  EXPECT_THAT(run("check mirrored.json --parameters 1e6").output,
              AllOf(Not(HasSubstr("its space is not known")), HasSubstr("twice as much to go on from it")));
  EXPECT_THAT(
      run("check mirrored.json --parameters 1e6 --machine " HOIST_SOURCE_DIR "/machines/workstation.json").output,
      ContainsRegex("mirror +2.* MiB +its space is not known"));
  // A parameter takes 24 bytes in a store, 36 in a store with a mirror, and 60 in the two together. The remedy is the
  // one for the first that does not fit.
  const auto problems = [&](const std::string& hoist, double bytes_a_parameter) {
    const auto free_bytes = static_cast<double>(std::filesystem::space(path("")).available);
    const auto json = report(hoist, fmt::format("{:.0f}", free_bytes / bytes_a_parameter).c_str());
    return json["machine"]["problems"].dump();
  };
  EXPECT_THAT(problems(mirror, 48), HasSubstr("another drive in hoist.mirror.path"));
  EXPECT_THAT(problems(mirror, 30), HasSubstr("a larger drive in hoist.checkpoint_path"));
  EXPECT_THAT(problems("", 20), HasSubstr("a larger drive in hoist.checkpoint_path"));
}

TEST_F(Check, NamesThePinnedFractionThatTheBudgetHasRoomFor) {
  write("nvme.json", R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                         "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
                         "hoist": {"pinned_memory": "1GiB"}})");
  const auto result = run("check nvme.json --parameters 100M --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  // 1 GiB less 400 MB of weights and gradients, and the buffers: of 1000 MB of state.
  const double most = json_of("report.json")["prediction"]["optimizer_pinned_fraction_max"];
  EXPECT_GT(most, 0.5);
  EXPECT_LT(most, 0.68);
  std::ostringstream sentence;
  sentence << "hoist.optimizer_pinned_fraction up to " << most;
  EXPECT_THAT(result.output, HasSubstr(sentence.str()));

  write("open.json", R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                         "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
                         "hoist": {"pinned_memory": "1GiB", "optimizer_pinned_fraction": "auto"}})");
  const auto open = run("check open.json --parameters 100M --json open-report.json");
  EXPECT_EQ(open.exit_code, 0) << open.errors;
  EXPECT_EQ(json_of("open-report.json")["placement"]["optimizer_pinned_fraction"], "auto");
  EXPECT_EQ(json_of("open-report.json")["prediction"]["optimizer_pinned_fraction"], most);
}

TEST_F(Check, NamesTheShareOfWeightsThatTheBudgetHasRoomFor) {
  write("nvme.json", R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "nvme"},
                         "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
                         "hoist": {"pinned_memory": "400MiB"}})");
  const auto result = run("check nvme.json --parameters 100M --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  // 400 MiB less 200 MB of gradients, and the buffers: of 200 MB of weights.
  const double most = json_of("report.json")["prediction"]["parameters_pinned_fraction_max"];
  EXPECT_GT(most, 0.3);
  EXPECT_LT(most, 0.99);
  std::ostringstream sentence;
  sentence << "hoist.parameters_pinned_fraction up to " << most;
  EXPECT_THAT(result.output, HasSubstr(sentence.str()));

  write("limited.json",
        R"({"zero_optimization": {"stage": 3,
                                  "offload_param": {"device": "nvme", "nvme_path": "nvme", "max_in_cpu": 5e7},
            "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}}, "hoist": {"pinned_memory": "1GiB"}})");
  const auto limited = run("check limited.json --parameters 100M --json limited-report.json");
  EXPECT_EQ(limited.exit_code, 0) << limited.errors;
  EXPECT_THAT(limited.output, HasSubstr("at most 50000000 elements of a rank"));
  EXPECT_THAT(limited.output, HasSubstr("max_in_cpu: 0.50 of the weights are in pinned memory"));
  EXPECT_THAT(limited.output, Not(HasSubstr("\"auto\"")));
  EXPECT_EQ(json_of("limited-report.json")["placement"]["parameters_pinned_fraction"], "auto");
  EXPECT_NEAR(json_of("limited-report.json")["prediction"]["pinned_weight_share"].get<double>(), 0.5, 0.01);
}

TEST_F(Check, TheSharesThatTheBudgetHasRoomForFitWhenTheyAreSet) {
  const auto check = [&](const std::string& shares) {
    write("nvme.json", R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "nvme"},
                           "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
                           "hoist": {"pinned_memory": "400MiB")" +
                           shares + "}}");
    return run("check nvme.json --parameters 100M");
  };
  const std::string output = check("").output;
  const std::regex share(R"(hoist\.(\w+_pinned_fraction) (may be|up to) ([0-9.]+))");
  std::string together;
  std::size_t count = 0;
  for (std::sregex_iterator found(output.begin(), output.end(), share), end; found != end; ++found, ++count) {
    const std::string setting = fmt::format(", \"{}\": {}", found->str(1), found->str(3));
    EXPECT_EQ(check(setting).exit_code, 0) << setting;
    together += setting;
  }
  EXPECT_EQ(count, 2u) << output;
  const bool is_choice = output.find("the pinned budget allows more, of one of these two: ") != std::string::npos;
  EXPECT_TRUE(is_choice || check(together).exit_code == 0) << output;
}

TEST_F(Check, SaysWhatOfTheStateIsOnTheDeviceAndWhichShareFits) {
  const auto check = [&](const char* ratio, const char* device_memory) {
    write("ratio.json", std::string(R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu",
                                        "ratio": )") +
                            ratio + R"(}}, "hoist": {"device_memory": ")" + device_memory + "\"}}");
    const auto result = run("check ratio.json --parameters 100M --json report.json");
    EXPECT_EQ(result.exit_code, json_of("report.json")["machine"]["fits"] == true ? 0 : 2) << result.errors;
    return result.output;
  };
  const std::string divided = check("0.25", "4GiB");
  auto prediction = json_of("report.json")["prediction"];
  EXPECT_EQ(json_of("report.json")["placement"]["optimizer_offload_ratio"], 0.25);
  const double share = prediction["device_state"]["share"];
  EXPECT_GT(share, 0.65);
  EXPECT_LE(share, 0.75);
  EXPECT_NEAR(prediction["device_state"]["bytes"].get<double>(), share * 1e9, 1e7);
  EXPECT_EQ(prediction["fitting_offload_ratio"], nullptr);
  EXPECT_NEAR(prediction["step"]["host_to_device"].get<double>(), (1 - share) * 2e8, 1e6);
  EXPECT_THAT(divided, HasSubstr("are in device memory and updated there"));

  EXPECT_THAT(check("0", "700MiB"), HasSubstr("allows less: zero_optimization.offload_optimizer.ratio 0."));
  const double fits = json_of("report.json")["prediction"]["fitting_offload_ratio"];
  check(std::to_string(fits).c_str(), "700MiB");
  prediction = json_of("report.json")["prediction"];
  EXPECT_EQ(prediction["device"]["fits"], true);
  EXPECT_EQ(prediction["fitting_offload_ratio"], nullptr);
}

TEST_F(Check, EndsWithWhetherTheModelFitsThisMachine) {
  write("plain.json", R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
                                                "offload_param": {"device": "cpu"}}})");
  const auto fits = run("check plain.json --parameters 1e6 --json report.json");
  EXPECT_EQ(fits.exit_code, 0) << fits.errors;
  EXPECT_THAT(fits.output, HasSubstr("fits this machine"));
  auto report = json_of("report.json");
  EXPECT_EQ(report["machine"]["fits"], true);
  EXPECT_EQ(report["machine"]["limiting"], nullptr);
  EXPECT_THAT(report["choices"].dump(), HasSubstr("hoist.device"));

  // The section to paste has the values that it would use, and fits, too.
  nlohmann::json pasted = nlohmann::json::parse(R"({"zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}})");
  pasted["hoist"] = report["section"];
  write("pasted.json", pasted.dump());
  const auto again = run("check pasted.json --parameters 1e6 --json pasted-report.json");
  EXPECT_EQ(again.exit_code, 0) << again.output << again.errors;
  const auto choices = json_of("pasted-report.json")["choices"];
  ASSERT_EQ(choices.size(), 1u) << choices;
  EXPECT_EQ(choices[0]["key"], "hoist.device");
  EXPECT_EQ(json_of("pasted-report.json")["prediction"]["pinned"]["bytes"], report["prediction"]["pinned"]["bytes"]);

  const auto too_large = run("check plain.json --parameters 1e12 --world 2 --json report.json");
  EXPECT_EQ(too_large.exit_code, 2);
  EXPECT_THAT(too_large.output, HasSubstr("2 ranks on this machine hold together"));
  EXPECT_THAT(too_large.output, HasSubstr("DOES NOT FIT this machine"));
  EXPECT_THAT(too_large.output, HasSubstr("offload_optimizer with device \"nvme\" needs less"));
  report = json_of("report.json");
  EXPECT_EQ(report["accepted"], true);
  EXPECT_EQ(report["machine"]["fits"], false);
  EXPECT_EQ(report["section"], nullptr);
}

TEST_F(Check, NamesTheProgramWhereNoPlacementHelps) {
  write("file.json", R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "n"},
                         "offload_optimizer": {"device": "nvme", "nvme_path": "n"}}, "hoist": {"device": "host"}})");
  write("units.json", R"({"units": [{"name": "a", "parameters": 5}], "program_device_bytes": 1e13})");
  const auto result = run("check file.json --units units.json");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output,
              HasSubstr(" free; the program's own memory is 9.1 TiB of it: use more memory, or a smaller "
                        "program_device_bytes\n"));
}

TEST_F(Check, TheSectionToPasteIsAcceptedWithTheSameVerdict) {
  for (const char* text :
       {"{}", R"({"zero_optimization": {"stage": 2}})",
        R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})",
        R"({"hoist": {"device": "host", "pinned_memory": "3000001KiB"}})",
        R"({"hoist": {"device": "host", "device_memory": "2000001KiB", "pinned_memory": 4096}})",
        R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}},
            "hoist": {"optimizer_pinned_fraction": "auto", "parameters_pinned_fraction": "auto"}})",
        R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}})"}) {
    for (const std::string machine : {"", " --machine " HOIST_SOURCE_DIR "/machines/gb10.json"}) {
      SCOPED_TRACE(text + machine);
      write("file.json", text);
      ASSERT_EQ(run("check file.json --parameters 1e8 --json report.json" + machine).exit_code, 0);
      nlohmann::json pasted = nlohmann::json::parse(text);
      const auto report = json_of("report.json");
      for (const auto& [key, value] : report["section"].items()) pasted["hoist"][key] = value;
      write("pasted.json", pasted.dump());
      const auto result = run("check pasted.json --parameters 1e8 --json pasted-report.json" + machine);
      EXPECT_EQ(result.exit_code, 0) << pasted << result.output << result.errors;
      EXPECT_EQ(json_of("pasted-report.json")["section"], report["section"]);
      EXPECT_EQ(json_of("pasted-report.json")["placement"], report["placement"]);
      EXPECT_EQ(report["section"].contains("device"), pasted["hoist"].contains("device"));
    }
  }
}

// Memory that a plan fills to the last byte is divided into two budgets of whole blocks, and the plan still fits.
TEST_F(Check, TheSectionToPasteIsAcceptedForEverySizeOfOneMemory) {
  nlohmann::json file = nlohmann::json::parse(R"({"zero_optimization": {"stage": 3,
      "offload_param": {"device": "nvme", "nvme_path": "/n"}, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}},
      "hoist": {"device": "host", "optimizer_pinned_fraction": "auto", "parameters_pinned_fraction": "auto"}})");
  write("file.json", file.dump());
  nlohmann::json machine = nlohmann::json::parse(test::contents_of(HOIST_SOURCE_DIR "/machines/laptop.json"));
  const std::string arguments = " --parameters 1e9 --machine machine.json --json report.json";
  int fitting = 0;
  for (int size = 0; size < 40; ++size) {
    machine["host"]["memory_gib"] = 3.0 + 0.0411 * size;
    write("machine.json", machine.dump());
    if (run("check file.json" + arguments).exit_code != 0) continue;
    ++fitting;
    const auto report = json_of("report.json");
    nlohmann::json pasted = file;
    pasted["hoist"].update(report["section"]);
    write("pasted.json", pasted.dump());
    EXPECT_EQ(run("check pasted.json" + arguments).exit_code, 0) << machine["host"] << report["section"];
    EXPECT_GE(json_of("report.json")["prediction"]["optimizer_pinned_fraction"],
              report["prediction"]["optimizer_pinned_fraction"]);
  }
  EXPECT_GT(fitting, 30);
}

// The file cannot raise what the machine does not have.
TEST_F(Check, ABudgetThatWasChosenCannotBeRaised) {
  write("plain.json", R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})");
  const auto result = run("check plain.json --parameters 1e12 --machine " HOIST_SOURCE_DIR "/machines/h100-8.json");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, ContainsRegex("does not fit: a node of 8 H100 has [0-9.]+ GiB for each rank"));
  EXPECT_THAT(result.output, Not(HasSubstr("raise it")));
}

TEST_F(Check, SaysWhatASubGroupSizeOfDeepSpeedCosts) {
  const auto check = [&](const char* size) {
    write("file.json", fmt::format(R"({{"zero_optimization": {{"stage": 3, "sub_group_size": {},
        "offload_param": {{"device": "nvme", "nvme_path": "nvme"}},
        "offload_optimizer": {{"device": "nvme", "nvme_path": "nvme"}}}}}})",
                                   size));
    const auto result =
        run("check file.json --parameters 7e9 --world 1 --machine " HOIST_SOURCE_DIR "/machines/h200-4-drives.json");
    EXPECT_EQ(result.exit_code, 0) << result.output;
    return result.output;
  };
  EXPECT_THAT(check("1e9"),
              ContainsRegex("sub_group_size 1000000000 takes pinned memory: .* would be held without the key"));
  EXPECT_THAT(check("\"auto\""), Not(HasSubstr("takes pinned memory")));
}

TEST_F(Check, CountsAFileSystemOnceAndOnlyTheStoresOwnFiles) {
  const auto drives = [&](const std::string& paths) {
    write("file.json", fmt::format(R"({{"zero_optimization": {{"stage": 3, "offload_optimizer": {{"device": "nvme",
        "nvme_path": {}}}}}}})",
                                   paths));
    run("check file.json --parameters 1e8 --json report.json");
    const auto report = json_of("report.json");
    for (const auto& memory : report["machine"]["memories"])
      if (memory["name"].get<std::string>().starts_with("NVMe")) return memory;
    return nlohmann::json{{"bytes", 0}, {"free_bytes", 0}};
  };
  const std::string one = '"' + path("a") + '"', two = fmt::format("[{}, \"{}\"]", one, path("b"));
  const auto alone = drives(one), both = drives(two);
  EXPECT_GT(alone["bytes"], 2'400'000'000) << "24 bytes a parameter";
  EXPECT_LT(both["free_bytes"].get<double>(), 1.5 * alone["free_bytes"].get<double>());
  std::filesystem::create_directories(path("a/hoist"));
  write("a/hoist/notes.txt", std::string(1 << 20, 'x'));
  EXPECT_EQ(drives(one)["bytes"], alone["bytes"]);
  write("a/hoist/rank-00000.data", std::string(1 << 20, 'x'));
  EXPECT_NEAR(alone["bytes"].get<double>() - drives(one)["bytes"].get<double>(), 1 << 20, 1 << 16);
}

TEST_F(Check, BudgetsOfTheCommandLineWin) {
  write("plain.json", R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                          "hoist": {"device": "host", "pinned_memory": "1TiB"}})");
  const auto result =
      run("check plain.json --parameters 100M --device-memory 1GiB --pinned-memory 64MiB --json report.json");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, HasSubstr("does not fit: hoist.pinned_memory is 64.0 MiB, raise it"));
  EXPECT_THAT(result.output, HasSubstr("hoist.pinned_memory is 64.0 MiB: raise it"));
  EXPECT_EQ(json_of("report.json")["budgets"]["pinned"], 64 << 20);
}

TEST_F(Check, WithoutAGpuACudaConfigurationDoesNotFit) {
  if (platform::cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  for (const char* const place : {R"("cpu")", R"("nvme", "nvme_path": "nvme")"}) {
    write("gpu.json", fmt::format(R"({{"zero_optimization": {{"stage": 3, "offload_optimizer": {{"device": {}}}}},
                                      "hoist": {{"device": "cuda", "device_memory": "1GiB"}}}})",
                                  place));
    const auto result = run("check gpu.json --parameters 1e6 --json report.json");
    EXPECT_EQ(result.exit_code, 2) << place;
    EXPECT_THAT(result.output, HasSubstr("there is no GPU"));
  }
}

TEST_F(Check, RefusesWhatEveryEngineWould) {
  write("gpu.json", R"({"hoist": {"device": "cuda", "moments_dtype": "fp8"}})");
  const auto result = run("check gpu.json --json report.json");
  EXPECT_EQ(result.exit_code, 2) << result.output;
  EXPECT_THAT(result.errors, HasSubstr("hoist.moments_dtype: optimizer states on a GPU"));
  EXPECT_THAT(result.errors, HasSubstr("1 problem in gpu.json"));
  EXPECT_EQ(json_of("report.json")["problems"][0]["key"], "hoist.moments_dtype");
}

// "auto" fills a budget that the machine does not have; the budget that is named instead fits.
TEST_F(Check, NamesABudgetThatTheMachineHas) {
  const auto file = [&](const nlohmann::json& budgets) {
    nlohmann::json text = nlohmann::json::parse(R"({"zero_optimization": {"stage": 3, "offload_optimizer":
        {"device": "nvme", "nvme_path": "/n"}}, "hoist": {"optimizer_pinned_fraction": "auto"}})");
    text["hoist"].update(budgets);
    write("file.json", text.dump());
  };
  for (const char* name : {"workstation", "laptop"}) {
    SCOPED_TRACE(name);
    const bool is_shared = name == std::string("laptop");
    const std::string arguments = fmt::format(" --parameters {} --json report.json --machine {}/machines/{}.json",
                                              is_shared ? "4e9" : "7e9", HOIST_SOURCE_DIR, name);
    file(is_shared ? nlohmann::json{{"device_memory", "10GiB"}, {"pinned_memory", "500GiB"}}
                   : nlohmann::json{{"pinned_memory", "500GiB"}});
    const auto result = run("check file.json" + arguments);
    EXPECT_EQ(result.exit_code, 2);
    const std::string keys = is_shared ? "hoist.device_memory and hoist.pinned_memory together" : "hoist.pinned_memory";
    std::smatch found;
    ASSERT_TRUE(std::regex_search(result.output, found, std::regex("free; lower " + keys + " to (\\d+)MiB")))
        << result.output;
    EXPECT_THAT(result.output, Not(HasSubstr("needs less")));
    // A plan has a budget of its own then, and writes it.
    const std::string written = name + std::string("-written.json");
    const auto planned = run("plan file.json --tokens 1024 --write " + written + arguments);
    EXPECT_EQ(planned.exit_code, 0) << planned.output << planned.errors;
    EXPECT_THAT(planned.output, HasSubstr("hoist.pinned_memory is 500 GiB, more than the machine has free"));
    EXPECT_EQ(run("check " + written + arguments).exit_code, 0);

    const std::uint64_t named = std::stoull(found[1]);
    const std::uint64_t pinned = is_shared ? named - 10 * 1024 : named;
    nlohmann::json budgets{{"pinned_memory", fmt::format("{}MiB", pinned)}};
    if (is_shared) budgets["device_memory"] = "10GiB";
    file(budgets);
    EXPECT_EQ(run("check file.json" + arguments).exit_code, 0);
    // Less would do, too, down to the least.
    const std::uint64_t least = json_of("report.json")["prediction"]["pinned"]["least_bytes"];
    budgets["pinned_memory"] = round_up(least, kBlockAlignment);
    file(budgets);
    EXPECT_EQ(run("check file.json" + arguments).exit_code, 0);
    budgets["pinned_memory"] = round_up(least, kBlockAlignment) - kBlockAlignment;
    file(budgets);
    EXPECT_EQ(run("check file.json" + arguments).exit_code, 2);
  }
}

// On a machine with GPUs, as on one without.
TEST_F(Check, OffloadsTheStatesOfOffloadedWeights) {
  write("weights.json",
        R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true}}})");
  const std::string machine = std::string(" --machine ") + HOIST_SOURCE_DIR + "/machines/h100-8.json";
  const auto result = run("check weights.json --parameters 7e9 --all" + machine);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("optimizer states are offloaded to \"cpu\", as "));
  EXPECT_THAT(result.output, ContainsRegex("offload_optimizer[.]device +\"cpu\""));
}

TEST_F(Check, ShowsASettingAsAFileSaysIt) {
  write("rare.json",
        R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"}},
                         "hoist": {"durability": {"every": 50}}})");
  const auto result = run("check rare.json --all --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, ContainsRegex("hoist[.]durability +\\{\"every\": 50\\} +line 2"));
  const auto settings = json_of("report.json")["settings"];
  const auto found = std::ranges::find(settings, "hoist.durability", [](const auto& s) { return s["key"]; });
  ASSERT_NE(found, settings.end());
  EXPECT_EQ((*found)["value"], nlohmann::json({{"every", 50}}));
}

TEST_F(Check, AReportNeverReplacesWhatIsRead) {
  write("good.json", "{}");
  write("units.json", R"({"units": [{"name": "a", "parameters": 100}]})");
  for (const char* arguments :
       {"check good.json --json ./good.json", "plan good.json --parameters 1e6 --json good.json",
        "check good.json --units units.json --json units.json", "check good.json --model units.json --json units.json",
        "plan --model units.json --json units.json"}) {
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.errors, HasSubstr("would be overwritten")) << arguments;
  }
  EXPECT_EQ(test::contents_of(path("good.json")), "{}");
}

TEST_F(Check, TwoOutputsNeverShareAFile) {
  std::filesystem::create_directory(path("d"));
  for (const char* arguments :
       {"plan --parameters 1e6 --write x.json --json x.json",
        "plan --parameters 1e6 --write ./d/../x.json --json x.json", "tune --path d --out x.json --json ./x.json",
        "tune --path d --out x.json --plot x.json", "tune --path d --plot x.json --json \"$PWD/x.json\""}) {
    for (const bool exists : {false, true}) {
      if (exists) write("x.json", "{}");
      const auto result = run(arguments);
      EXPECT_EQ(result.exit_code, 2) << arguments;
      EXPECT_THAT(result.errors, HasSubstr("same file")) << arguments;
      EXPECT_EQ(std::filesystem::exists(path("x.json")), exists) << arguments;
      std::filesystem::remove(path("x.json"));
    }
  }
  write("x.json", "{}");
  std::filesystem::create_symlink("x.json", path("link"));
  EXPECT_EQ(run("plan --parameters 1e6 --write link --json x.json").exit_code, 2);
  EXPECT_EQ(run("plan --parameters 1e6 --write z.json --json y.json").exit_code, 0);
}

TEST_F(Check, RefusesMoreLocalRanksThanRanks) {
  write("good.json", "{}");
  const auto result = run("check good.json --local-ranks 16 --world 8");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("--local-ranks 16: --world is 8"));
  for (const char* ranks : {"--local-ranks 8 --world 8", "--local-ranks 16"})
    EXPECT_EQ(run(std::string("check good.json ") + ranks).exit_code, 0) << ranks;
}

TEST_F(Check, PrintsTheSchema) {
  EXPECT_EQ(run("check --print-schema").output,
            test::contents_of(std::string(HOIST_SOURCE_DIR) + "/docs/hoist.schema.json"));
}

// A run's length of "auto" is the trainer's business; the ranks are as many as the machine has devices.
TEST_F(Check, ChecksForTheMachineOfAFile) {
  write("auto.json", R"({"zero_optimization": {"stage": 3}, "scheduler": {"type": "WarmupDecayLR", "params":
      {"total_num_steps": "auto", "warmup_num_steps": "auto"}}})");
  const std::string machine = " --machine " HOIST_SOURCE_DIR "/machines/h100-8.json";
  const auto fits = run("check auto.json --parameters 13e9 --json report.json" + machine);
  EXPECT_EQ(fits.exit_code, 0) << fits.output << fits.errors;
  EXPECT_THAT(fits.output, HasSubstr("total_num_steps \"auto\" is left to a trainer"));
  EXPECT_THAT(fits.output, HasSubstr("8 ranks on a node of 8 H100 hold together"));
  EXPECT_THAT(fits.output, HasSubstr("fits a node of 8 H100"));
  EXPECT_EQ(json_of("report.json")["machine"]["name"], "a node of 8 H100");
  const auto two = run("check auto.json --parameters 13e9 --world 2" + machine);
  EXPECT_EQ(two.exit_code, 2) << "182 GB of 14 bytes a parameter on two GPUs";
  EXPECT_THAT(two.output, HasSubstr("DOES NOT FIT a node of 8 H100"));
  for (const char* wrong : {" --machine missing.json", " --machine auto.json"})
    EXPECT_THAT(run("check auto.json --parameters 1e9" + std::string(wrong)).exit_code, 2) << wrong;
  EXPECT_EQ(run("check auto.json --parameters 1e9 --world 9" + machine).exit_code, 2) << "there are 8 GPUs";
}

}  // namespace
}  // namespace hoist::check_test
