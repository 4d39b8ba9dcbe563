// SPDX-License-Identifier: Apache-2.0
// hoist copy: a run continues from the copy as from the store; what is damaged, foreign or too large is refused, and
// leaves nothing; an interrupted copy is finished by the same command.
#include <chrono>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <unistd.h>

#include <hoist/tests/support/damage.hpp>

#include "program.hpp"
#include "stores.hpp"

namespace hoist::copy_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class Copy : public test::ProgramTest {
 protected:
  test::ToySetup setup_of(const std::string& store, std::vector<std::string> more = {}) const {
    test::ToySetup setup = test::toy_setup(Placement::nvme, Placement::nvme, path(store));
    for (const std::string& drive : more) setup.engine.stripe_directories.push_back(path(drive));
    return setup;
  }

  // Continues the store, by two steps; what it ends in.
  test::Digests continued(const test::ToySetup& setup, int ranks, std::uint64_t expected_step) const {
    test::Digests digests;
    test::on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      Runtime runtime(setup.runtime, join);
      test::ToyModel model(runtime, setup.engine);
      EXPECT_EQ(model.restore().step, expected_step);
      model.train(expected_step + 1, expected_step + 2);
      const test::Digests mine = test::digests_of(model);
      if (rank == 0) digests = mine;
    });
    return digests;
  }

  std::map<std::string, std::string> files_of(const std::string& name) const {
    std::map<std::string, std::string> files;
    if (!fs::exists(path(name))) return files;
    for (const auto& entry : fs::recursive_directory_iterator(path(name)))
      if (entry.is_regular_file()) files[entry.path().string()] = test::contents_of(entry.path());
    return files;
  }
};

TEST_F(Copy, ContinuesAsTheStoreWouldHave) {
  for (const int ranks : {1, 3}) {
    const std::string store = "store" + std::to_string(ranks), to = "copy" + std::to_string(ranks);
    test::make_store(path(store), ranks, 2);
    const auto before = files_of(store);
    const auto result = run("copy " + store + " --to " + to + " --json report.json");
    ASSERT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_EQ(files_of(store), before);
    const auto report = json_of("report.json");
    EXPECT_EQ(report["step"], 2);
    EXPECT_EQ(report["ranks_copied"], ranks);
    EXPECT_EQ(run("verify " + to).exit_code, 0);
    const test::Digests expected = continued(setup_of(store), ranks, 2);
    EXPECT_EQ(continued(setup_of(to + "/hoist"), ranks, 2), expected) << ranks;
  }
}

TEST_F(Copy, SpreadsItsDataOverDrives) {
  test::make_store(path("store"), 2, 2);
  const auto result = run("copy store --to first --to second");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_TRUE(fs::exists(path("second/hoist/rank-00001.data")));
  const test::Digests expected = continued(setup_of("store"), 2, 2);
  EXPECT_EQ(continued(setup_of("first/hoist", {"second/hoist"}), 2, 2), expected);
}

TEST_F(Copy, AnEarlierStepOrANamedCheckpoint) {
  test::ToySetup setup = setup_of("store");
  setup.engine.keep_steps = 1;
  {
    Runtime runtime(setup.runtime);
    test::ToyModel model(runtime, setup.engine);
    model.initialize();
    model.train(1, 1);
    model.engine().save("best", {}).wait();
    model.train(2, 4);
    model.engine().settle();
  }
  ASSERT_EQ(run("copy store --to earlier --step 3").exit_code, 0);
  ASSERT_EQ(run("copy store --to best --from best").exit_code, 0);
  EXPECT_EQ(run("copy store --to other --step 9").exit_code, 2);
  EXPECT_EQ(run("copy store --to other --from worst").exit_code, 2);
  EXPECT_FALSE(fs::exists(path("other")));
  const auto copy_of = [&](const std::string& to) {
    test::ToySetup copy = setup_of(to + "/hoist");
    copy.engine.keep_steps = 1;
    return copy;
  };
  const test::Digests expected =
      test::train_on(1, test::toy_setup(Placement::pinned, Placement::pinned), {}, 3)[0].digests;
  test::Digests best = continued(copy_of("best"), 1, 1);
  best.losses = expected.losses;
  EXPECT_EQ(best, expected);
  continued(copy_of("earlier"), 1, 3);
}

