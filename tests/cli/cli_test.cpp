// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "program.hpp"

namespace hoist::cli_test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class Cli : public test::ProgramTest {};

constexpr const char* kGood = R"({
  "train_batch_size": 32,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "overlap_comm": true,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
    "stage3_prefetch_bucket_size": "auto"
  },
  "hoist": {"device_memory": "2GiB"}
}
)";

TEST_F(Cli, VersionAndHelpAreNoErrors) {
  EXPECT_EQ(run("--version").exit_code, 0);
  EXPECT_EQ(run("--version").output, "hoist " HOIST_VERSION "\n");
  const auto help = run("--help");
  EXPECT_EQ(help.exit_code, 0);
  for (const char* command : {"check", "inspect", "doctor"}) {
    EXPECT_THAT(help.output, HasSubstr(command));
    const auto own = run(std::string(command) + " --help");
    EXPECT_EQ(own.exit_code, 0);
    EXPECT_THAT(own.output, HasSubstr("Example: hoist " + std::string(command)));
    EXPECT_THAT(own.output, HasSubstr("--json"));
  }
}

TEST_F(Cli, BadCommandLinesAreBadInput) {
  for (const char* arguments : {"", "nonsense", "check", "inspect", "check --no-such-option", "check a b",
                                "doctor extra", "check a.json --world-size 0", "check a.json --world-size many"}) {
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.errors, Not(IsEmpty())) << arguments;
  }
}

TEST_F(Cli, AWordThatIsNoCommandIsNamed) {
  for (const char* arguments : {"chekc a.json", "bench disk --path .", "help"}) {
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.errors,
                AnyOf(HasSubstr("no command `chekc`; the commands are check, plan"),
                      HasSubstr("no command `disk`; the commands are io, optimizer"), HasSubstr("no command `help`")))
        << arguments;
  }
}

TEST_F(Cli, ADashAfterJsonIsStandardOutput) {
  write("good.json", kGood);
  auto result = run("check good.json --json -");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_TRUE(nlohmann::json::parse(result.output)["accepted"]);
  EXPECT_THAT(result.errors, HasSubstr("good.json: accepted"));
  EXPECT_FALSE(std::filesystem::exists(path("-")));
  result = run("plan --parameters 1e9 --json -");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_TRUE(nlohmann::json::accept(result.output));
}

TEST_F(Cli, CheckSaysWhatAConfigurationWillDo) {
  write("good.json", kGood);
  const auto result = run("check good.json --world-size 4 --all --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("good.json: accepted"));
  EXPECT_THAT(result.output, HasSubstr("/local_nvme/hoist"));
  EXPECT_THAT(result.output, HasSubstr("2.0 GiB"));
  EXPECT_THAT(result.output, HasSubstr("batch: 32 samples = 8 a rank x 1 accumulation x 4 ranks"));
  EXPECT_THAT(result.output, HasSubstr("\"auto\" in line 9"));
  EXPECT_THAT(result.output, HasSubstr("overlap_comm"));

  const auto report = json_of("report.json");
  EXPECT_EQ(report["accepted"], true);
  EXPECT_EQ(report["placement"]["parameters"], "pinned");
  EXPECT_EQ(report["placement"]["optimizer"], "nvme");
  EXPECT_EQ(report["placement"]["durability"], "step");
  EXPECT_EQ(report["budgets"]["device"], 2147483648u);
  EXPECT_EQ(report["training"]["train_micro_batch_size_per_gpu"], 8);
  ASSERT_EQ(report["warnings"].size(), 1u);
  bool found = false;
  for (const auto& setting : report["settings"]) {
    if (setting["key"] != "zero_optimization.stage3_prefetch_bucket_size") continue;
    EXPECT_EQ(setting["source"], "auto");
    EXPECT_EQ(setting["value"], 50000000);
    EXPECT_EQ(setting["line"], 9);
    found = true;
  }
  EXPECT_TRUE(found);
}

TEST_F(Cli, CheckReportsEveryProblemAtOnce) {
  write("bad.json",
        "{\n  \"zero_optimization\": {\"stage\": 4, \"ofload_param\": {}},\n  \"aio\": {\"queue_depth\": 0}\n}\n");
  const auto result = run("check bad.json --json report.json");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.output, IsEmpty());
  EXPECT_THAT(result.errors, HasSubstr("(bad.json:2:34)"));
  EXPECT_THAT(result.errors, HasSubstr("did you mean \"offload_param\"?"));
  EXPECT_THAT(result.errors, HasSubstr("aio.queue_depth: 0 is not"));
  EXPECT_THAT(result.errors, HasSubstr("3 problems in bad.json"));
  const auto report = json_of("report.json");
  EXPECT_EQ(report["accepted"], false);
  ASSERT_EQ(report["problems"].size(), 3u);
  EXPECT_EQ(report["problems"][2]["key"], "aio.queue_depth");
  EXPECT_EQ(report["problems"][2]["line"], 3);
}

