// SPDX-License-Identifier: Apache-2.0
// The real program: exit codes, one-line messages, resuming, signals, the report.
#include "program.hpp"

#include <array>
#include <thread>
#include <utility>

#include <hoist/interchange/export.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist::gpt::program_test {
namespace {

TEST_F(Program, RefusesBadInput) {
  write("short", "0123456789abcdef");  // one byte too few for a context of 16
  write("broken.json", "{\n  \"bf16\": {\"enabled\": true},,\n}");
  expect_refused(with(usual(1), "--text", path("none")), "there is no text");
  expect_refused(with(usual(1), "--text", path("short")), "has 16 bytes; a context of 16 needs at least 17");
  expect_refused(with(usual(1), "--config", path("none.json")), "none.json");
  expect_refused(with(usual(1), "--config", path("broken.json")), "broken.json:2:");
  expect_refused(with(usual(1), "--heads", "3"), "does not divide");
  expect_refused(usual(1, {"--stpes", "3"}), "--stpes");
  expect_refused(usual(1, {"--report", path("none/r.json")}), "name another file with --report");
  expect_refused(usual(1, {"--report", "/proc/r.json"}), "name another file with --report");
  expect_refused(usual(1, {"--report", path("text")}), "is the input file, and would be overwritten");
  expect_refused(usual(1, {"--report", path("./config.json")}), "is the input file, and would be overwritten");
  expect_refused(usual(1, {"--units", path("text")}), "is the input file, and would be overwritten");
  expect_refused(usual(1, {"--report", path("store/hoist/rank-00000.manifest")}), "is a file of a store");
  expect_refused({"--config", path("config.json")}, "required");
  EXPECT_FALSE(std::filesystem::exists(path("store"))) << "a refused run left something behind";
}

TEST_F(Program, RefusesAPathWhereNoStoreCanBe) {
  write("store", "a file is in the way");
  const Outcome outcome = run(usual(1));
  EXPECT_EQ(outcome.code, 2) << outcome.error;
  EXPECT_THAT(outcome.error, HasSubstr(path("store")));
  EXPECT_EQ(contents_of(path("store")), "a file is in the way");
}

TEST_F(Program, ABudgetTooSmallNamesTheKey) {
  write_config("config.json", "nvme", "nvme", {{"pinned_memory", "64KiB"}});
  expect_refused(usual(1), "hoist.pinned_memory");
  write_config("config.json", "nvme", "nvme", {{"device_memory", "64KiB"}});
  expect_refused(usual(1), "hoist.device_memory");
}

TEST_F(Program, TheBudgetThatARefusalNamesWorks) {
  for (const std::string key : {"pinned_memory", "device_memory"}) {
    write_config("config.json", "nvme", "nvme", {{key, "64KiB"}});
    const Outcome refused = run(usual(2));
    ASSERT_EQ(refused.code, 2) << refused.error;
    const std::string words = "to at least ";
    const std::size_t at = refused.error.find(words);
    ASSERT_NE(at, std::string::npos) << refused.error;
    write_config("config.json", "nvme", "nvme", {{key, std::stoull(refused.error.substr(at + words.size()))}});
    const Outcome trained = run(usual(2));
    EXPECT_EQ(trained.code, 0) << key << ": " << trained.error;
    std::filesystem::remove_all(path("store"));
  }
}

TEST_F(Program, AGpuIsRefusedWithTheRemedy) {
  write_config("config.json", "nvme", "nvme", {{"device", "cuda"}});
  expect_refused(usual(1),
                 "hoist-gpt computes on the CPU; set hoist.device to \"host\", or train on the GPU from PyTorch");
}

TEST_F(Program, WhatBackwardFindsChangesNoBit) {
  const json recompute = report_of(usual(3));
  remove_store();
  const json keep = report_of(usual(3, {"--activations", "keep"}));
  remove_store();
  const json offload = report_of(usual(3, {"--activations", "offload"}));
  EXPECT_EQ(keep["digest"], recompute["digest"]);
  EXPECT_EQ(offload["digest"], recompute["digest"]);
  // The input of each block, in fp32, down and up in each step.
  const std::uint64_t bytes = 3 * 2 * (2 * 16) * 32 * sizeof(float);
  EXPECT_EQ(offload["offloaded_bytes"], bytes);
  for (const char* link : {"host_to_device", "device_to_host"})
    EXPECT_EQ(offload["links"][link]["bytes"], recompute["links"][link]["bytes"].get<std::uint64_t>() + bytes) << link;
}

TEST_F(Program, TrainsAndReports) {
  const json report = report_of(usual(5));
  ASSERT_TRUE(report.is_object());
  std::vector<std::string> keys;
  for (const auto& [key, value] : report.items()) keys.push_back(key);
  EXPECT_THAT(keys, testing::UnorderedElementsAre("device", "parameters", "world_size", "steps", "digest", "tiers",
                                                  "links", "wait_seconds", "compute_seconds", "offloaded_bytes",
                                                  "tokens_per_step", "communication_to_computation", "committed_step"));
  EXPECT_THAT(report["device"].get<std::string>(), HasSubstr("host"));
  EXPECT_EQ(report["parameters"], 256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32);
  EXPECT_EQ(report["world_size"], 1);
  EXPECT_EQ(report["offloaded_bytes"], 0);
  EXPECT_EQ(report["tokens_per_step"], 2 * 16);
  EXPECT_EQ(report["committed_step"], 5);
  ASSERT_EQ(report["steps"].size(), 5u);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(report["steps"][i]["step"], i + 1);
    EXPECT_GT(report["steps"][i]["seconds"].get<double>(), 0);
    EXPECT_GT(report["steps"][i]["gradient_norm"].get<double>(), 0);
  }
  EXPECT_NEAR(report["steps"][0]["loss"].get<double>(), 5.545, 0.1);
  EXPECT_LT(report["steps"][4]["loss"].get<double>(), report["steps"][0]["loss"].get<double>());
  for (const char* state : {"master", "moment1", "moment2"}) {
    EXPECT_THAT(report["digest"][state].get<std::string>(), testing::MatchesRegex("[0-9a-f]{16}"));
  }
  for (const char* tier : {"device", "pinned", "nvme"}) {
    EXPECT_GT(report["tiers"][tier]["peak_bytes"].get<std::uint64_t>(), 0u) << tier;
    EXPECT_LE(report["tiers"][tier]["peak_bytes"], report["tiers"][tier]["budget_bytes"]) << tier;
  }
  EXPECT_GT(report["links"]["nvme_read"]["bytes"].get<std::uint64_t>(), 0u);
  EXPECT_EQ(report["links"]["wire"]["bytes"], 0);
  const std::string out = contents_of(path("out"));
  for (const char* part :
       {"step 1/5", "step 5/5", "tokens/s", "left", "NVMe read", "formula", "where the time went", "budget"}) {
    EXPECT_THAT(out, HasSubstr(part));
  }
  EXPECT_EQ(contents_of(path("error")), "");
}

