// SPDX-License-Identifier: Apache-2.0
// hoist inspect: what a store holds, every damage of it, and nothing changed by looking.
#include <utility>

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <hoist/tests/support/damage.hpp>
#include <hoist/tests/support/other_kinds.hpp>

#include "program.hpp"
#include "stores.hpp"

namespace hoist::inspect_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

using Inspect = test::ProgramTest;

TEST_F(Inspect, SaysWhatTheModelIsAndWhereItResumes) {
  test::make_store(path("nvme/hoist"), 2, 3);
  for (const char* directory : {"nvme/hoist", "nvme", "nvme/hoist/"}) {
    const auto result = run(std::string("inspect ") + directory + " --json report.json");
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, HasSubstr("9 tensors of 4 units, 3000 of them frozen"));
    EXPECT_THAT(result.output, HasSubstr("step 3"));
    const auto report = json_of("report.json");
    EXPECT_EQ(report["world_size"], 2);
    EXPECT_EQ(report["resumes_from_step"], 3);
    EXPECT_EQ(report["elements"], 40000 + 70001 + 16384 + 9973 + 4 * 97 + 3000);
    EXPECT_EQ(report["frozen_elements"], 3000);
    EXPECT_EQ(report["units"], 4);
    EXPECT_TRUE(report["in_use_by"].is_null());
    EXPECT_LT(report["age_seconds"], 300);
    ASSERT_EQ(report["ranks"].size(), 2u);
    EXPECT_EQ(report["ranks"][1]["commits"][0]["step"], 3);
    EXPECT_GT(report["ranks"][1]["data_bytes"], 12 * 68000 * 2);
    ASSERT_EQ(report["parameters"].size(), 9u);
    EXPECT_EQ(report["parameters"][0]["name"], "unit0.matrix");
    EXPECT_EQ(report["parameters"][0]["dtype"], "bf16");
    EXPECT_EQ(report["parameters"][4]["shape"], nlohmann::json({3, 1000}));
    EXPECT_EQ(report["parameters"][4]["trainable"], false);
  }
}

// inspect and verify look for such stores; to other commands they are bad input.
TEST_F(Inspect, AStoreThatCannotBeReadIsAFindingAsInVerify) {
  test::make_store(path("store"), 2, 1);
  fs::rename(path("store/rank-00001.manifest"), path("store/rank-00000.manifest"));
  for (const auto& [command, code] : {std::pair("inspect", 1), {"verify", 1}, {"export --to weights", 2}}) {
    const auto result = run(std::string(command) + " store");
    EXPECT_EQ(result.exit_code, code) << command;
    EXPECT_THAT(result.errors, HasSubstr("a file of rank 0 in store was written by rank 1: restore its own name"));
    EXPECT_EQ(result.errors.find("No file of this export remains in weights") != std::string::npos, code == 2);
  }
}

TEST_F(Inspect, AMirrorUsesOneOfTheCheckpointsPlaces) {
  test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("store"));
  setup.engine.keep_steps = 2;
  setup.engine.mirror.directory = path("mirror");
  test::train_then(1, setup, {}, 1, [](int, test::ToyModel&) {});
  EXPECT_THAT(run("inspect store").output, HasSubstr("none; room for 3 (2 with a mirror)"));
}

TEST_F(Inspect, ARankThatIsElsewhereIsSaid) {
  test::make_store(path("store"), 2, 1);
  for (const char* name : {"rank-00000.data", "rank-00000.manifest"}) fs::remove(path("store") + "/" + name);
  const auto result = run("inspect store --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("2; here: rank 1"));
  EXPECT_TRUE(json_of("report.json")["resumes_from_step"].is_null());
  EXPECT_TRUE(json_of("report.json")["checkpoints"].is_null()) << "the other ranks' files decide";
}

// Without its manifest a rank is lost, and not elsewhere: its data are here.
TEST_F(Inspect, ALostManifestIsAFailure) {
  test::make_store(path("several"), 2, 1);
  test::make_store(path("one/hoist"), 1, 1);
  for (const auto& [store, rank] : {std::pair("several", 1), std::pair("one/hoist", 0)}) {
    fs::remove(path(fmt::format("{}/rank-{:05}.manifest", store, rank)));
    const auto result = run(fmt::format("inspect {} --json report.json", store));
    EXPECT_EQ(result.exit_code, 1) << store;
    EXPECT_THAT(result.output, HasSubstr(fmt::format("rank {}: {}/rank-{:05}.manifest is missing", rank, store, rank)));
    EXPECT_TRUE(json_of("report.json")["resumes_from_step"].is_null());
    const auto verified = run(fmt::format("verify {}", store));
    EXPECT_EQ(verified.exit_code, 1) << store;
    EXPECT_THAT(verified.errors, HasSubstr(".manifest is missing, and its data are here"));
  }
  EXPECT_EQ(run("inspect one").exit_code, 1) << "by the nvme_path above it";
  fs::rename(path("one/hoist/rank-00000.data"), path("several/rank-00007.data"));
  EXPECT_THAT(run("inspect several").output, Not(HasSubstr("rank 7"))) << "the store has no such rank";
  EXPECT_EQ(run("inspect one").exit_code, 2) << "nothing is left";
}

TEST_F(Inspect, DataThatAreGoneOrCutOffAreAFailure) {
  test::make_store(path("store"), 2, 1);
  fs::resize_file(path("store/rank-00000.data"), 4096);
  fs::remove(path("store/rank-00001.data"));
  const auto result = run("inspect store --json report.json");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("rank 0: store/rank-00000.data is 4096 bytes long and should be"));
  EXPECT_THAT(result.output, HasSubstr("rank 1: store/rank-00001.data: No such file or directory"));
  EXPECT_EQ(json_of("report.json")["ranks"][1]["damage"].size(), 1u);
}

TEST_F(Inspect, ADamagedManifestIsAFailure) {
  test::make_store(path("store"), 1, 1);
  test::flip_bits(path("store/rank-00000.manifest"), 64);
  const auto result = run("inspect store --json report.json");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("no manifest can be read"));
  EXPECT_THAT(result.output, Not(HasSubstr("last commit")));
  EXPECT_TRUE(json_of("report.json")["age_seconds"].is_null());
  EXPECT_EQ(json_of("report.json")["ranks"][0]["damage"].size(), 1u);
  EXPECT_THAT(run("verify store").errors, HasSubstr("not verified"));
}

TEST_F(Inspect, JsonThatCannotBeWrittenIsRefusedBeforeTheWork) {
  test::make_store(path("store"), 1, 1);
  const auto result = run("inspect store --json nowhere/found.json");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors, HasSubstr("nowhere/found.json"));
  EXPECT_EQ(result.output, "");
  const test::TestDeadline deadline;
  ASSERT_TRUE(test::kOtherKinds.front().make(path("pipe")));
  EXPECT_THAT(run("inspect store --json pipe").errors, HasSubstr("no process reads from this pipe"));
}

TEST_F(Inspect, RefusesWhatIsNoStore) {
  EXPECT_EQ(run("inspect missing").exit_code, 2);
  fs::create_directory(path("empty"));
  const auto result = run("inspect empty");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("no store"));
  write("file", "text");
  EXPECT_EQ(run("inspect file").exit_code, 2);
}

}  // namespace
}  // namespace hoist::inspect_test
