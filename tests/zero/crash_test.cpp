// SPDX-License-Identifier: Apache-2.0
// P3 at the engine's face: processes killed at random moments resume bit-exactly.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>

#include "toy_model.hpp"
#include "toy_ranks.hpp"

namespace hoist::test {
namespace {

constexpr std::uint64_t kSteps = 2500;
constexpr int kKills = 30;

// Trains to kSteps from whatever the store holds, in this process, then exits without running any destructor twice.
[[noreturn]] void train_in_child(const ToySetup& setup) {
  {
    Runtime runtime(setup.runtime);
    Engine engine(runtime, setup.engine);
    ToyModel model(engine, ToyShape{.matrices = {9000, 20000}});
    std::uint64_t first = 1;
    if (engine.find_commit()) {
      first = engine.restore().step + 1;
    } else {
      engine.initialize(model.fill());
    }
    model.train(first, kSteps);
  }
  ::_exit(0);
}

class KillTest : public testing::TestWithParam<Placement> {};

TEST_P(KillTest, KilledAtRandomMomentsAndResumedBitExactly) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(GetParam(), Placement::nvme, (directory / "store"));
  const std::uint64_t seed = static_cast<std::uint64_t>(::getpid());
  Rng rng(seed);
  int kills = 0;
  for (int attempt = 0; attempt < 400; ++attempt) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) train_in_child(setup);
    if (kills < kKills) {
      std::this_thread::sleep_for(std::chrono::microseconds(5000 + rng.below(80000)));
      ::kill(child, SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) {
      ASSERT_EQ(WTERMSIG(status), SIGKILL) << "seed " << seed;
      ++kills;
      continue;
    }
    ASSERT_EQ(WEXITSTATUS(status), 0) << "seed " << seed;
    break;
  }
  EXPECT_EQ(kills, kKills) << "the run is too short to be killed so often";
  Runtime runtime(setup.runtime);
  Engine engine(runtime, setup.engine);
  ToyModel model(engine, ToyShape{.matrices = {9000, 20000}});
  EXPECT_EQ(engine.restore().step, kSteps);
  Digests expected =
      train_once(toy_setup(Placement::pinned, Placement::pinned), ToyShape{.matrices = {9000, 20000}}, kSteps);
  expected.losses.clear();
  EXPECT_EQ(digests_of(engine, model), expected) << "seed " << seed << ", " << kills << " kills";
}

INSTANTIATE_TEST_SUITE_P(Parameters, KillTest, testing::Values(Placement::nvme, Placement::pinned),
                         [](const auto& c) { return c.param == Placement::nvme ? "on_nvme" : "in_memory"; });

// Two ranks: only the first one's first commit was durable when the machine died.
class HalfAFirstCommit : public testing::Test {
 protected:
  void train(std::uint64_t steps) {
    on_ranks(2, [&](int, const Runtime::MakeCommunicator& join) {
      Runtime runtime(setup_.runtime, join);
      Engine engine(runtime, setup_.engine);
      ToyModel model(engine, ToyShape{.matrices = {9000}});
      EXPECT_FALSE(engine.find_commit());
      engine.initialize(model.fill());
      model.train(1, steps);
    });
  }
  void lose_the_second_rank() const { std::filesystem::remove(setup_.engine.store_directory + "/rank-00001.manifest"); }

  const TempDirectory directory_;
  const ToySetup setup_ = toy_setup(Placement::nvme, Placement::nvme, (directory_ / "store"));
};

TEST_F(HalfAFirstCommit, IsNoObstacleToANewBeginning) {
  train(0);
  lose_the_second_rank();
  train(2);
}

TEST_F(HalfAFirstCommit, IsNotWhatIsLeftOfATraining) {
  train(1);
  lose_the_second_rank();
  try {
    train(0);
    ADD_FAILURE() << "a rank's training was replaced";
  } catch (const StoreError& error) {
    EXPECT_NE(std::string(error.what()).find("holds step 1"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace hoist::test
