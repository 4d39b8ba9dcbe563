// SPDX-License-Identifier: Apache-2.0
// hoist-gpt from outside: killed thirty times it ends in the same bits, and its memory stays near its budgets.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/rng.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::test::program_test {
namespace {

struct RunOptions {
  std::string parameters;  // "cpu" or "nvme"
  std::string shape = "--layers 2 --width 48 --heads 2 --context 16 --batch 2";
  std::string device = "8MiB", pinned = "32MiB";
  rlim_t file_bytes = RLIM_INFINITY;
};

class GptRun {
 public:
  GptRun(const TempDirectory& directory, const RunOptions& setup) : directory_(directory), setup_(setup) {
    std::ofstream(directory / "text") << contents_of("/usr/share/common-licenses/Apache-2.0") << std::string(4000, 'x');
    std::ofstream(directory / "config.json")
        << R"({"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "gradient_clipping": 0.5,)"
        << R"("optimizer": {"type": "AdamW", "params": {"lr": 0.003}}, "zero_optimization": {"stage": 3, "sub_group_size": 50000,)"
        << R"("offload_param": {"device": ")" << setup.parameters << "\""
        << (setup.parameters == "nvme" ? ", \"nvme_path\": \"" + directory / "nvme" + "\"" : "")
        << R"(}, "offload_optimizer": {"device": "nvme", "nvme_path": ")" << directory / "nvme"
        << R"("}}, "hoist": {"device_memory": ")" << setup.device << R"(", "pinned_memory": ")" << setup.pinned
        << "\"}}";
  }

  pid_t start(int steps, const std::string& report, bool resume) const {
    std::istringstream words(setup_.shape);
    std::vector<std::string> arguments{HOIST_GPT,           "--config", directory_ / "config.json", "--text",
                                       directory_ / "text", "--steps",  std::to_string(steps),      "--report",
                                       directory_ / report};
    for (std::string word; words >> word;) arguments.push_back(word);
    if (resume) arguments.push_back("--resume");
    const pid_t child = ::fork();
    if (child != 0) return child;
    const int out = ::open((directory_ / "output").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    ::dup2(out, 1);
    ::dup2(out, 2);
    const rlimit limit{setup_.file_bytes, setup_.file_bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    ::execv(HOIST_GPT, pointers.data());
    ::_exit(127);
  }

  std::string output() const { return contents_of(directory_ / "output"); }
  // The report's digest object, as text.
  std::string digest(const std::string& report) const {
    const std::string text = contents_of(directory_ / report);
    const std::size_t begin = text.find("\"digest\"");
    return begin == std::string::npos ? "" : text.substr(begin, text.find('}', begin) - begin);
  }

 private:
  const TempDirectory& directory_;
  RunOptions setup_;
};

class KilledProgram : public testing::TestWithParam<const char*> {};

TEST_P(KilledProgram, ThirtyTimesAtRandomMomentsEndsInTheSameBits) {
  constexpr int kKills = 30, kSteps = 2500;
  const TempDirectory calm_directory, directory;
  const RunOptions setup{.parameters = GetParam()};
  const GptRun calm(calm_directory, setup);
  int status = 0;
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_GT(::waitpid(calm.start(kSteps, "report.json", false), &status, 0), 0);
  ASSERT_EQ(WEXITSTATUS(status), 0) << calm.output();

  // So that thirty lives seldom reach its end.
  const auto life_max = (std::chrono::steady_clock::now() - begin) / 32;

  const GptRun run(directory, setup);
  const auto seed = static_cast<std::uint64_t>(::getpid());
  Rng rng(seed);
  int kills = 0;
  for (int attempt = 0; attempt < 40 * kKills; ++attempt) {
    const pid_t child = run.start(kSteps, "report.json", true);
    if (kills < kKills) {
      std::this_thread::sleep_for(
          std::chrono::nanoseconds(rng.below(static_cast<std::uint64_t>(std::chrono::nanoseconds(life_max).count()))));
      ::kill(child, SIGKILL);
    }
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) {
      ++kills;
      continue;
    }
    ASSERT_EQ(WEXITSTATUS(status), 0) << "seed " << seed << ", after " << kills << " kills:\n" << run.output();
    if (kills == kKills) break;
    // The machine has become quicker than it was for the calm run: that was one more end, and the next ones follow.
    EXPECT_EQ(run.digest("report.json"), calm.digest("report.json")) << "seed " << seed << ", " << kills << " kills";
    std::filesystem::remove_all(directory / "nvme");
  }
  EXPECT_EQ(kills, kKills);
  EXPECT_FALSE(run.digest("report.json").empty());
  EXPECT_EQ(run.digest("report.json"), calm.digest("report.json")) << "seed " << seed << ", " << kills << " kills";
}

INSTANTIATE_TEST_SUITE_P(Parameters, KilledProgram, testing::Values("nvme", "cpu"),
                         [](const auto& c) { return std::string(c.param); });

TEST(ProgramLimits, AFileThatMayNotGrowIsAnErrorThatNamesIt) {
  const TempDirectory directory;
  const GptRun run(directory, {.parameters = "nvme", .file_bytes = 256 * kKiB});
  int status = 0;
  ASSERT_GT(::waitpid(run.start(3, "report.json", false), &status, 0), 0);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 1) << run.output();
  EXPECT_NE(run.output().find(directory / "nvme"), std::string::npos) << run.output();
  EXPECT_NE(run.output().find("File too large"), std::string::npos) << run.output();
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

TEST(ProgramMemory, StaysWithinBudgetsPlusAQuarterGibibyte) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need memory of their own";
#endif
  const TempDirectory directory;
  const GptRun run(directory, {.parameters = "nvme",
                               .shape = "--layers 8 --width 256 --heads 4 --context 32 --batch 2",
                               .device = "16MiB",
                               .pinned = "48MiB"});
  const pid_t child = run.start(12, "report.json", false);
  std::uint64_t most = 0;
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    most = std::max(most, memory_of(child));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ASSERT_EQ(WEXITSTATUS(status), 0) << run.output();
  EXPECT_GT(most, 32 * kMiB);
  EXPECT_LE(most, (16 + 48 + 256) * kMiB);
}

}  // namespace
}  // namespace hoist::test::program_test
