// SPDX-License-Identifier: Apache-2.0
// A run's reports about itself: metrics by step, and a trace.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/other_kinds.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::observation_test {
namespace {

using Json = nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::ThrowsMessage;

std::vector<Json> lines_of(const std::string& path) {
  std::vector<Json> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(Json::parse(line));
  return lines;
}

TEST(Metrics, OneLineAStepThatAddsUpToTheBooks) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.metrics_path = directory / "metrics.jsonl";
  ToyProgram model(setup);
  model.train(1, 3);
  model.gradient_scale = std::numeric_limits<float>::infinity();
  model.pass(4);
  EXPECT_FALSE(model.engine().step().applied);
  const auto lines = lines_of(setup.engine.metrics_path);
  ASSERT_EQ(lines.size(), 4u);
  std::uint64_t read_bytes = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(lines[i].at("step"), i + 1);
    EXPECT_EQ(lines[i].at("gradient_norm"), model.reports[i].gradient_norm);
    EXPECT_GT(lines[i].at("seconds"), 0.0);
  }
  for (const Json& line : lines) read_bytes += line.at("links").at("nvme_read").at("bytes").get<std::uint64_t>();
  EXPECT_EQ(read_bytes, model.runtime().ledger().totals(Link::nvme_read).bytes);
  EXPECT_EQ(lines[3].at("applied"), false);
  EXPECT_TRUE(lines[3].at("gradient_norm").is_null());
  std::ifstream prometheus(directory / "metrics.jsonl.prom");
  const std::string text(std::istreambuf_iterator<char>(prometheus), {});
  EXPECT_NE(text.find("\nhoist_step 3\n"), std::string::npos) << text;
  EXPECT_NE(text.find("hoist_link_bytes{link=\"nvme_write\"} "), std::string::npos);
}

TEST(Ledger, HasWhatEvaluationsReadWhenTheyEnd) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  ToyProgram model(setup);
  std::uint64_t before = model.runtime().ledger().totals(Link::nvme_read).bytes;
  for (int pass = 0; pass < 2; ++pass) {
    model.evaluate();
    const std::uint64_t now = model.runtime().ledger().totals(Link::nvme_read).bytes;
    EXPECT_GT(now, before);
    before = now;
  }
}

