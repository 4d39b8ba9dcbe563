// SPDX-License-Identifier: Apache-2.0
// hoist verify names all damage in what a store would give back. It changes nothing, and no other program waits for it.
#include <chrono>
#include <map>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <hoist/tests/support/damage.hpp>
#include <hoist/tests/support/other_kinds.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>

#include "program.hpp"
#include "stores.hpp"

namespace hoist::verify_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

using Verify = test::ProgramTest;

TEST_F(Verify, ReadsEverythingAndChangesNothing) {
  test::make_store(path("store"), 2, 2);
  const auto contents = [&] {
    std::map<std::string, std::pair<std::string, fs::file_time_type>> files;
    for (const auto& entry : fs::directory_iterator(path("store"))) {
      files[entry.path().string()] = {test::contents_of(entry.path()), entry.last_write_time()};
    }
    return files;
  };
  const auto before = contents();
  const auto result = run("verify store --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("verified step 2"));
  const auto report = json_of("report.json")["commits"][0];
  EXPECT_EQ(report["done"], true);
  EXPECT_TRUE(report["damage"].empty());
  EXPECT_GT(report["checked_bytes"], 12 * 136000);
  EXPECT_TRUE(contents() == before);
}

TEST_F(Verify, SaysWhichRanksHaveNoFilesHere) {
  test::make_store(path("store"), 3, 1);
  EXPECT_THAT(run("verify store --json report.json").output, Not(HasSubstr("are here")));
  EXPECT_EQ(json_of("report.json")["absent_ranks"], nlohmann::json::parse("[[]]"));
  for (const char* file : {"rank-00000.data", "rank-00000.manifest", "rank-00002.data", "rank-00002.manifest"})
    fs::remove(path("store/") + file);
  const auto result = run("verify store --json report.json");
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("no files of rank 0, 2 are here; verify them on their hosts"));
  EXPECT_EQ(json_of("report.json")["absent_ranks"], nlohmann::json::parse("[[0, 2]]"));
}

TEST_F(Verify, NamesADamagedTile) {
  test::make_store(path("store"), 1, 0);  // the first commit lies at the beginning of the file
  test::flip_bits(path("store/rank-00000.data"), 5);
  const auto result = run("verify store --json report.json");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("damaged: 1 tile"));
  EXPECT_THAT(result.output, HasSubstr("unit0"));
  const auto report = json_of("report.json")["commits"][0];
  ASSERT_EQ(report["damage"].size(), 1u);
  const auto where = report["damage"][0];
  EXPECT_EQ(where["unit"], "unit0");
  EXPECT_EQ(where["region"], "weights");
  EXPECT_EQ(where["offset_bytes"], 0);
  EXPECT_THAT(where["path"].get<std::string>(), HasSubstr("rank-00000.data"));
  EXPECT_NE(where["expected"], where["found"]);
}

TEST_F(Verify, ListsAllDamage) {
  test::make_store(path("store"), 1, 2);
  test::flip_bits(path("store/rank-00000.data"), 7, 4096);
  const auto result = run("verify store --json report.json");
  EXPECT_EQ(result.exit_code, 1);
  const auto report = json_of("report.json")["commits"][0];
  // 139 743 parameters in tiles of 16 384, both regions, and every segment's short last one.
  EXPECT_GE(report["damage"].size(), 20u);
  std::set<std::string> units;
  for (const auto& where : report["damage"]) units.insert(where["unit"]);
  EXPECT_EQ(units.size(), 4u);
}

TEST_F(Verify, ReadsNamedCheckpointsToo) {
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
  EXPECT_THAT(run("inspect store").output, HasSubstr("kept 1 (step 1), kept 2 (step 2); room for 2 (1 with a mirror)"));
  const auto verified = [&](int exit_code) {
    const auto result = run("verify store --json report.json");
    EXPECT_EQ(result.exit_code, exit_code) << result.errors;
    return json_of("report.json");
  };
  auto report = verified(0);
  EXPECT_EQ(report["sound"], true);
  ASSERT_EQ(report["commits"].size(), 3u);
  EXPECT_EQ(report["commits"][0]["step"], 3);
  for (const std::uint64_t step : {1u, 2u}) {
    const auto kept = report["commits"][step];
    EXPECT_EQ(kept["name"], "kept " + std::to_string(step));
    EXPECT_EQ(kept["step"], step);
    EXPECT_TRUE(kept["damage"].empty());
  }
  // Step 0 took the first extents, 1 the second, 2 the first that were free again: those of step 0.
  test::flip_bits(path("store/rank-00000.data"), 5);
  report = verified(1);
  EXPECT_EQ(report["sound"], false);
  EXPECT_TRUE(report["commits"][0]["damage"].empty());
  EXPECT_TRUE(report["commits"][1]["damage"].empty());
  EXPECT_EQ(report["commits"][2]["damage"].size(), 1u);
}