// From a scale at which every gradient overflows; stopped and resumed in the middle of its way down and after it.
TEST_F(Program, TrainsInFp16AndResumesWithItsScale) {
  change_config(
      {{"bf16", nullptr},
       {"fp16", {{"enabled", true}, {"initial_scale_power", 28}, {"loss_scale_window", 3}, {"hysteresis", 1}}}});
  const json whole = report_of(usual(16));
  ASSERT_TRUE(whole.is_object());
  int applied = 0;
  for (const json& step : whole["steps"]) applied += step["applied"].get<bool>() ? 1 : 0;
  EXPECT_EQ(whole["steps"][0]["applied"], false);
  EXPECT_TRUE(whole["steps"][0]["gradient_norm"].is_null());
  EXPECT_EQ(whole["steps"][0]["loss_scale"], 1 << 28);
  EXPECT_EQ(whole["steps"][1]["loss_scale"], 1 << 27);
  EXPECT_GE(applied, 4);
  EXPECT_LT(whole["steps"][15]["loss"].get<double>(), whole["steps"][0]["loss"].get<double>());
  EXPECT_EQ(whole["committed_step"], applied);
  EXPECT_THAT(contents_of(path("out")), HasSubstr("skipped, as their gradients were not finite"));
  for (const int stop : {4, 13}) {
    remove_store();
    report_of(usual(stop));
    const json resumed = report_of(usual(16, {"--resume"}));
    EXPECT_EQ(resumed["digest"], whole["digest"]) << "stopped after " << stop;
    EXPECT_EQ(resumed["steps"].back()["loss_scale"], whole["steps"].back()["loss_scale"]);
  }
}

