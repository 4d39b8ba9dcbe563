// SPDX-License-Identifier: Apache-2.0
// docs/architecture.md names functions and files that exist.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <string>

#include <gtest/gtest.h>

namespace {

namespace fs = std::filesystem;

const fs::path kSource = HOIST_SOURCE_DIR;

std::string text_of(const fs::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

template <typename Visit>
int for_each_match(const std::string& text, const char* pattern, const Visit& visit) {
  const std::regex expression(pattern);
  int count = 0;
  for (std::sregex_iterator match(text.begin(), text.end(), expression), end; match != end; ++match, ++count)
    visit(*match);
  return count;
}

TEST(Architecture, ItsFilesExist) {
  const int count = for_each_match(text_of(kSource / "docs/architecture.md"), R"(`(\w+(/\w+)+\.\w+)`)",
                                   [](const auto& file) { EXPECT_TRUE(fs::exists(kSource / file.str(1))) << file[1]; });
  EXPECT_GT(count, 50);
}

// `Class::name` (`file`), or `name(...)` (`file`): the file has the name, and with parentheses a call or declaration.
TEST(Architecture, ItsFunctionsAreInTheFilesThatItNamesWithThem) {
  const auto expect_in_file = [](const auto& found) {
    const std::regex name("\\b" + found.str(1) + (found.length(2) > 0 ? "\\(" : "\\b"));
    EXPECT_TRUE(std::regex_search(text_of(kSource / found.str(3)), name)) << found[0];
  };
  const int count = for_each_match(text_of(kSource / "docs/architecture.md"),
                                   R"(`(?:\w+::)*(\w+)(\(?)[^`]*`\s\(`(\w+(?:/\w+)+\.\w+)`)", expect_in_file);
  EXPECT_GT(count, 20);
}

}  // namespace