TEST_F(Cli, CheckRefusesWhatItCannotRead) {
  EXPECT_EQ(run("check missing.json").exit_code, 2);
  EXPECT_THAT(run("check missing.json").errors, HasSubstr("missing.json"));
  EXPECT_EQ(run("check .").exit_code, 2);
  write("malformed.json", "{\"aio\": {\n \"queue_depth\": 1,,\n}");
  const auto malformed = run("check malformed.json");
  EXPECT_EQ(malformed.exit_code, 2);
  EXPECT_THAT(malformed.errors, HasSubstr("(malformed.json:2:19)"));
}

TEST_F(Cli, CheckRefusesABatchThatDoesNotDivide) {
  write("good.json", kGood);
  const auto result = run("check good.json --world-size 5 --json report.json");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("train_batch_size: 32 is not a multiple of 5 ranks"));
  EXPECT_EQ(json_of("report.json")["accepted"], false);
}

// As from a script whose variable was not set; the default would be a surprise.
TEST_F(Cli, AnEmptyValueIsRefused) {
  for (const char* arguments :
       {"export store --to there --step ''", "export store --to ''", "export '' --to there", "inspect store --json ''",
        "inspect store --json=", "check ''", "bench io --path . --seconds ''", "bench io --path ''"}) {
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.errors, AnyOf(HasSubstr("empty"), HasSubstr("required"))) << arguments;
  }
}

TEST_F(Cli, ANumberOutOfRangeIsToldTheBoundsInShort) {
  EXPECT_THAT(run("plan --parameters 7e9 --tokens 0").errors, HasSubstr("0 is not a number from 1 to 1e+12"));
}

// As of `--to $OUT` with OUT not set.
TEST_F(Cli, TheNextOptionIsNoValue) {
  write("good.json", kGood);
  std::filesystem::create_directory(path("store"));
  for (const auto& [arguments, option] :
       {std::pair("export store --to --universal", "--to"), std::pair("copy store --to --json", "--to"),
        std::pair("copy store --to there --to --json", "--to"), std::pair("check good.json --json --all", "--json"),
        std::pair("check good.json --units --all", "--units"), std::pair("check good.json --model --all", "--model"),
        std::pair("check good.json --machine --all", "--machine"), std::pair("inspect store --json --help", "--json"),
        std::pair("verify store --json --bytes-per-second", "--json"), std::pair("doctor --path --json", "--path"),
        std::pair("plan --parameters 1e8 --write --json", "--write"),
        std::pair("plan --machine this --path --json", "--path"), std::pair("bench io --path --json", "--path"),
        std::pair("bench io --path . --json --quiet", "--json"), std::pair("bench optimizer --path --quiet", "--path"),
        std::pair("tune --path . --out --full", "--out"), std::pair("tune --path . --merge --full", "--merge"),
        std::pair("tune --path . --plot --full", "--plot")}) {
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.errors, HasSubstr(std::string(option) + ": has no value before --")) << arguments;
    EXPECT_THAT(result.output, IsEmpty()) << arguments;
  }
  EXPECT_THAT(run("check good.json --json --all").errors, HasSubstr("; write --json=--all if that is meant"));
  EXPECT_FALSE(std::filesystem::exists(path("--all")));
  EXPECT_EQ(run("check good.json --json=--all").exit_code, 0);
  EXPECT_TRUE(std::filesystem::exists(path("--all")));
  write("--all", kGood);
  EXPECT_EQ(run("check -- --all").exit_code, 0) << "not an option's value";
}