TEST_F(Program, ResumesBitExactly) {
  const json whole = report_of(usual(6));
  for (const auto& [parameters, optimizer] :
       {std::pair{"nvme", "nvme"}, std::pair{"cpu", "nvme"}, std::pair{"none", "nvme"}}) {
    SCOPED_TRACE(parameters);
    remove_store();
    write_config("config.json", parameters, optimizer);
    const Outcome first = run(usual(2, {"--resume"}));
    EXPECT_EQ(first.code, 0) << first.error;
    EXPECT_THAT(first.out, HasSubstr("nothing to resume: no commit yet, starting at step 0"));
    expect_refused(usual(6), "hoist-gpt --resume");
    EXPECT_EQ(run(usual(3, {"--resume"})).code, 0);
    const json resumed = report_of(usual(6, {"--resume"}));
    EXPECT_EQ(resumed["digest"], whole["digest"]);
    EXPECT_EQ(resumed["steps"].size(), 3u);
    EXPECT_EQ(resumed["steps"][2]["loss"], whole["steps"][5]["loss"]);
    EXPECT_EQ(resumed["committed_step"], 6);
  }
}

TEST_F(Program, ARefusalNamesTheMirrorIfOnlyThatHoldsTheRun) {
  const json mirror = {{"mirror", {{"path", path("mirror")}, {"every", 1}}}};
  write_config("config.json", "nvme", "nvme", mirror);
  ASSERT_EQ(run(usual(2)).code, 0);
  remove_store();
  expect_refused(usual(2), "the mirror in " + path("mirror"));
}

TEST_F(Program, SaysIfNothingIsEverCommitted) {
  const auto resume = [&](const char* optimizer, const json& hoist) {
    write_config("config.json", "none", optimizer, hoist);
    const Outcome outcome = run(usual(1, {"--resume"}));
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    return outcome.out;
  };
  EXPECT_THAT(resume("cpu", json::object()),
              HasSubstr("nothing to resume: nothing is ever committed: all state is in memory (set "
                        "hoist.checkpoint_path, or put state on NVMe), starting at step 0"));
  EXPECT_THAT(resume("nvme", {{"durability", "none"}}),
              HasSubstr("nothing to resume: nothing is ever committed (hoist.durability is \"none\"), starting at"));
  EXPECT_THAT(resume("cpu", {{"checkpoint_path", path("kept")}}), HasSubstr("nothing to resume: no commit yet"));
}

// Its manifest is gone: that there is nothing to resume would be untrue.
TEST_F(Program, AStoreThatCannotBeResumedIsNotCalledEmpty) {
  ASSERT_EQ(run(usual(1)).code, 0);
  ASSERT_EQ(std::remove(path("store/hoist/rank-00000.manifest").c_str()), 0);
  const Outcome refused = run(usual(2, {"--resume"}));
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.error, HasSubstr("rank 0 finds data of rank 0, and not their manifest"));
  EXPECT_THAT(refused.out, testing::Not(HasSubstr("nothing to resume")));
}

TEST_F(Program, ARunThatIsDoneOnlyReports) {
  const json whole = report_of(usual(3));
  const json again = report_of(usual(3, {"--resume"}));
  EXPECT_EQ(again["steps"].size(), 0u);
  EXPECT_EQ(again["digest"], whole["digest"]);
  EXPECT_EQ(again["committed_step"], 3);
}

TEST_F(Program, ResumingAnotherRunIsRefused) {
  ASSERT_EQ(run(usual(1)).code, 0);
  expect_refused(usual(2, {"--resume", "--seed", "9"}), "--seed 1, not 9");
  expect_refused(usual(2, {"--resume", "--batch", "3"}), "2 samples a step, not 3");
  write("text", contents_of(path("text")) + "!");
  expect_refused(usual(2, {"--resume"}), "another text");
  const Outcome outcome = run(with(usual(2, {"--resume"}), "--width", "64"));
  EXPECT_EQ(outcome.code, 2) << outcome.error;
}

