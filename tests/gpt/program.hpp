// SPDX-License-Identifier: Apache-2.0
// tests/gpt/program.hpp - runs the real program in a directory of its own, with a small model and a short text.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <hoist/tests/support/file_contents.hpp>
#include <hoist/tests/support/spawn.hpp>
#include <hoist/tests/support/temp_directory.hpp>

namespace hoist::gpt::program_test {

using hoist::test::contents_of;
using nlohmann::json;
using testing::HasSubstr;

inline const json kWeightsComeForEachUse = {{"stage3_param_persistence_threshold", 0},
                                            {"stage3_max_reuse_distance", 0}};

struct Outcome {
  int code = -1;  // exit code, or -signal
  std::string out;
  std::string error;
};

// These words with another value of an option.
inline std::vector<std::string> with(std::vector<std::string> words, const std::string& option,
                                     const std::string& value) {
  *(std::ranges::find(words, option) + 1) = value;
  return words;
}

inline void wait_until(const std::function<bool()>& is_so) {
  for (int i = 0; i < 1200 && !is_so(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(50));
}

// Who writes more into it than it holds waits until contents() is called.
class Pipe {
 public:
  explicit Pipe(const std::string& path) {
    ::mkfifo(path.c_str(), 0600);
    reader_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    ::fcntl(reader_, F_SETPIPE_SZ, 4096);
  }
  ~Pipe() { ::close(reader_); }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  // Until its writer has closed it.
  std::string contents() const {
    std::string text;
    std::array<char, 4096> part;
    pollfd ready{.fd = reader_, .events = POLLIN, .revents = 0};
    while (::poll(&ready, 1, 60'000) == 1) {
      const ssize_t count = ::read(reader_, part.data(), part.size());
      if (count <= 0) break;
      text.append(part.data(), static_cast<std::size_t>(count));
    }
    return text;
  }

 private:
  int reader_ = -1;
};

class Program : public testing::Test {
 protected:
  Program() {
    std::string text;
    for (int i = 0; i < 50; ++i) text += "Peter Piper picked a peck of pickled peppers. ";
    write("text", text);
    write_config("config.json", "nvme", "nvme");
  }

  std::string path(const std::string& name) const { return directory_ / name; }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  void write_config(const std::string& name, const std::string& parameters, const std::string& optimizer,
                    const json& hoist_extra = json::object()) const {
    json config = {
        {"train_micro_batch_size_per_gpu", 2},
        {"bf16", {{"enabled", true}}},
        {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 3e-3}}}}},
        {"zero_optimization",
         {{"stage", 3}, {"offload_param", {{"device", parameters}}}, {"offload_optimizer", {{"device", optimizer}}}}},
        {"hoist", {{"device", "host"}, {"device_memory", "8MiB"}, {"pinned_memory", "32MiB"}}}};
    for (const char* part : {"offload_param", "offload_optimizer"}) {
      json& section = config["zero_optimization"][part];
      if (section["device"] == "nvme") section["nvme_path"] = path("store");
    }
    config["hoist"].update(hoist_extra);
    write(name, config.dump(2));
  }
  // An entry that is null removes a key.
  void change_config(const json& changes) const {
    json config = json::parse(contents_of(path("config.json")));
    config.merge_patch(changes);
    write("config.json", config.dump(2));
  }

  std::vector<std::string> usual(int steps) const {
    return {"--config", path("config.json"), "--text", path("text"), "--steps", std::to_string(steps), "--layers",
            "2",        "--width",           "32",     "--heads",    "2",       "--context",           "16"};
  }
  std::vector<std::string> usual(int steps, std::initializer_list<std::string> more) const {
    std::vector<std::string> words = usual(steps);
    words.insert(words.end(), more);
    return words;
  }

  // With a `launcher`, it starts the program. `first` is called in the new process, as in spawn().
  pid_t start(std::vector<std::string> words, const std::function<void()>& first = {},
              std::vector<std::string> launcher = {}) const {
    launcher.emplace_back(HOIST_GPT);
    words.insert(words.begin(), launcher.begin(), launcher.end());
    std::filesystem::remove(path("out"));  // a run without output must not show the last run's
    return test::spawn(std::move(words), path("out"), path("error"), first);
  }
  Outcome finish(pid_t child) const {
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), contents_of(path("out")),
            contents_of(path("error"))};
  }
  Outcome run(const std::vector<std::string>& words) const { return finish(start(words)); }

  // Bad input: exit code 2 and one line that says what.
  void expect_refused(const std::vector<std::string>& words, const std::string& message) const {
    SCOPED_TRACE(testing::PrintToString(words));
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.error;
    EXPECT_THAT(outcome.error, testing::StartsWith("hoist-gpt: "));
    EXPECT_THAT(outcome.error, HasSubstr(message));
    EXPECT_EQ(std::count(outcome.error.begin(), outcome.error.end(), '\n'), 1) << outcome.error;
  }

  json report() const { return json::parse(contents_of(path("report.json"))); }
  json report_of(const std::vector<std::string>& words) const {
    std::vector<std::string> with_report = words;
    with_report.insert(with_report.end(), {"--report", path("report.json")});
    const Outcome outcome = run(with_report);
    EXPECT_EQ(outcome.code, 0) << outcome.error;
    return outcome.code == 0 ? report() : json();
  }
  void remove_store() const { std::filesystem::remove_all(path("store")); }

  const test::TempDirectory directory_;
};

}  // namespace hoist::gpt::program_test
