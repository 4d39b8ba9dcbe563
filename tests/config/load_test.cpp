// SPDX-License-Identifier: Apache-2.0
// Files that are no configuration, or one with many mistakes.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <hoist/config/config.hpp>
#include <hoist/tests/support/other_kinds.hpp>

#include "samples.hpp"

namespace hoist::load_test {
namespace {

using ::testing::HasSubstr;

Config parse(const std::string& text) { return Config::parse(text, "test.json"); }

TEST(Problems, BeyondTheHundredthAreCounted) {
  try {
    parse(test::table_sample("refuse", "hundreds_of_problems").text);
    FAIL() << "accepted";
  } catch (const ConfigProblems& error) {
    EXPECT_EQ(error.problems.size(), kProblemsMax);
    EXPECT_EQ(error.unlisted, 150u);
    EXPECT_THAT(error.what(), HasSubstr("and 150 more"));
  }
}

// A data file taken for a configuration costs neither memory nor minutes.
TEST(Problems, LargeTextsAreRefused) {
  std::string list = "{\"aio\": [";
  for (int i = 0; i < 1'200'000; ++i) list += "0,";
  EXPECT_THROW(parse(list + "0]}"), ConfigProblems);
  std::string keys = "{";
  for (int i = 0; i < 100'000; ++i) keys += "\"zero_optimisation_" + std::to_string(i) + "\": 1,\n";
  EXPECT_THROW(parse(keys + "\"x\": 1}"), ConfigProblems);
}

TEST(Load, ADirectoryAndAnEndlessFileSayWhatTheyAre) {
  const auto message = [](const char* path) -> std::string {
    try {
      Config::load(path);
    } catch (const IoError& error) {
      return error.what();
    }
    return "loaded";
  };
  EXPECT_THAT(message("/tmp"), HasSubstr("name the configuration file in it"));
  EXPECT_THAT(message("/dev/zero"), HasSubstr("only regular files"));
}

// Reading a named pipe could hang, so it is refused. Pipes from a shell's <(...) and /dev/stdin already have a writer.
TEST(Load, APipeIsReadIfItWasGivenAndRefusedByName) {
  const test::TestDeadline deadline;
  const std::string name = "pipe-" + std::to_string(::getpid());
  ASSERT_TRUE(test::kOtherKinds.front().make(name));
  EXPECT_THROW(Config::load(name), IoError);
  ::unlink(name.c_str());

  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  constexpr std::string_view kText = R"({"bf16": {"enabled": true}})";
  ASSERT_EQ(::write(ends[1], kText.data(), kText.size()), static_cast<ssize_t>(kText.size()));
  ::close(ends[1]);
  EXPECT_NO_THROW(Config::load("/proc/self/fd/" + std::to_string(ends[0])));
  ::close(ends[0]);
}

TEST(Load, AMissingFileIsNamed) {
  try {
    Config::load("/no/such/file.json");
    FAIL() << "loaded";
  } catch (const IoError& error) {
    EXPECT_EQ(error.where.path, "/no/such/file.json");
    EXPECT_EQ(error.where.code, ENOENT);
  }
  EXPECT_THROW(Config::load("/"), IoError) << "a directory";
  EXPECT_THROW(Config::load("/dev/zero"), IoError) << "without end";
}

TEST(Problems, KeyIsTheFirstOne) {
  try {
    parse("{\"aio\": {\"queue_depth\": 0},\n \"bf16\": 3}");
    FAIL() << "accepted";
  } catch (const ConfigProblems& error) {
    ASSERT_EQ(error.problems.size(), 2u);
    EXPECT_EQ(error.key, "aio.queue_depth");
    EXPECT_EQ(error.problems[0].line, 1u);
    EXPECT_EQ(error.problems[0].column, 25u);
    EXPECT_EQ(error.problems[1].key, "bf16");
    EXPECT_EQ(error.problems[1].line, 2u);
  }
}

}  // namespace
}  // namespace hoist::load_test