TEST_F(Program, WithoutNvmeTheEndIsSavedWhereAPathIsGiven) {
  const json whole = report_of(usual(4));
  write_config("config.json", "cpu", "cpu", {{"checkpoint_path", path("store")}});
  remove_store();
  const json first = report_of(usual(2));
  EXPECT_EQ(first["committed_step"], 2);
  const json second = report_of(usual(4, {"--resume"}));
  EXPECT_EQ(second["committed_step"], 4);
  EXPECT_EQ(second["digest"], whole["digest"]);
}

// Returns the last column of the closing table's row for NVMe writes.
std::string written_outside_steps(const std::string& out) {
  std::istringstream row(out.substr(out.find("NVMe write")));
  std::string line, word, last[2];
  std::getline(row, line);
  for (std::istringstream words(line); words >> word;) last[0] = std::exchange(last[1], word);
  return last[0] + " " + last[1];
}

TEST_F(Program, TheTableCountsTheSaveAtTheEndWithAndWithoutAReport) {
  write_config("config.json", "cpu", "cpu", {{"checkpoint_path", path("store")}});
  const Outcome without = run(usual(2));
  ASSERT_EQ(without.code, 0) << without.error;
  const std::string written = written_outside_steps(without.out);
  constexpr double kStateBytes = 12.0 * (256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32);
  EXPECT_THAT(written, testing::EndsWith(" KiB"));
  EXPECT_GE(std::stod(written) * 1024, kStateBytes);
  remove_store();
  report_of(usual(2));
  EXPECT_EQ(written_outside_steps(contents_of(path("out"))), written);

  // On NVMe, too, where steps write as well.
  std::vector<std::string> tables;
  for (const json& durability : {json("step"), json{{"every", 4}}}) {
    remove_store();
    write_config("config.json", "nvme", "nvme", {{"durability", durability}});
    tables.push_back(written_outside_steps(run(usual(2)).out));
  }
  EXPECT_NE(tables[1], tables[0]);
}

TEST_F(Program, AFailedDescriptionOfTheUnitsIsNoFailedReport) {
  expect_refused(usual(1, {"--units", path("none/units.json")}), "name another file with --units");
  const Outcome outcome = run(usual(1, {"--units", "/dev/full"}));
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.error, HasSubstr("name another file with --units"));
}

TEST_F(Program, WithoutAStoreNothingIsCommitted) {
  write_config("config.json", "none", "cpu");
  const json report = report_of(usual(2));
  EXPECT_TRUE(report["committed_step"].is_null());
  EXPECT_EQ(report["links"]["nvme_read"]["bytes"], 0);
}

class RunningProgram : public Program {
 protected:
  // Returns once a step is done.
  pid_t start_training(const std::vector<std::string>& words, const std::function<void()>& first = {}) const {
    const pid_t child = start(words, first);
    wait_until([&] { return contents_of(path("out")).find("step 1/") != std::string::npos; });
    return child;
  }
  void expect_stopped(const Outcome& outcome) const {
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    EXPECT_THAT(outcome.out, HasSubstr("stopped by a signal after step"));
    const json stopped = report();
    EXPECT_EQ(stopped["committed_step"], stopped["steps"].back()["step"]);
  }
  static constexpr int kNever = 1'000'000;  // steps
};

TEST_F(RunningProgram, ASignalEndsTheRunAfterItsStep) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    remove_store();
    const pid_t child = start_training(usual(kNever, {"--report", path("report.json")}));
    for (int i = 0; i < 2; ++i) kill(child, signal);  // as timeout(1) does
    expect_stopped(finish(child));
  }
}

