// SPDX-License-Identifier: Apache-2.0
// hoist-gpt from outside: killed thirty times it ends in the same bits, and its memory stays near its budgets.
#include <chrono>
#include <csignal>
#include <sstream>
#include <thread>

#include <sys/resource.h>

#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>

#include "program.hpp"

namespace hoist::gpt::program_test {
namespace {

class KilledProgram : public Program, public testing::WithParamInterface<const char*> {};

TEST_P(KilledProgram, ThirtyTimesAtRandomMomentsEndsInTheSameBits) {
  constexpr int kKills = 30, kSteps = 2500;
  write("text", contents_of("/usr/share/common-licenses/Apache-2.0") + std::string(4000, 'x'));
  write_config("config.json", GetParam(), "nvme");
  change_config({{"gradient_clipping", 0.5}, {"zero_optimization", {{"sub_group_size", 50000}}}});
  const auto begin = std::chrono::steady_clock::now();
  const json calm = report_of(with(usual(kSteps), "--width", "48"));
  ASSERT_TRUE(calm.is_object());

  // So that thirty lives seldom reach its end.
  const auto life_max = (std::chrono::steady_clock::now() - begin) / 32;

  remove_store();
  std::filesystem::remove(path("report.json"));
  const auto seed = static_cast<std::uint64_t>(::getpid());
  Rng rng(seed);
  int kills = 0;
  for (int attempt = 0; attempt < 40 * kKills; ++attempt) {
    const pid_t child = start(with(usual(kSteps, {"--report", path("report.json"), "--resume"}), "--width", "48"));
    if (kills < kKills) {
      std::this_thread::sleep_for(
          std::chrono::nanoseconds(rng.below(static_cast<std::uint64_t>(std::chrono::nanoseconds(life_max).count()))));
      ::kill(child, SIGKILL);
    }
    const Outcome life = finish(child);
    if (life.code == -SIGKILL) {
      ++kills;
      continue;
    }
    ASSERT_EQ(life.code, 0) << "seed " << seed << ", after " << kills << " kills:\n" << life.out << life.error;
    if (kills == kKills) break;
    // The machine has become quicker than it was for the calm run: that was one more end, and the next ones follow.
    EXPECT_EQ(report()["digest"], calm["digest"]) << "seed " << seed << ", " << kills << " kills";
    remove_store();
  }
  EXPECT_EQ(kills, kKills);
  EXPECT_EQ(report()["digest"], calm["digest"]) << "seed " << seed << ", " << kills << " kills";
}

INSTANTIATE_TEST_SUITE_P(Parameters, KilledProgram, testing::Values("nvme", "cpu"),
                         [](const auto& c) { return std::string(c.param); });

TEST_F(Program, AFileThatMayNotGrowIsAnErrorThatNamesIt) {
  const Outcome outcome = finish(start(usual(3), [] {
    const rlimit limit{256 * kKiB, 256 * kKiB};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }));
  EXPECT_EQ(outcome.code, 1) << outcome.error;
  EXPECT_THAT(outcome.error, HasSubstr(path("store")));
  EXPECT_THAT(outcome.error, HasSubstr("File too large"));
}

// Memory of a process now, in bytes: resident, and huge pages (which the resident size leaves out).
std::uint64_t memory_of(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/status");
  std::uint64_t kib = 0, value = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key >> value;
    if (key == "VmHWM:" || key == "HugetlbPages:") kib += value;
  }
  return kib * kKiB;
}

TEST_F(Program, StaysWithinBudgetsPlusAQuarterGibibyte) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need memory of their own";
#endif
  write_config("config.json", "nvme", "nvme", {{"device_memory", "16MiB"}, {"pinned_memory", "48MiB"}});
  const pid_t child = start({"--config", path("config.json"), "--text", path("text"), "--steps", "12", "--layers", "8",
                             "--width", "256", "--heads", "4", "--context", "32"});
  std::uint64_t most = 0;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    most = std::max(most, memory_of(child));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ASSERT_EQ(status, 0) << contents_of(path("error"));
  EXPECT_GT(most, 32 * kMiB);
  EXPECT_LE(most, (16 + 48 + 256) * kMiB);
}

}  // namespace
}  // namespace hoist::gpt::program_test