TEST_F(Copy, AKilledOneIsFinishedByTheSameCommand) {
  test::make_store(path("store"), 3, 2);
  ASSERT_EQ(run("copy store --to whole --json report.json").exit_code, 0);
  const auto bytes = json_of("report.json")["data_bytes"].get<std::uint64_t>();
  for (const char* seconds : {"0.1", "0.6", "1.2", "1.8"}) {  // of the three that a copy takes
    const std::string command = "cd '" + path("") + "' && timeout -s KILL " + seconds +
                                " '" HOIST_PROGRAM "' copy store --to copy --bytes-per-second " +
                                std::to_string(bytes / 3) + " >/dev/null 2>&1";
    EXPECT_NE(std::system(command.c_str()), 0);
  }
  const auto result = run("copy store --to copy --json report.json");
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const auto report = json_of("report.json");
  EXPECT_EQ(report["ranks_copied"].get<int>() + report["ranks_compared"].get<int>(), 3);
  EXPECT_EQ(continued(setup_of("copy/hoist"), 3, 2), continued(setup_of("store"), 3, 2));
}

// Not bad input: the command was right when it began.
TEST_F(Copy, FilesThatAreRemovedMeanwhileAreAFailure) {
  test::make_store(path("store"), 1, 2);
  ASSERT_EQ(run("copy store --to whole --json report.json").exit_code, 0);
  const auto rate = std::to_string(json_of("report.json")["data_bytes"].get<std::uint64_t>() / 3);
  const std::string data = path("copy/hoist/rank-00000.data");
  std::thread removes([&] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!fs::exists(data) && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // of the three seconds that the copy takes
    fs::remove(data);
  });
  const auto result = run("copy store --to copy --bytes-per-second " + rate);
  removes.join();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors, HasSubstr("was removed or renamed while this process wrote to it"));
}

TEST_F(Copy, AnotherStoreIsNeverOverwritten) {
  test::make_store(path("store"), 1, 2);
  test::make_store(path("other/hoist"), 1, 2);  // of another run
  const auto before = files_of("other");
  const auto result = run("copy store --to other");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("other/hoist holds another store already: of another run"));
  EXPECT_EQ(files_of("other"), before);
  ASSERT_EQ(run("copy store --to copy").exit_code, 0);
  continued(setup_of("copy/hoist"), 1, 2);
  const auto later = run("copy store --to copy");
  EXPECT_EQ(later.exit_code, 2);
  EXPECT_THAT(
      later.errors,
      HasSubstr("holds a newer copy of this run, of step 4, and step 2 is to be copied; copy to a new directory"));
  continued(setup_of("store"), 1, 2);
  continued(setup_of("store"), 1, 4);
  EXPECT_THAT(run("copy store --to copy").errors, HasSubstr("holds an older copy of this run, of step 4, and step 6"));
}

TEST_F(Copy, DamageIsNamedAndNothingOfItRemains) {
  test::make_store(path("store"), 2, 0);
  const std::string data = path("store/rank-00001.data");
  test::flip_bits(data, fs::file_size(data) / 4);  // in the middle of the first commit's extents
  const auto result = run("copy store --to copy");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors, HasSubstr("rank-00001.data"));
  EXPECT_FALSE(fs::exists(path("copy/hoist/rank-00001.data")));
  EXPECT_FALSE(fs::exists(path("copy/hoist/rank-00001.manifest")));
}

TEST_F(Copy, IsNoFasterThanItMayBe) {
  test::make_store(path("store"), 1, 0);
  const auto begun = std::chrono::steady_clock::now();
  ASSERT_EQ(run("copy store --to copy --bytes-per-second 2MB --json report.json").exit_code, 0);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  EXPECT_GE(took.count(), json_of("report.json")["data_bytes"].get<double>() / 2e6);
}

TEST_F(Copy, BadInputIsRefusedBeforeAnythingIsWritten) {
  test::make_store(path("store"), 1, 0);
  EXPECT_EQ(run("copy missing --to copy").exit_code, 2);
  EXPECT_EQ(run("copy store").exit_code, 2);
  EXPECT_EQ(run("copy store --to copy --bytes-per-second fast").exit_code, 2);
  EXPECT_EQ(run("copy store --to copy --step best").exit_code, 2);
  const auto line_break = run("copy store --to 'a\nb'");
  EXPECT_EQ(line_break.exit_code, 2);
  EXPECT_THAT(line_break.errors, StartsWith("hoist copy: "));
  EXPECT_FALSE(fs::exists(path("copy")));
}