TEST_F(RunningProgram, ASignalThatWasIgnoredAtTheStartStaysIgnored) {
  const pid_t child =
      start_training(usual(kNever, {"--report", path("report.json")}), [] { ::signal(SIGINT, SIG_IGN); });
  kill(child, SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_EQ(waitpid(child, nullptr, WNOHANG), 0) << "the program has ended";
  kill(child, SIGTERM);
  expect_stopped(finish(child));
}

TEST_F(RunningProgram, AReaderOfTheLogThatHasGoneEndsNoTraining) {
  const Outcome outcome = finish(start(usual(30, {"--report", path("report.json")}), {},
                                       {"bash", "-c", R"("$0" "$@" | true; exit ${PIPESTATUS[0]})"}));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_EQ(report()["committed_step"], 30);
}

TEST_F(RunningProgram, ARefusedSecondStartLeavesTheReportToTheFirst) {
  const auto words = usual(kNever, {"--resume", "--report", path("report.json")});
  const pid_t first = start_training(words);
  const pid_t second = test::spawn(
      [&] {
        std::vector<std::string> all = words;
        all.insert(all.begin(), HOIST_GPT);
        return all;
      }(),
      path("second.out"), path("second.error"));
  int status = 0;
  waitpid(second, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 2) << contents_of(path("second.error"));
  kill(first, SIGTERM);
  expect_stopped(finish(first));
}

// --- a mirror --------------------------------------------------------------------------------------------------------

TEST_F(RunningProgram, AMirrorThatFailsAtTheEndIsAWarning) {
  write_config("config.json", "nvme", "nvme", {{"mirror", {{"path", path("mirror")}, {"every", 1'000'000}}}});
  const pid_t child = start_training(usual(1500, {"--report", path("report.json")}));
  kill(child, SIGSTOP);
  std::filesystem::remove_all(path("mirror"));
  write("mirror", "a file is in the way");
  kill(child, SIGCONT);
  const Outcome outcome = finish(child);
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_THAT(outcome.error, HasSubstr("warning: the training is complete, and step 1500 is in " + path("store")));
  EXPECT_THAT(outcome.out, HasSubstr("where the time went"));
  EXPECT_EQ(report()["committed_step"], 1500);
}

// A pipe holds the program up while it writes its report.
TEST_F(RunningProgram, ASignalAfterTheLastStepBeginsNoCopyToTheMirror) {
  write_config("config.json", "nvme", "nvme", {{"mirror", {{"path", path("mirror")}, {"every", 1'000'000}}}});
  const Pipe pipe(path("report.json"));
  const pid_t child = start(usual(200, {"--report", path("report.json")}));
  wait_until([&] { return contents_of(path("out")).find("where the time went") != std::string::npos; });
  kill(child, SIGTERM);
  EXPECT_THAT(pipe.contents(), HasSubstr("\"committed_step\": 200"));
  const Outcome outcome = finish(child);
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  EXPECT_THAT(outcome.out, HasSubstr("no further copy to the mirror in " + path("mirror/hoist")));
}

TEST_F(RunningProgram, AtItsEndItCopiesTheLastStepToTheMirror) {
  write_config("config.json", "cpu", "cpu",
               {{"checkpoint_path", path("store")}, {"mirror", {{"path", path("mirror")}}}});
  const json whole = report_of(usual(3));
  remove_store();
  EXPECT_EQ(report_of(usual(3, {"--resume"}))["digest"], whole["digest"]);
}

TEST_F(RunningProgram, ASlowMirrorHoldsUpNeitherTableNorReport) {
  write_config("config.json", "nvme", "nvme",
               {{"mirror", {{"path", path("mirror")}, {"every", 1}, {"bytes_per_second", "1KB"}}}});
  const pid_t child = start_training(usual(kNever, {"--report", path("report.json")}));
  kill(child, SIGTERM);
  wait_until([&] { return std::filesystem::exists(path("report.json")); });
  EXPECT_EQ(waitpid(child, nullptr, WNOHANG), 0) << "the copy was not slow";
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  kill(child, SIGTERM);
  const Outcome outcome = finish(child);
  EXPECT_EQ(outcome.code, -SIGTERM);
  EXPECT_THAT(outcome.out, HasSubstr("no further copy to the mirror in " + path("mirror/hoist")));
  EXPECT_THAT(outcome.out, HasSubstr("where the time went"));
  EXPECT_THAT(outcome.error, HasSubstr("waiting for the copy of step"));
  const json stopped = report();
  EXPECT_EQ(stopped["committed_step"], stopped["steps"].back()["step"]);
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_F(Program, TheCommandLineWinsAndSaysSoOnce) {
  const Outcome outcome = run(usual(1, {"--batch", "3"}));
  EXPECT_EQ(outcome.code, 0) << outcome.error;
  const std::string note = "--batch 3 wins over train_micro_batch_size_per_gpu 2";
  EXPECT_THAT(outcome.out, HasSubstr(note));
  EXPECT_EQ(outcome.out.find(note), outcome.out.rfind(note));
}

TEST_F(Program, HelpIsPrinted) {
  const Outcome outcome = run({"--help"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.out, HasSubstr("--steps"));
}

// --- weights from elsewhere ------------------------------------------------------------------------------------------

TEST_F(Program, ExportedWeightsBeginAnotherRun) {
  const std::string trained = report_of(usual(3))["digest"]["master"];
  {
    StoredModel model(path("store/hoist"));
    interchange::export_model(std::array{&model}, {.directory = path("weights")});
  }
  remove_store();
  const json begun = report_of(usual(0, {"--init", path("weights"), "--seed", "99"}));
  EXPECT_EQ(begun["digest"]["master"], trained);
  EXPECT_EQ(begun["committed_step"], 0);
  EXPECT_THAT(run(usual(1, {"--resume", "--seed", "99"})).out, HasSubstr("resuming at step 0"));
}

TEST_F(Program, WeightsThatDoNotFitAreRefused) {
  expect_refused(usual(1, {"--init", path("weights")}), path("weights"));
  expect_refused(usual(1, {"--init", path("weights"), "--resume"}), "pass one of them");
  std::filesystem::create_directory(path("weights"));
  expect_refused(usual(1, {"--init", path("weights")}), "there is no .safetensors file");
  write("weights/model.safetensors", "of long training");
  for (const std::string& init : {path("weights"), path("weights/model.safetensors")})
    expect_refused(usual(1, {"--init", init, "--report", path("weights/model.safetensors")}), "is the input file");
}

// hoist check says before a run what the run will hold, and move in each step.
TEST_F(Program, CheckPredictsPeaksAndBytesOfItsConfigurations) {
  struct Case {
    const char *parameters, *optimizer;
    json hoist;
    int micro_batches;
  };
  const Case cases[] = {{"nvme", "nvme", {}, 1},
                        {"nvme", "nvme", {{"device_memory", "1MiB"}, {"pinned_memory", "9MiB"}}, 1},
                        {"nvme", "nvme", {{"update_mode", "step"}}, 2},
                        {"cpu", "nvme", {}, 3},
                        {"cpu", "cpu", {}, 1},
                        {"none", "nvme", {{"durability", "none"}}, 1},
                        {"nvme", "nvme", {{"micro_batch_order", "vertical"}}, 3}};
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.parameters) + " " + c.optimizer + " " + c.hoist.dump());
    remove_store();
    write_config("config.json", c.parameters, c.optimizer, c.hoist.is_null() ? json::object() : c.hoist);
    json config = json::parse(contents_of(path("config.json")));
    config["gradient_accumulation_steps"] = c.micro_batches;
    write("config.json", config.dump());
    ASSERT_EQ(run(usual(1, {"--units", path("units.json")})).code, 0);
    const std::string check = std::string(HOIST_PROGRAM) + " check " + path("config.json") + " --world 1 --units " +
                              path("units.json") + " --json " + path("check.json") + " > /dev/null";
    ASSERT_EQ(std::system(check.c_str()), 0);
    const json predicted = json::parse(contents_of(path("check.json"))).at("prediction");
    const json real = report_of(usual(20));
    const auto within = [&](const char* what, double prediction, double reality) {
      EXPECT_NEAR(prediction, reality, 0.02 * reality) << what;
    };
    within("device", predicted.at("device").at("bytes"), real.at("tiers").at("device").at("peak_bytes"));
    within("pinned", predicted.at("pinned").at("bytes"), real.at("tiers").at("pinned").at("peak_bytes"));
    within("nvme", predicted.at("nvme").at("bytes"), real.at("tiers").at("nvme").at("peak_bytes"));
    // The formula counts no padding, which shows in layers as small as these.
    const double written = real.at("links").at("nvme_write").at("bytes");
    EXPECT_NEAR(20 * predicted.at("step").at("nvme_write").get<double>(), written, 0.1 * written);
  }
}

