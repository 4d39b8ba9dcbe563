// SPDX-License-Identifier: Apache-2.0
// P3 for the whole engine: processes killed at random moments resume bit-exactly.
#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>

#include "toy_model.hpp"
#include "toy_ranks.hpp"

namespace hoist::test::crash_test {
namespace {

constexpr int kKills = 30;

struct KillCase {
  const char* name;
  Placement parameters;
  DType dtype = DType::bf16;  // fp16: with a loss scale that skips a step every now and then
  bool spills = false;        // gradients, to scratch files
  bool divided = false;       // every run with another ratio of states on a device that updates them itself
};

ToySetup setup_of(const KillCase& c, Placement parameters, Placement optimizer, const std::string& directory = "") {
  ToySetup setup = toy_setup(parameters, optimizer, directory);
  if (c.dtype == DType::fp16) setup.engine.loss_scale = toy_loss_scale();
  if (c.spills && setup.engine.uses_nvme()) setup.engine.gradient_spill_units = 1;
  return setup;
}
ToyShape shape_of(const KillCase& c) { return {.matrices = {9000, 20000}, .dtype = c.dtype}; }

// The number of the last step that was applied; it is the caller's state, which is empty before the first.
std::uint64_t steps_made(const RestoreReport& report) {
  std::uint64_t made = 0;
  if (!report.caller_state.empty())
    std::memcpy(&made, report.caller_state.data(), std::min(report.caller_state.size(), sizeof(made)));
  return made;
}

// Counts on from whatever the store holds, in this process: for longer than it lives if it is killed, otherwise some
// steps more, 200 in all at least. Then exits without running any destructor twice. Steps that were skipped after the
// last commit are made again.
[[noreturn]] void train_in_child(const KillCase& c, const ToySetup& setup, bool is_killed) {
  {
    ToyModel model(setup, shape_of(c));
    std::uint64_t made = 0;
    if (model.find_commit()) {
      made = steps_made(model.restore());
    } else {
      model.initialize();
    }
    model.train(made + 1, std::max<std::uint64_t>(made + (is_killed ? 10'000 : 20), 200));
  }
  ::_exit(0);
}

// Bytes of scratch files that are left in a directory. A process that is killed before it unlinks its scratch file
// leaves an empty file.
std::uint64_t scratch_bytes_in(const std::string& directory) {
  std::uint64_t bytes = 0;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(directory, none))
    if (entry.path().extension() == ".scratch") bytes += entry.file_size();
  return bytes;
}

class KillTest : public testing::TestWithParam<KillCase> {};

TEST_P(KillTest, KilledAtRandomMomentsAndResumedBitExactly) {
  const KillCase& c = GetParam();
  const TempDirectory directory;
  ToySetup setup = setup_of(c, c.parameters, Placement::nvme, (directory / "store"));
  setup.runtime.host_device.host_accessible = !c.divided;
  const std::uint64_t seed = static_cast<std::uint64_t>(::getpid());
  Rng rng(seed);
  for (int life = 0; life <= kKills; ++life) {
    const bool is_killed = life < kKills;
    if (c.divided) setup.engine.optimizer_offload_ratio = std::array{0.6, 0.0, 1.0}[static_cast<std::size_t>(life % 3)];
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) train_in_child(c, setup, is_killed);
    if (is_killed) {
      std::this_thread::sleep_for(std::chrono::microseconds(5000 + rng.below(80000)));
      ::kill(child, SIGKILL);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, is_killed ? SIGKILL : 0) << "seed " << seed << ", life " << life;
    EXPECT_EQ(scratch_bytes_in(directory / "store"), 0u) << "seed " << seed;
  }
  ToyModel model(setup, shape_of(c));
  const RestoreReport report = model.restore();
  const std::uint64_t applied = report.step, made = steps_made(report);
  EXPECT_GE(made, 190u) << "of 200 or more, of which the last few are skipped at most";
  EXPECT_FALSE(std::filesystem::exists((directory / "store") + "/rank-00000.scratch"));
  EXPECT_EQ(applied < made, c.dtype == DType::fp16) << applied;

  const ToySetup undisturbed = setup_of(c, Placement::pinned, Placement::pinned);
  ToyProgram other_model(undisturbed, shape_of(c));
  other_model.train(1, made);
  EXPECT_EQ(applied, other_model.engine().step_count());
  EXPECT_EQ(model.engine().loss_scale(), other_model.engine().loss_scale());
  EXPECT_EQ(digests_of(model), state_digests(other_model)) << "seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(Parameters, KillTest,
                         testing::Values(KillCase{"on_nvme", Placement::nvme}, KillCase{"in_memory", Placement::pinned},
                                         KillCase{"fp16_on_nvme", Placement::nvme, DType::fp16},
                                         KillCase{"spilling", Placement::nvme, DType::bf16, true},
                                         KillCase{"divided", Placement::device, DType::bf16, false, true}),
                         [](const auto& c) { return c.param.name; });

// Two ranks: the first one's manifest is durable, and of the second one's files some or all are missing.
class HalfAFirstCommit : public testing::Test {
 protected:
  void train(std::uint64_t steps) {
    on_ranks(2, [&](int, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup_, join, {.matrices = {9000}});
      EXPECT_FALSE(model.find_commit());
      model.initialize();
      model.train(1, steps);
    });
  }
  void remove_of_second_rank(const std::string& file) const {
    ASSERT_TRUE(std::filesystem::remove(setup_.engine.store_directory + "/rank-00001." + file));
  }

  const TempDirectory directory_;
  const ToySetup setup_ = toy_setup(Placement::nvme, Placement::nvme, (directory_ / "store"));
};

// The machine died before the second rank's manifest was durable, thus before anything of its data was.
TEST_F(HalfAFirstCommit, IsNoObstacleToANewBeginning) {
  train(0);
  remove_of_second_rank("manifest");
  remove_of_second_rank("data");
  train(2);
}

TEST_F(HalfAFirstCommit, IsNotWhatIsLeftOfATraining) {
  train(1);
  remove_of_second_rank("manifest");
  try {
    train(0);
    ADD_FAILURE() << "a rank's training was replaced";
  } catch (const StoreError& error) {
    EXPECT_NE(std::string(error.what()).find("holds a training"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace hoist::test::crash_test
