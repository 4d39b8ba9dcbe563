// SPDX-License-Identifier: Apache-2.0
// docs/scale.md shows what hoist plan prints: every "$ hoist plan ..." is run again, and its output compared.
// HOIST_UPDATE_GOLDEN=1 writes what it prints now.
#include <cstdlib>
#include <sstream>

#include <gtest/gtest.h>

#include "program.hpp"

namespace hoist::scale_test {
namespace {

class Scale : public test::ProgramTest {
 protected:
  // A command of the document, in the source tree. As in a terminal, through a shell.
  std::string output_of(const std::string& command) const {
    const std::string line = "cd '" HOIST_SOURCE_DIR "' && hoist() { '" HOIST_PROGRAM "' \"$@\"; } && { " + command +
                             "; } >'" + path("out") + "' 2>&1 </dev/null";
    EXPECT_EQ(std::system(line.c_str()), 0) << command << test::text_of(path("out"));
    EXPECT_NE(test::text_of(path("out")), "") << command;
    return test::text_of(path("out"));
  }
};

TEST_F(Scale, ShowsWhatThePlannerPrints) {
  const std::string document = HOIST_SOURCE_DIR "/docs/scale.md";
  std::istringstream lines(test::text_of(document));
  std::string now;
  int commands = 0;
  bool skipping = false;  // the old output of a command
  for (std::string line; std::getline(lines, line);) {
    if (line == "```") skipping = false;
    if (skipping) continue;
    now += line + "\n";
    if (line.rfind("$ ", 0) != 0) continue;
    now += output_of(line.substr(2));
    skipping = true;
    ++commands;
  }
  EXPECT_GE(commands, 4);
  if (std::getenv("HOIST_UPDATE_GOLDEN") != nullptr) std::ofstream(document, std::ios::binary) << now;
  EXPECT_EQ(now, test::text_of(document)) << "run this test with HOIST_UPDATE_GOLDEN=1, and read the text again";
}

// The claims of its text.
TEST_F(Scale, ItsClaimsHold) {
  const auto plan = [&](const std::string& arguments) {
    output_of("hoist plan " + arguments + " --json '" + path("plan.json") + "'");
    return json_of("plan.json");
  };
  const std::string node = " --machine machines/h100-8.json";
  const auto eight = plan("--parameters 13e9 --world 8 --device-memory 36GiB" + node);
  const auto four = plan("--parameters 13e9 --world 4 --device-memory 36GiB" + node);
  EXPECT_EQ(eight["rows"][0]["optimizer"], "device");
  EXPECT_EQ(four["rows"][0]["optimizer"], "pinned");
  EXPECT_LE(four["step_seconds"].get<double>(), 1.15 * eight["step_seconds"].get<double>());
  const auto trillion = plan("--parameters 1e12 --tokens 2048" + node);
  EXPECT_EQ(trillion["rows"][0]["fits"], true);
  EXPECT_EQ(trillion["rows"][0]["optimizer"], "nvme");
  const auto gpt3 = plan("--parameters 175e9" + node);
  EXPECT_EQ(gpt3["rows"][0]["fits"], true);
}

}  // namespace
}  // namespace hoist::scale_test