// hoist plan chooses three placements for three budgets. Each one trains within its budgets, to the same bits.
TEST_F(Program, TrainsWithTheConfigurationThatPlanWrites) {
  // Larger than usual: otherwise everything fits everywhere.
  const auto words = [&](int steps, std::initializer_list<std::string> more) {
    return with(usual(steps, more), "--width", "64");
  };
  const json machine = {{"name", "a small machine"},
                        {"basis", "round figures"},
                        {"nodes", 1},
                        {"gpus_per_node", 0},
                        {"device",
                         {{"memory_gb_per_s", 10},
                          {"host_to_device_gb_per_s", 10},
                          {"device_to_host_gb_per_s", 10},
                          {"compute_tflops", 0.1},
                          {"power_watts", 0}}},
                        {"host", {{"memory_gib", 4}, {"update_gb_per_s", 10}, {"power_watts", 50}}},
                        {"drives",
                         {{"count", 1},
                          {"capacity_gb", 1},
                          {"read_gb_per_s", 1},
                          {"write_gb_per_s", 1},
                          {"directories", {path("store")}}}}};
  write("machine.json", machine.dump());
  write("base.json", R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true},
                         "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}})");
  ASSERT_EQ(run(words(1, {"--units", path("units.json")})).code, 0);
  std::vector<std::string> digests;
  struct Case {
    const char *device_memory, *pinned_memory, *optimizer;
  };
  for (const auto& [device_memory, pinned_memory, optimizer] :
       {Case{"3MiB", "3MiB", "cpu"}, Case{"3MiB", "1400KiB", "none"}, Case{"1MiB", "1400KiB", "nvme"}}) {
    SCOPED_TRACE(optimizer);
    remove_store();
    std::filesystem::remove(path("config.json"));  // which plan would not replace
    const std::string plan = std::string(HOIST_PROGRAM) + " plan " + path("base.json") + " --units " +
                             path("units.json") + " --machine " + path("machine.json") + " --device-memory " +
                             device_memory + " --pinned-memory " + pinned_memory + " --tokens 32 --write " +
                             path("config.json") + " > /dev/null";
    ASSERT_EQ(std::system(plan.c_str()), 0);
    const json config = json::parse(contents_of(path("config.json")));
    EXPECT_EQ(config.at("zero_optimization").at("offload_optimizer").at("device"), optimizer);
    const json trained = report_of(words(3, {}));
    for (const char* tier : {"device", "pinned"}) {
      const json& held = trained.at("tiers").at(tier);
      EXPECT_LE(held.at("peak_bytes"), held.at("budget_bytes")) << tier;
    }
    digests.push_back(trained.at("digest").dump());
  }
  EXPECT_EQ(digests[1], digests[0]);
  EXPECT_EQ(digests[2], digests[0]);
}