TEST_F(Copy, TheStoreItselfIsNoCopyAndADirectoryIsNamedOnce) {
  test::make_store(path("store/hoist"), 1, 1);
  fs::create_directory_symlink(path("store"), path("link"));
  for (const char* to : {"store", "link", "store/../link/"}) {
    const auto result = run(std::string("copy store --to ") + to);
    EXPECT_EQ(result.exit_code, 2) << to;
    EXPECT_THAT(result.errors, HasSubstr("is where the store itself is"));
  }
  ASSERT_EQ(run("copy store --to copy").exit_code, 0);
  fs::create_directory_symlink(path("copy"), path("copy-link"));
  for (const char* to : {"--to copy --to copy", "--to copy --to copy-link", "--to new --to new/."}) {
    const auto result = run(std::string("copy store ") + to);
    EXPECT_EQ(result.exit_code, 2) << to;
    EXPECT_THAT(result.errors, HasSubstr("one directory"));
  }
  EXPECT_FALSE(fs::exists(path("new")));
}

TEST_F(Copy, ACopyThatIsThereKeepsItsDrives) {
  test::make_store(path("store"), 1, 1);
  ASSERT_EQ(run("copy store --to a").exit_code, 0);
  const auto further = run("copy store --to a --to b");
  EXPECT_EQ(further.exit_code, 2);
  EXPECT_THAT(further.errors, HasSubstr("holds this copy already, and its further drives are none"));
  EXPECT_FALSE(fs::exists(path("b")));
  ASSERT_EQ(run("copy store --to c --to d").exit_code, 0);
  EXPECT_EQ(run("copy store --to c --to d").exit_code, 0);
  const auto fewer = run("copy store --to c");
  EXPECT_EQ(fewer.exit_code, 2);
  EXPECT_THAT(fewer.errors, HasSubstr("its further drives are " + path("d/hoist")));
  fs::rename(path("d"), path("e"));  // mounted elsewhere now
  const auto moved = run("copy store --to c --to e");
  EXPECT_EQ(moved.exit_code, 0) << moved.errors;
  EXPECT_THAT(moved.output, HasSubstr("already there, and the same"));
}

TEST_F(Copy, AnotherRunsStoreIsNoCopyWhateverItsDrives) {
  test::make_store(path("store"), 1, 1);
  test::make_store(path("other/hoist"), 1, 1);
  const auto result = run("copy store --to other --to b");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("holds another store already: of another run"));
}

TEST_F(Copy, ASignalEndsAWaitForTheRate) {
  test::make_store(path("store"), 1, 0);
  for (const std::string command : {"verify store", "copy store --to copy"}) {
    // Its progress shows that it is at work. Without the signal the wait would be hours.
    const std::string words = "cd " + path(".") + " && { timeout -k 20 300 " HOIST_PROGRAM " " + command +
                              " --bytes-per-second 1 > out 2> err & pid=$!; "
                              "for i in $(seq 600); do grep -q ' of ' err && break; sleep 0.1; done; "
                              "kill -TERM $pid; wait $pid; }";
    EXPECT_EQ(WEXITSTATUS(std::system(words.c_str())), 128 + SIGTERM) << command;
    EXPECT_THAT(test::contents_of(path("err")), HasSubstr("interrupted")) << command;
  }
  EXPECT_FALSE(fs::exists(path("copy/hoist/rank-00000.data")));
}

TEST_F(Copy, NoCommandReplacesAFileOfAStoreWithItsJson) {
  test::make_store(path("store/hoist"), 1, 1);
  const auto before = files_of("store");
  fs::create_symlink(path("store/hoist/rank-00000.manifest"), path("link"));
  for (const char* command : {"inspect store", "verify store", "copy store --to copy", "export store --to weights"}) {
    for (const char* file : {"store/hoist/rank-00000.manifest", "store/hoist/rank-00000.data", "link"}) {
      const auto result = run(std::string(command) + " --json " + file);
      EXPECT_EQ(result.exit_code, 2) << command;
      EXPECT_THAT(result.errors, HasSubstr("is a file of a store, and would be overwritten")) << command;
    }
  }
  EXPECT_EQ(files_of("store"), before);
  EXPECT_FALSE(fs::exists(path("copy")));
}

TEST_F(Copy, AStoreInUseIsLeftAlone) {
  const test::ToySetup setup = setup_of("store");
  Runtime runtime(setup.runtime);
  test::ToyModel model(runtime, setup.engine);
  model.initialize();
  const auto result = run("copy store --to copy");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("process " + std::to_string(::getpid())));
}

}  // namespace
}  // namespace hoist::copy_test