TEST_F(Cli, ANumberOfRanksIsAnInteger) {
  write("good.json", kGood);
  for (const char* command : {"check good.json", "plan --parameters 1e8"})
    for (const char* world : {"1e3", "8.0", "eight", "0", "16777217", "-1"})
      EXPECT_THAT(run(std::string(command) + " --world " + world).errors,
                  HasSubstr(std::string(world) + " is not an integer from 1 to 16777216"))
          << command;
  EXPECT_THAT(run("check good.json --local-ranks 8.0").errors, HasSubstr("8.0 is not an integer from 1 to 65536"));
}

TEST_F(Cli, AFullDiskUnderTheOutputIsAFailure) {
  for (const char* option : {"--json", "--write"}) {
    const auto result = run(std::string("plan --parameters 1e8 ") + option + " /dev/full");
    EXPECT_EQ(result.exit_code, 1) << option;
    EXPECT_THAT(result.errors, HasSubstr("/dev/full failed: No space left on device")) << option;
  }
}

TEST_F(Cli, AReportThatCannotBeWrittenIsAFailure) {
  write("good.json", kGood);
  const auto result = run("check good.json --json /no/such/directory/report.json");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors, HasSubstr("/no/such/directory/report.json"));
  EXPECT_THAT(run("doctor --json /no/such/directory/report.json").exit_code, 1);
}

// The test's command has redirections of its own, so it prints the exit code itself.
TEST_F(Cli, OutputThatIsLostIsAFailure) {
  write("good.json", kGood);
  for (const char* lost : {">/dev/full", ">&-"}) {
    const auto result = run(std::string("check good.json ") + lost + " 2>errors; echo $?");
    EXPECT_EQ(result.output, "1\n") << lost;
    EXPECT_THAT(test::contents_of(path("errors")), HasSubstr("standard output could not be written")) << lost;
  }
  // A lost error message does not change the exit code.
  write("bad.json", "{\"a\": 1}");
  for (const char* lost : {"2>/dev/full", "2>&-", ">&- 2>&- <&-"})
    EXPECT_EQ(run(std::string("check bad.json ") + lost + "; echo $?").output, "2\n") << lost;
}

// As `hoist check ... | head` does: no message, and no signal that would end the work before its files are removed.
TEST_F(Cli, AReaderThatHasSeenEnoughIsNoSignal) {
  write("good.json", kGood);
  run("--version; { sleep 0.3; '" HOIST_PROGRAM "' check good.json 2>errors; echo $? >code; } | exec 0<&-; true");
  EXPECT_EQ(test::contents_of(path("code")), "1\n");
  EXPECT_EQ(test::contents_of(path("errors")), "");
}

// The report would otherwise be opened as standard output, and what is printed would go into it.
TEST_F(Cli, ClosedDescriptorsDoNotMixPrintingWithFiles) {
  write("good.json", kGood);
  EXPECT_EQ(run("check good.json --json report.json <&- >&- 2>&-; echo $?").output, "1\n");
  EXPECT_EQ(json_of("report.json")["accepted"], true);
}

TEST_F(Cli, CheckPrintsTheReference) {
  const auto result = run("check --print-keys");
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.output, test::contents_of(std::string(HOIST_SOURCE_DIR) + "/docs/config.md"));
}

}  // namespace
}  // namespace hoist::cli_test