TEST_F(Program, MicroBatchesMakeALargerStepAndResumeAsSuch) {
  const json whole = report_of(usual(6, {"--micro-batches", "3"}));
  remove_store();
  ASSERT_EQ(run(usual(3, {"--micro-batches", "3"})).code, 0);
  expect_refused(usual(6, {"--resume"}), "6 samples a step, not 2");
  EXPECT_EQ(report_of(usual(6, {"--micro-batches", "3", "--resume"})).at("digest"), whole.at("digest"));
  write_config("config.json", "cpu", "cpu");
  EXPECT_EQ(report_of(usual(6, {"--micro-batches", "3"})).at("digest"), whole.at("digest"));
}

TEST_F(Program, InVerticalOrderWeightsAndGradientsMoveOnceAStep) {
  change_config({{"zero_optimization", kWeightsComeForEachUse}});
  const json one = report_of(usual(20));
  remove_store();
  const json across = report_of(usual(20, {"--micro-batches", "3"}));
  remove_store();
  const json down = report_of(usual(20, {"--micro-batches", "3", "--vertical"}));
  const auto bytes = [](const json& report, const char* link) {
    return report.at("links").at(link).at("bytes").get<std::uint64_t>();
  };
  EXPECT_EQ(bytes(down, "device_to_host"), bytes(one, "device_to_host"));
  EXPECT_EQ(bytes(across, "device_to_host"), 3 * bytes(down, "device_to_host"));
  EXPECT_EQ(bytes(down, "host_to_device"), bytes(one, "host_to_device"));
  EXPECT_NEAR(static_cast<double>(bytes(across, "host_to_device")) / static_cast<double>(bytes(down, "host_to_device")),
              3, 0.1);
  EXPECT_EQ(down.at("tiers").at("pinned").at("peak_bytes"), one.at("tiers").at("pinned").at("peak_bytes"));
  // The same batches: the first loss is the same, later ones differ by gradients rounded once instead of three times.
  for (std::size_t i = 0; i < 20; ++i) {
    const double here = down.at("steps").at(i).at("loss"), there = across.at("steps").at(i).at("loss");
    EXPECT_NEAR(here, there, i == 0 ? 0 : 0.01) << "step " << i;
  }

  remove_store();
  ASSERT_EQ(run(usual(9, {"--micro-batches", "3", "--vertical"})).code, 0);
  EXPECT_EQ(report_of(usual(20, {"--micro-batches", "3", "--vertical", "--resume"})).at("digest"), down.at("digest"));
  write_config("config.json", "cpu", "cpu", {{"update_mode", "step"}, {"micro_batch_order", "vertical"}});
  EXPECT_EQ(report_of(usual(20, {"--micro-batches", "3"})).at("digest"), down.at("digest"));
}

