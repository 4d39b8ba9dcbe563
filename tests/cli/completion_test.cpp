// SPDX-License-Identifier: Apache-2.0
// The shells complete what the program has.
#include <cstdlib>
#include <sstream>
#include <string>

#include <gmock/gmock.h>

#include "program.hpp"

namespace hoist::completion_test {
namespace {

using ::testing::HasSubstr;

class Completion : public test::ProgramTest {};

// Every command and option that --help names is in each script.
TEST_F(Completion, CompletionNamesEveryCommandAndOption) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const auto script = run(std::string("completion ") + shell);
    ASSERT_EQ(script.exit_code, 0) << script.errors;
    for (const char* command : {"check", "inspect", "export", "doctor", "bench", "tune", "completion"}) {
      EXPECT_THAT(script.output, HasSubstr(command)) << shell;
      std::istringstream help(run(std::string(command) + " --help").output);
      std::string word;
      while (help >> word) {
        if (!word.starts_with("--") || word.find_first_of("=/.\"") != std::string::npos) continue;
        const std::string name = word.substr(
            2, word.find_first_of(",]") == std::string::npos ? std::string::npos : word.find_first_of(",]") - 2);
        EXPECT_THAT(script.output, HasSubstr(name)) << shell << " " << command;
      }
    }
  }
  EXPECT_EQ(run("completion").exit_code, 2);
  EXPECT_EQ(run("completion powershell").exit_code, 2);
}

// zsh's _arguments refuses all options of a command if one's explanation ends at a bracket within it.
TEST_F(Completion, BracketsInExplanationsAreEscapedForZsh) {
  std::istringstream script(run("completion zsh").output);
  int explanations = 0;
  for (std::string line; std::getline(script, line);) {
    const std::size_t begin = line.find("''["), end = line.rfind("]'");
    if (!line.starts_with("    '-") || begin == std::string::npos || end == std::string::npos) continue;
    ++explanations;
    const std::string text = line.substr(begin + 3, end - begin - 3);
    for (std::size_t at = text.find_first_of("[]"); at != std::string::npos; at = text.find_first_of("[]", at + 1))
      EXPECT_TRUE(at > 0 && text[at - 1] == '\\') << line;
  }
  EXPECT_GT(explanations, 20);
}

TEST_F(Completion, BashCompletes) {
  if (std::system("bash -c true") != 0) GTEST_SKIP() << "no bash here";
  ASSERT_EQ(run("completion bash").exit_code, 0);
  write("completion.sh", run("completion bash").output);
  write("try.sh",
        "source ./completion.sh\nCOMP_WORDS=(hoist che)\nCOMP_CWORD=1\n_hoist\necho \"${COMPREPLY[@]}\"\n"
        "COMP_WORDS=(hoist check --print-s)\nCOMP_CWORD=2\n_hoist\necho \"${COMPREPLY[@]}\"\n");
  ASSERT_EQ(std::system(("cd '" + directory_.path().string() + "' && bash try.sh > completed.txt").c_str()), 0);
  EXPECT_EQ(test::contents_of(path("completed.txt")), "check\n--print-schema\n");
}

}  // namespace
}  // namespace hoist::completion_test
