// SPDX-License-Identifier: Apache-2.0
#include <sstream>
#include <string>

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/core/printable.hpp>

namespace hoist::test::printable_test {
namespace {

constexpr const char* kEscapes = "a\x1b]0;title\x07\x1b[2Jb";
constexpr const char* kShown = "a\\x1b]0;title\\x07\\x1b[2Jb";

TEST(Printable, ShowsControlCharactersAndKeepsText) {
  EXPECT_EQ(printable(kEscapes), kShown);
  EXPECT_EQ(printable("line 1\nline 2"), "line 1\nline 2");
  EXPECT_EQ(printable("\r\t\x7f"), "\\x0d\\x09\\x7f");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b31m");  // a C1 character: some terminals take it for ESC [
  EXPECT_EQ(printable("naïve 模型 🙂"), "naïve 模型 🙂");
  EXPECT_EQ(printable(""), "");
  EXPECT_EQ(printable(printable(kEscapes)), printable(kEscapes));
}

TEST(Printable, ShowsBytesThatAreNotUtf8) {
  EXPECT_EQ(printable("a\x9b"
                      "b"),
            "a\\x9bb");
  EXPECT_EQ(printable("\xff\xfe\xc3"), "\\xff\\xfe\\xc3");
  EXPECT_EQ(printable("\xc0\x9b"), "\\xc0\\x9b");           // an overlong ESC-like form
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(printable("\xe2\x82"), "\\xe2\\x82");  // cut off
}

TEST(Printable, NamesWithControlCharactersAreFound) {
  EXPECT_TRUE(has_control_characters(kEscapes));
  EXPECT_TRUE(has_control_characters("a\nb"));
  EXPECT_TRUE(has_control_characters("\xc2\x9b"));
  EXPECT_FALSE(has_control_characters("naïve 模型\xff"));
}

TEST(Printable, NoErrorPrintsControlCharacters) {
  EXPECT_STREQ(Error(kEscapes).what(), kShown);
  const IoError error({.operation = "open", .path = kEscapes}, "");
  EXPECT_EQ(std::string(error.what()).find('\x1b'), std::string::npos);
  EXPECT_EQ(error.where.path, kEscapes);  // the true name, for the program
}

TEST(Printable, NoLineOfTheLogHasControlCharacters) {
  const auto former = spdlog::default_logger();
  std::ostringstream lines;
  spdlog::set_default_logger(
      std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::ostream_sink_mt>(lines)));
  log_warning("{} is {{strange}}", kEscapes);
  spdlog::set_default_logger(former);
  EXPECT_NE(lines.str().find(std::string(kShown) + " is {strange}"), std::string::npos) << lines.str();
  EXPECT_EQ(lines.str().find('\x1b'), std::string::npos);
}

TEST(Printable, ARefusedNameStaysOnItsLine) {
  EXPECT_EQ(on_one_line("a\nb\n"), "a\\x0ab\\x0a");
  EXPECT_EQ(on_one_line("a b"), "a b");
}

TEST(Log, StdoutIsLeftToTheProgram) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  log_warning("a line for {}", "people");
  spdlog::default_logger()->flush();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("a line for people"), std::string::npos);
}

}  // namespace
}  // namespace hoist::test::printable_test