// Two buffers serve the gradients of six units: the third one waits until the first has been copied to the host.
TEST(Ledger, HasTheWaitsOfABackwardPassForCopiesOfGradients) {
  constexpr auto kCopy = std::chrono::milliseconds(20);  // of a unit's gradient
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.runtime.device_memory_bytes = 16 * kMiB;  // weights stay there between the passes of a step
  setup.runtime.host_device.link_bytes_per_second = 10'000'000;
  setup.engine.update_mode = UpdateMode::step;
  ToyProgram model(setup, {.matrices = std::vector<std::int64_t>(6, 100'000), .frozen = false, .tied = false});
  Nanoseconds longest{0};  // at least once nothing else holds the program up
  for (std::uint64_t step = 1; step <= 4; ++step) {
    const Nanoseconds before = model.runtime().ledger().waited(WaitCause::device_to_host);
    model.train(step, step);
    longest = std::max(longest, model.runtime().ledger().waited(WaitCause::device_to_host) - before);
  }
  EXPECT_GE(longest, 4 * kCopy) << "of six copies, the last two are waited for by step()";
}

// A step would wait for the reader of a pipe, and end the process with the reader.
TEST(Metrics, APipeIsRefusedAndNotWaitedFor) {
  const TestDeadline deadline;
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.metrics_path = directory / "pipe";
  ASSERT_TRUE(kOtherKinds.front().make(setup.engine.metrics_path));
  Runtime runtime(setup.runtime);
  for (const bool is_read : {false, true}) {
    const int reader = is_read ? ::open(setup.engine.metrics_path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC) : -1;
    ToyModel model(runtime, setup.engine);
    EXPECT_THAT([&] { model.initialize(); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("hoist.metrics"), HasSubstr("only regular files"),
                                                 Not(HasSubstr("Invalid argument")))))
        << is_read;
    if (is_read) ::close(reader);
  }
}

TEST(Metrics, AndTheTraceStayWhereTheyWereWhenTheProgramChangesItsDirectory) {
  const TempDirectory directory;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::create_directory(directory / "elsewhere");
  std::filesystem::current_path(directory / "");
  {
    ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
    setup.engine.metrics_path = "metrics.jsonl";
    setup.runtime.trace_path = "trace.json";
    ToyProgram model(setup);
    std::filesystem::current_path("elsewhere");
    model.train(1, 2);
  }
  std::filesystem::current_path(before);
  for (const char* name : {"metrics.jsonl", "metrics.jsonl.prom", "trace.json"})
    EXPECT_TRUE(std::filesystem::exists(directory / name)) << name;
  EXPECT_TRUE(std::filesystem::is_empty(directory / "elsewhere"));
}

TEST(Metrics, ALineThatWasCutOffIsTheOnlyOneThatIsLost) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.metrics_path = directory / "metrics.jsonl";
  const auto steps_in_file = [&] {
    std::vector<int> steps;  // 0: not a line of JSON
    std::ifstream file(setup.engine.metrics_path);
    for (std::string line; std::getline(file, line);) {
      const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
      steps.push_back(json.is_discarded() ? 0 : json.at("step").get<int>());
    }
    return steps;
  };
  const auto cut_off = [&](std::uint64_t bytes) {
    std::filesystem::resize_file(setup.engine.metrics_path,
                                 std::filesystem::file_size(setup.engine.metrics_path) - bytes);
  };
  for (int run = 0; run < 2; ++run) {
    ToyProgram model(setup);
    model.train(1, 2);
    if (run == 0) cut_off(40);  // as a crash of the machine does
  }
  EXPECT_EQ(steps_in_file(), (std::vector{1, 0, 1, 2}));

  // A file system that is full for a while: its limit cuts step 2 off, and nothing of step 3 is written.
  std::filesystem::remove(setup.engine.metrics_path);
  ToyProgram model(setup);
  model.train(1, 1);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit before {};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const struct rlimit full { std::filesystem::file_size(setup.engine.metrics_path) + 100, before.rlim_max };
  ::setrlimit(RLIMIT_FSIZE, &full);
  model.train(2, 3);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  model.train(4, 5);
  EXPECT_EQ(steps_in_file(), (std::vector{1, 0, 4, 5}));
}

TEST(Metrics, AResumedRunAppends) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.metrics_path = directory / "metrics.jsonl";
  for (const bool fresh : {true, false}) {
    ToyModel model(setup);
    if (fresh) {
      model.initialize();
    } else {
      model.restore();
    }
    model.train(model.engine().step_count() + 1, model.engine().step_count() + 2);
    model.engine().settle();
  }
  const auto lines = lines_of(setup.engine.metrics_path);
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[3].at("step"), 4);
}

TEST(Metrics, APlaceThatCannotBeWrittenIsRefusedAtTheStart) {
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.metrics_path = "/nowhere/metrics.jsonl";
  ToyModel model(setup);
  EXPECT_THROW(model.initialize(), IoError);
}

TEST(Metrics, TwoEnginesDoNotShareAFile) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.metrics_path = directory / "metrics.jsonl";
  setup.engine.lock_timeout = std::chrono::milliseconds(50);
  pid_t forked = 0;  // and outlives the engine
  {
    ToyModel first(setup);
    first.initialize();
    ToyModel second(setup);
    EXPECT_THAT([&] { second.initialize(); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("hoist.metrics: another engine"),
                                                 HasSubstr("metrics.jsonl open; end it, or name another file"))));
    first.train(1, 1);
    forked = ::fork();
    if (forked == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::pause();
    }
  }
  {
    ToyModel later(setup);
    later.initialize();
    later.train(1, 2);
  }
  ::kill(forked, SIGKILL);
  ::waitpid(forked, nullptr, 0);
  EXPECT_EQ(lines_of(setup.engine.metrics_path).size(), 3u);
}

TEST(TraceOfARun, HasARowForEveryLinkItUsed) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.runtime.trace_path = directory / "trace.json";
  train_on(2, setup, {}, 2);
  for (const int rank : {0, 1}) {
    std::ifstream file(directory / ("trace.rank-" + std::to_string(rank) + ".json"));
    const Json trace = Json::parse(file);
    std::map<std::string, int> rows;
    for (const Json& event : trace.at("traceEvents")) {
      if (event.at("ph") == "M" && event.at("name") == "thread_name") ++rows[event.at("args").at("name")];
    }
    for (const char* row :
         {"program", "optimizer", "NVMe read", "NVMe write", "host to device", "device to host", "wire", "commit"})
      EXPECT_EQ(rows[row], 1) << row;
  }
}

}  // namespace
}  // namespace hoist::test::observation_test
