// SPDX-License-Identifier: Apache-2.0
// Files of unknown origin whose names hold escape sequences: no command passes them on to the terminal.
#include <cstring>
#include <fstream>
#include <span>
#include <string>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <unistd.h>

#include <hoist/core/checksum.hpp>

#include "program.hpp"
#include "stores.hpp"

namespace hoist::escapes_test {
namespace {

using ::testing::HasSubstr;

constexpr std::string_view kEscapes = "\x1b]0;t\x07\x1b[2J";  // as long as "unit0.matr"

class Escapes : public test::ProgramTest {
 protected:
  // Replaces text in a store's description of its model by text of the same length.
  void rename_in_layout(const std::string& manifest, std::string_view from, std::string_view to) const {
    ASSERT_EQ(from.size(), to.size());
    std::string bytes = test::contents_of(path(manifest));
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data() + 56, sizeof(length));
    ASSERT_LE(length, bytes.size());
    for (std::size_t at = bytes.find(from); at < length; at = bytes.find(from, at + 1))
      bytes.replace(at, from.size(), to);
    const std::uint64_t sum = checksum(std::as_bytes(std::span(bytes).subspan(16, length - 16)));
    std::memcpy(bytes.data() + 8, &sum, sizeof(sum));
    std::ofstream(path(manifest), std::ios::binary) << bytes;
  }

  static void expect_printable(const test::ProgramResult& result) {
    EXPECT_EQ((result.output + result.errors).find_first_of("\x1b\x07"), std::string::npos)
        << result.output << result.errors;
  }
};

TEST_F(Escapes, AStoreWithThemInANameIsRefusedInPrintableText) {
  test::make_store(path("store"), 1, 1);
  rename_in_layout("store/rank-00000.manifest", "unit0.matr", kEscapes);
  for (const char* command : {"verify store", "export store --to out_files"}) {
    const auto result = run(command);
    EXPECT_NE(result.exit_code, 0);
    EXPECT_THAT(result.output + result.errors, HasSubstr("\\x1b]0;t\\x07\\x1b[2J"));
    expect_printable(result);
  }
}

TEST_F(Escapes, TheNameOfALocksHolderIsPrintable) {
  test::make_store(path("store"), 1, 1);
  write("store/rank-00000.lock-info", "process 1 on " + std::string(kEscapes) + "\n");
  const int data = ::open(path("store/rank-00000.data").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(data, LOCK_EX), 0);
  const auto result = run("inspect store --json report.json");
  ::close(data);
  EXPECT_THAT(result.output, HasSubstr("process 1 on \\x1b]0;t"));
  expect_printable(result);
  EXPECT_EQ(test::contents_of(path("report.json")).find('\x1b'), std::string::npos);
  EXPECT_EQ(json_of("report.json")["in_use_by"], "process 1 on " + std::string(kEscapes));  // the true text
}

TEST_F(Escapes, ArgumentsAreShownPrintable) {
  expect_printable(run("inspect \"$(printf 'no\\033[2Jstore')\""));
  expect_printable(run("check \"$(printf 'no\\033[2Jfile')\""));
  expect_printable(run("\"$(printf '\\033[2J')\""));
}

TEST_F(Escapes, KeysOfAConfigurationAreShownPrintable) {
  write("config.json", R"({"zero_optimization": {"stage": 3}, "\u001b]0;t\u0007": 1, "hoist": {"\u001b[2J": 2}})");
  const auto result = run("check config.json");
  EXPECT_NE(result.exit_code, 0);
  expect_printable(result);
}

}  // namespace
}  // namespace hoist::escapes_test