TEST_F(Program, VerticalActivationsThatDoNotFitAreRefusedWithWhatWorks) {
  write_config("config.json", "nvme", "nvme", {{"device_memory", "1MiB"}});
  ASSERT_EQ(run(usual(1, {"--micro-batches", "64"})).code, 0);
  remove_store();
  expect_refused(usual(1, {"--micro-batches", "64", "--vertical"}), "hoist.device_memory");
}

TEST_F(Program, TheUpdateModeMayChangeBetweenRunsAndChangesNothing) {
  const json forward = report_of(usual(6));
  remove_store();
  write_config("config.json", "nvme", "nvme", {{"update_mode", "step"}});
  ASSERT_EQ(run(usual(3)).code, 0);
  write_config("config.json", "nvme", "nvme", {{"update_mode", "forward"}});
  EXPECT_EQ(report_of(usual(6, {"--resume"})).at("digest"), forward.at("digest"));
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they need address space without end
// Runs the program with soft limits of its own. `limits` are the shell's words.
Outcome run_limited(const std::string& limits, const std::vector<std::string>& words,
                    const test::TempDirectory& directory) {
  std::string command = "ulimit " + limits + " && exec timeout -s KILL 60 " HOIST_GPT;
  for (const std::string& word : words) command += " '" + word + "'";
  command += " >'" + directory / "limited.out" + "' 2>'" + directory / "limited.err" + "'";
  const int status = std::system(command.c_str());
  return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
          .out = contents_of(directory / "limited.out"),
          .error = contents_of(directory / "limited.err")};
}

// OpenBLAS repeats a refused request for memory for ever.
TEST_F(Program, UnderALimitOfAddressSpaceItWorksOrRefusesAtTheStart) {
  bool refused = false, trained = false;
  for (const int mebibytes : {350, 400, 450, 500, 600, 800, 1000, 1500, 3000}) {
    remove_store();
    const Outcome outcome =
        run_limited("-v " + std::to_string(mebibytes * 1024), usual(1, {"--threads", "2"}), directory_);
    EXPECT_TRUE(outcome.code == 0 || outcome.code == 1 || outcome.code == 2)
        << outcome.code << " with " << mebibytes << " MiB: " << outcome.error;
    trained = trained || outcome.code == 0;
    refused = refused || outcome.error.find("OpenBLAS needs 272 MiB of address space") != std::string::npos;
  }
  EXPECT_TRUE(refused);
  EXPECT_TRUE(trained);
}

TEST_F(Program, UnderASmallLimitOfStacksItRefusesAtTheStart) {
  const Outcome outcome = run_limited("-s 64", usual(1), directory_);
  EXPECT_NE(outcome.code, 0);
  EXPECT_THAT(outcome.error, HasSubstr("KiB, and 256 KiB are needed"));
  EXPECT_EQ(run_limited("-s 512", usual(1), directory_).code, 0);
}
#endif

}  // namespace
}  // namespace hoist::gpt::program_test
