// SPDX-License-Identifier: Apache-2.0
// hoist inspect: what a store holds, every damage of it, and nothing changed by looking.
#include <map>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <hoist/tests/support/other_kinds.hpp>

#include "program.hpp"
#include "stores.hpp"

namespace hoist {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class Inspect : public test::ProgramTest {
 protected:
  // Changes bytes of a file, `stride` bytes apart.
  void damage(const std::string& name, std::uint64_t first, std::uint64_t stride = 1ull << 40) const {
    std::fstream file(path(name), std::ios::in | std::ios::out | std::ios::binary);
    const auto length = fs::file_size(path(name));
    for (std::uint64_t at = first; at < length; at += stride) {
      file.seekg(static_cast<std::streamoff>(at));
      const char changed = static_cast<char>(file.get() ^ 0x10);
      file.seekp(static_cast<std::streamoff>(at));
      file.put(changed);
    }
  }
};

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

TEST_F(Inspect, ARankThatIsElsewhereIsSaid) {
  test::make_store(path("store"), 2, 1);
  for (const char* name : {"rank-00000.data", "rank-00000.manifest"}) fs::remove(path("store") + "/" + name);
  const auto result = run("inspect store --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("2; here: rank 1"));
  EXPECT_TRUE(json_of("report.json")["resumes_from_step"].is_null());
  EXPECT_EQ(run("inspect store --verify").exit_code, 1);
}

TEST_F(Inspect, VerifyReadsEverythingAndChangesNothing) {
  test::make_store(path("store"), 2, 2);
  const auto contents = [&] {
    std::map<std::string, std::pair<std::string, fs::file_time_type>> files;
    for (const auto& entry : fs::directory_iterator(path("store"))) {
      files[entry.path().string()] = {test::text_of(entry.path()), entry.last_write_time()};
    }
    return files;
  };
  const auto before = contents();
  const auto result = run("inspect store --verify --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("verified step 2"));
  const auto report = json_of("report.json")["verification"];
  EXPECT_EQ(report["done"], true);
  EXPECT_TRUE(report["damage"].empty());
  EXPECT_GT(report["checked_bytes"], 12 * 136000);
  EXPECT_TRUE(contents() == before);
}

TEST_F(Inspect, VerifyNamesADamagedTile) {
  test::make_store(path("store"), 1, 0);  // the first commit lies at the beginning of the file
  damage("store/rank-00000.data", 5);
  const auto result = run("inspect store --verify --json report.json");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("damaged: 1 tile"));
  EXPECT_THAT(result.output, HasSubstr("unit0"));
  const auto report = json_of("report.json")["verification"];
  ASSERT_EQ(report["damage"].size(), 1u);
  const auto where = report["damage"][0];
  EXPECT_EQ(where["unit"], "unit0");
  EXPECT_EQ(where["region"], "weights");
  EXPECT_EQ(where["offset_bytes"], 0);
  EXPECT_THAT(where["path"].get<std::string>(), HasSubstr("rank-00000.data"));
  EXPECT_NE(where["expected"], where["found"]);
}

TEST_F(Inspect, VerifyListsAllDamage) {
  test::make_store(path("store"), 1, 2);
  damage("store/rank-00000.data", 7, 4096);
  const auto result = run("inspect store --verify --json report.json");
  EXPECT_EQ(result.exit_code, 1);
  const auto report = json_of("report.json")["verification"];
  // 139 743 parameters in tiles of 16 384, both regions, and every segment's short last one.
  EXPECT_GE(report["damage"].size(), 20u);
  std::set<std::string> units;
  for (const auto& where : report["damage"]) units.insert(where["unit"]);
  EXPECT_EQ(units.size(), 4u);
}

TEST_F(Inspect, KeptStepsAreShownAndEachIsVerified) {
  {
    test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("store"));
    setup.engine.keep_steps = 2;
    Runtime runtime(setup.runtime);
    test::ToyModel model(runtime, setup.engine, {.frozen = false});
    Engine& engine = model.initialize();
    for (std::uint64_t step = 1; step <= 3; ++step) {
      model.train(step, step);
      if (step < 3) engine.save("kept " + std::to_string(step), {}).wait();
    }
  }
  const auto verified = [&](int exit_code) {
    const auto result = run("inspect store --verify --json report.json");
    EXPECT_EQ(result.exit_code, exit_code) << result.errors;
    EXPECT_THAT(result.output, HasSubstr("kept 1 (step 1), kept 2 (step 2); room for 2"));
    return json_of("report.json");
  };
  auto report = verified(0);
  EXPECT_EQ(report["kept_steps_max"], 2);
  ASSERT_EQ(report["kept"].size(), 2u);
  EXPECT_EQ(report["kept"][1], (nlohmann::json{{"name", "kept 2"}, {"step", 2}}));
  EXPECT_EQ(report["verification"]["step"], 3);
  for (const std::uint64_t step : {1u, 2u}) {
    const auto kept = report["verification_of_kept"]["kept " + std::to_string(step)];
    EXPECT_EQ(kept["step"], step);
    EXPECT_TRUE(kept["damage"].empty());
  }
  // Step 0 took the first extents, 1 the second, 2 the first that were free again: those of step 0.
  damage("store/rank-00000.data", 5);
  report = verified(1);
  EXPECT_TRUE(report["verification"]["damage"].empty());
  EXPECT_TRUE(report["verification_of_kept"]["kept 1"]["damage"].empty());
  EXPECT_EQ(report["verification_of_kept"]["kept 2"]["damage"].size(), 1u);
}

TEST_F(Inspect, AStoreInUseIsInspectedButNotVerified) {
  const test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("store"));
  Runtime runtime(setup.runtime);
  test::ToyModel model(runtime, setup.engine);
  Engine& engine = model.initialize();
  model.train(1, 1);
  engine.settle();
  const std::string process = "process " + std::to_string(::getpid());
  const auto result = run("inspect store --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("by " + process));
  EXPECT_THAT(json_of("report.json")["in_use_by"].get<std::string>(), HasSubstr(process));
  const auto verified = run("inspect store --verify --json report.json");
  EXPECT_EQ(verified.exit_code, 1);
  EXPECT_THAT(verified.errors, HasSubstr("in use by " + process));
  EXPECT_EQ(json_of("report.json")["verification"]["done"], false);
  model.train(2, 3);  // and the trainer goes on as before
  engine.settle();
  EXPECT_EQ(engine.committed_step(), 3u);
}

TEST_F(Inspect, ADamagedManifestIsAFailure) {
  test::make_store(path("store"), 1, 1);
  damage("store/rank-00000.manifest", 64);
  const auto result = run("inspect store --json report.json");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("no manifest can be read"));
  EXPECT_EQ(json_of("report.json")["ranks"][0]["damage"].size(), 1u);
  EXPECT_THAT(run("inspect store --verify").errors, HasSubstr("not verified"));
}

TEST_F(Inspect, NothingOfAStoreIsWaitedForThatIsNoFile) {
  const test::TestDeadline deadline;
  for (const test::OtherKind& kind : test::kOtherKinds) {
    for (const char* file : {"rank-00000.data", "rank-00000.manifest", "rank-00000.lock-info"}) {
      SCOPED_TRACE(fmt::format("a {} as {}", kind.name, file));
      fs::remove_all(path("store"));
      test::make_store(path("store"), 1, 1);
      fs::remove(path(std::string("store/") + file));
      if (!kind.make(path(std::string("store/") + file))) continue;  // devices are root's
      const bool is_sound = file == std::string_view("rank-00000.lock-info");
      const auto result = run("inspect store --verify");
      EXPECT_EQ(result.exit_code, is_sound ? 0 : 1);
      EXPECT_THAT(result.errors, HasSubstr(is_sound ? "" : file));
      EXPECT_EQ(run("export store --to weights-" + std::string(kind.name)).exit_code, is_sound ? 0 : 1);
    }
  }
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
}  // namespace hoist
