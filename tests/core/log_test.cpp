// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <memory>
#include <new>

#include <gtest/gtest.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <hoist/core/log.hpp>

namespace hoist::test::log_test {
struct Unprintable {};
}  // namespace hoist::test::log_test

template <>
struct fmt::formatter<hoist::test::log_test::Unprintable> {
  static constexpr auto parse(fmt::format_parse_context& context) { return context.begin(); }
  static fmt::format_context::iterator format(const hoist::test::log_test::Unprintable&, fmt::format_context&) {
    throw std::bad_alloc();
  }
};

namespace hoist::test::log_test {
namespace {

bool last_words = false;
struct Global {
  const char* name;
  ~Global() {
    if (!last_words) return;
    log_warning("a warning of the {} global", name);
    log_error("an error of the {} global", name);
  }
};
// The linker takes the tests before the library: this one is destroyed after spdlog.
[[gnu::init_priority(101)]] const Global kFirst{"first"};
const Global kLater{"later"};

void use_own_logger() {
  const auto logger = std::make_shared<spdlog::logger>("own", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_level(spdlog::level::err);
  logger->set_pattern("own %v");
  spdlog::set_default_logger(logger);
}

[[noreturn]] void exit_with_last_words() {
  last_words = true;
  std::exit(0);
}

TEST(Log, TakesTheLinesOfTheDestructorsOfGlobals) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(exit_with_last_words(), testing::ExitedWithCode(0),
              "\\[warning\\] a warning of the later global\n[^\n]*\\[error\\] an error of the later global\n"
              "\\[warning\\] a warning of the first global\n\\[error\\] an error of the first global\n$");
}

TEST(Log, LeavesTheseLinesToTheProgramsLoggerAndLevel) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto with_own_logger = [] {
    use_own_logger();
    exit_with_last_words();
  };
  EXPECT_EXIT(with_own_logger(), testing::ExitedWithCode(0),
              "^own an error of the later global\n\\[error\\] an error of the first global\n$");
}

TEST(Log, ALineThatCannotBeFormattedIsLeftOut) {
  testing::internal::CaptureStderr();
  log_warning("{} has a copy", Unprintable{});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "a line of the log is left out: std::bad_alloc\n");
}

}  // namespace
}  // namespace hoist::test::log_test