// After a start with another number of ranks, the store before stays for its checkpoints.
TEST_F(Verify, ReadsCheckpointsOfOlderStoresToo) {
  test::make_two_stores(path("store"), 1);
  EXPECT_THAT(run("inspect store --json report.json").output,
              HasSubstr("store stays for its checkpoints, two (step 2)"));
  const auto older = json_of("report.json")["older_stores"];
  ASSERT_EQ(older.size(), 1u);
  EXPECT_EQ(older[0]["checkpoints"][0]["step"], 2);
  EXPECT_EQ(run("copy store --from two --to copied").exit_code, 0);
  EXPECT_EQ(run("export store --from two --to exported").exit_code, 0);
  EXPECT_THAT(run("export store --from three --to exported-3").errors, HasSubstr("two"));
  EXPECT_EQ(run("verify store --json report.json").exit_code, 0);
  EXPECT_EQ(json_of("report.json")["commits"][1]["name"], "two");
  const std::string manifest = test::contents_of(path("store/rank-00001.manifest"));
  test::flip_bits(path("store/rank-00001.manifest"), manifest.rfind("two"));
  EXPECT_THAT(run("verify store --json report.json").output, HasSubstr("slot"));
  EXPECT_EQ(json_of("report.json")["sound"], false) << "the checkpoint's slot is damaged";
  test::flip_bits(path("store/rank-00001.manifest"), manifest.rfind("two"));
  test::flip_bits(path("store/rank-00001.data"), 5, 4096);
  EXPECT_EQ(run("verify store --json report.json").exit_code, 1);
  EXPECT_EQ(json_of("report.json")["commits"][0]["damage"].size(), 0u);
}

// A kill inside a commit leaves a damaged slot, and a damaged slot of a named checkpoint has lost the checkpoint.
TEST_F(Verify, NamesDamagedSlotsAsInspectDoes) {
  test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path("good"));
  setup.engine.keep_steps = 1;
  {
    Runtime runtime(setup.runtime);
    test::ToyModel model(runtime, setup.engine, {.frozen = false});
    Engine& engine = model.initialize();
    model.train(1, 1);
    engine.save("kept", {}).wait();
    model.train(2, 3);
  }
  const auto view = tiers::detail::view_manifest(path("good/rank-00000.manifest"));
  std::map<int, int> found;  // by exit code
  for (std::uint32_t slot = 0; slot < view.slots.size(); ++slot) {
    if (view.slots[slot].state != tiers::SlotCheck::State::valid) continue;
    fs::remove_all(path("store"));
    fs::copy(path("good"), path("store"));
    const std::uint64_t offset = view.superblock->slot_offset(slot);
    test::flip_bits(path("store/rank-00000.manifest"), offset);
    const int exit_code = slot < tiers::kSlotCount ? 0 : 1;
    ++found[exit_code];
    EXPECT_EQ(run("inspect store --json report.json").exit_code, 0);
    const std::string line = "rank 0: " + json_of("report.json")["ranks"][0]["damage"][0].get<std::string>() + "\n";
    EXPECT_THAT(line, HasSubstr(fmt::format(" slot {} of store/rank-00000.manifest", slot)));
    EXPECT_THAT(run("inspect store").output, HasSubstr(line));
    const auto result = run("verify store --json report.json");
    EXPECT_EQ(result.exit_code, exit_code) << slot;
    EXPECT_THAT(result.output, HasSubstr(line));
    const auto report = json_of("report.json");
    EXPECT_EQ(report["sound"], exit_code == 0);
    ASSERT_EQ(report["manifest_damage"].size(), 1u);
    EXPECT_EQ(report["manifest_damage"][0].get<std::string>() + "\n", line);

    // As of a training that writes the slot: after a moment it is whole.
    for (const char* command : {"inspect store", "verify store"}) {
      std::thread training([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        test::flip_bits(path("store/rank-00000.manifest"), offset);
      });
      const auto beside = run(command);
      training.join();
      EXPECT_EQ(beside.exit_code, 0);
      EXPECT_THAT(beside.output, ::testing::Not(HasSubstr("slot")));
      test::flip_bits(path("store/rank-00000.manifest"), offset);
    }
  }
  EXPECT_EQ(found, (std::map<int, int>{{0, 2}, {1, 1}}));
}

TEST_F(Verify, ReadsAStoreInUse) {
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
  const auto verified = run("verify store --bytes-per-second 100MB --json report.json");
  EXPECT_EQ(verified.exit_code, 0) << verified.errors;
  EXPECT_EQ(json_of("report.json")["commits"][0]["step"], 1);
  model.train(2, 3);  // and the trainer goes on as before
  engine.settle();
  EXPECT_EQ(engine.committed_step(), 3u);
}

TEST_F(Verify, AStrangeRateIsRefused) {
  test::make_store(path("store"), 1, 1);
  for (const char* rate : {"0", "fast", "-1"})
    EXPECT_EQ(run(std::string("verify store --bytes-per-second ") + rate).exit_code, 2) << rate;
  EXPECT_EQ(run("verify nowhere").exit_code, 2);
}

TEST_F(Verify, NothingOfAStoreIsWaitedForThatIsNoFile) {
  const test::TestDeadline deadline;
  for (const test::OtherKind& kind : test::kOtherKinds) {
    for (const char* file : {"rank-00000.data", "rank-00000.manifest", "rank-00000.lock-info"}) {
      SCOPED_TRACE(fmt::format("a {} as {}", kind.name, file));
      fs::remove_all(path("store"));
      test::make_store(path("store"), 1, 1);
      fs::remove(path(std::string("store/") + file));
      if (!kind.make(path(std::string("store/") + file))) continue;  // devices are root's
      const bool is_sound = file == std::string_view("rank-00000.lock-info");
      const auto result = run("verify store");
      EXPECT_EQ(result.exit_code, is_sound ? 0 : 1);
      EXPECT_THAT(result.errors, HasSubstr(is_sound ? "" : file));
      EXPECT_EQ(run("export store --to weights-" + std::string(kind.name)).exit_code, is_sound ? 0 : 1);
    }
  }
}

}  // namespace
}  // namespace hoist::verify_test
