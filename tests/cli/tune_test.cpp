// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include "storage_program.hpp"

namespace hoist::tune_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// A second of search says little about the drive, and all about the program.
constexpr const char* kShort = "tune --path drive --size 64MiB --seconds 3 --quiet ";

constexpr const char* kConfig = R"({
    "train_batch_size": 32,
    "bf16": {"enabled": true},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95]}},
    "zero_optimization": {"stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}},
    "aio": { "block_size": 8388608, "thread_count": 8 },
    "gradient_clipping": 1.0
}
)";

class Tune : public test::StorageProgramTest {};

TEST_F(Tune, WritesWhatCheckAcceptsAndDeepSpeedReads) {
  const auto result = run(std::string(kShort) + "--out tuned.json --plot sweep.svg --json report.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("written to tuned.json"));
  EXPECT_TRUE(drive_is_empty());
  EXPECT_EQ(run("check tuned.json").exit_code, 0) << run("check tuned.json").errors;

  const auto tuned = json_of("tuned.json");
  const auto& aio = tuned["aio"];
  // The types that DeepSpeed's own reader takes: it passes them to a constructor as they are.
  EXPECT_TRUE(aio["block_size"].is_number_integer());
  EXPECT_TRUE(aio["queue_depth"].is_number_integer());
  EXPECT_TRUE(aio["intra_op_parallelism"].is_number_integer());
  EXPECT_TRUE(aio["single_submit"].is_boolean());
  EXPECT_TRUE(aio["overlap_events"].is_boolean());
  for (const char* key : {"read_bytes_per_second", "write_bytes_per_second", "mixed_bytes_per_second"})
    EXPECT_GT(tuned["hoist"]["measured"][key].get<std::int64_t>(), 1'000'000) << key;

  const auto report = json_of("report.json");
  EXPECT_EQ(report["aio"], aio);
  EXPECT_GT(report["settings"].size(), 10u);
  bool found = false;
  for (const auto& setting : report["settings"]) {
    found = found || (setting["block_bytes"] == aio["block_size"] && setting["queue_depth"] == aio["queue_depth"] &&
                      setting["passes"] > 0);
  }
  EXPECT_TRUE(found) << "the choice was measured";

  const std::string svg = test::contents_of(path("sweep.svg"));
  EXPECT_THAT(svg, StartsWith("<svg "));
  for (const char* part : {"read, GB/s", "write, GB/s", "mixed, GB/s", "1.0 MiB", "16 deep", "chosen", "</svg>"})
    EXPECT_THAT(svg, HasSubstr(part));
  EXPECT_EQ(svg.find("http://", svg.find("http://") + 1), std::string::npos) << "needs nothing but itself";
}

TEST_F(Tune, MergeKeepsEverythingElse) {
  write("offload.json", kConfig);
  std::filesystem::permissions(path("offload.json"), std::filesystem::perms(0640));
  const auto result = run(std::string(kShort) + "--merge offload.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_EQ(std::filesystem::status(path("offload.json")).permissions(), std::filesystem::perms(0640));
  const std::string text = test::contents_of(path("offload.json"));
  const std::string before = kConfig;
  const auto aio = before.find("\"aio\"");
  EXPECT_EQ(text.substr(0, aio), before.substr(0, aio)) << "not a byte before the section changes";
  EXPECT_THAT(text, HasSubstr("\"gradient_clipping\": 1.0"));
  const auto merged = json_of("offload.json");
  EXPECT_EQ(merged["aio"]["thread_count"], 8) << "not searched over, so the user's";
  EXPECT_FALSE(merged["aio"].contains("intra_op_parallelism")) << "the same setting by another name";
  EXPECT_TRUE(merged["hoist"]["measured"].contains("mixed_bytes_per_second"));
  EXPECT_EQ(run("check offload.json").exit_code, 0) << run("check offload.json").errors;
}

// Its speeds are those of as many threads as blocks in flight.
TEST_F(Tune, MergeSetsTheThreadsOfAnEngineThatWasMeasuredWithThem) {
  write("offload.json", kConfig);
  const auto result = run(std::string(kShort) + "--engine threads --merge offload.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto merged = json_of("offload.json");
  EXPECT_EQ(merged["aio"]["thread_count"], merged["aio"]["queue_depth"]);
  EXPECT_FALSE(merged["aio"].contains("intra_op_parallelism"));
}

TEST_F(Tune, MergeMeasuresTheEngineThatTheConfigurationNames) {
  std::string config = kConfig;
  config.insert(config.rfind('}'), R"(, "hoist": {"io_engine": "threads"})");
  write("offload.json", config);
  const auto result = run(std::string(kShort) + "--merge offload.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, StartsWith("engine: threads"));
  const auto merged = json_of("offload.json");
  EXPECT_EQ(merged["aio"]["thread_count"], merged["aio"]["queue_depth"]);
  EXPECT_EQ(merged["hoist"]["io_engine"], "threads");
}

TEST_F(Tune, WhatWasMeasuredIsPrintedIfTheFileCannotBeWrittenAnyMore) {
  write("late.sh", "sleep 1; mkdir tuned.json");
  const auto result =
      run("--version >/dev/null; sh late.sh & '" HOIST_PROGRAM "' " + std::string(kShort) + "--out tuned.json");
  EXPECT_EQ(result.exit_code, 1) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("queue_depth"));
}

TEST_F(Tune, AFullDiskUnderTheOutputIsAFailure) {
  for (const char* option : {"--out", "--plot"}) {
    const auto result = run(std::string(kShort) + option + " /dev/full --json report.json");
    EXPECT_EQ(result.exit_code, 1) << option;
    EXPECT_THAT(result.errors, HasSubstr("No space left on device")) << option;
  }
  EXPECT_GT(json_of("report.json")["settings"].size(), 10u) << "written before the plot";
}

TEST_F(Tune, MergeWithOutLeavesTheOriginalAlone) {
  write("offload.json", kConfig);
  ASSERT_EQ(run(std::string(kShort) + "--merge offload.json --out tuned.json").exit_code, 0);
  EXPECT_EQ(test::contents_of(path("offload.json")), kConfig);
  EXPECT_EQ(json_of("tuned.json")["train_batch_size"], 32);
}

TEST_F(Tune, BadInputIsRefusedBeforeAnythingIsMeasured) {
  write("broken.json", "{\"aio\": ");
  write("list.json", "[]");
  write("odd.json", "{\"aio\": 7}");
  write("merged.json", "{}");
  const std::vector<std::pair<std::string, std::string>> refusals{
      {"--path drive --merge missing.json", "No such file"},
      {"--path drive --merge .", "is a directory"},
      {"--path drive --merge broken.json", "is not JSON"},
      {"--path drive --merge list.json", "not an object"},
      {"--path drive --merge odd.json", "\"aio\" that is not an object"},
      {"--path drive --out no/such/place.json", "choose another directory"},
      {"--path drive --out odd.json", "nothing of it would stay; remove it first, name it with --merge"},
      {"--path drive --merge merged.json --out odd.json",
       "nothing of it would stay; remove it first, name it with --merge"},
      {"--path drive --plot drive", "is a directory"},
      {"--path drive --engine null", "nothing to tune"},
      {"--path drive --size 1MiB", "at least 64.0 MiB are needed"},
      {"--path drive --seconds 0", "must be 1 to 3600"},
      {"--path drive --seconds nan", "must be 1 to 3600"},
      {"--path drive --merge odd.json --json odd.json", "would be overwritten"},
      {"--path missing", "No such file"}};
  for (const auto& [arguments, part] : refusals) {
    const auto result = run("tune " + arguments);
    EXPECT_EQ(result.exit_code, 2) << arguments;
    EXPECT_THAT(result.errors, HasSubstr(part)) << arguments;
    EXPECT_THAT(result.output, IsEmpty()) << arguments;
  }
  EXPECT_EQ(test::contents_of(path("odd.json")), "{\"aio\": 7}");
  EXPECT_EQ(run("tune --path drive --json no/such/report.json").exit_code, 1);
  EXPECT_TRUE(drive_is_empty());
}

TEST_F(Tune, AnInterruptionWritesNothing) {
  write("offload.json", kConfig);
  const auto result = run("--version >/dev/null; timeout --preserve-status -s INT 1 '" HOIST_PROGRAM
                          "' tune --path drive --size 64MiB --merge offload.json");
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_EQ(test::contents_of(path("offload.json")), kConfig);
  EXPECT_TRUE(drive_is_empty());
}

}  // namespace
}  // namespace hoist::tune_test
