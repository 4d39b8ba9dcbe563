// SPDX-License-Identifier: Apache-2.0
// docs/scale.md shows what hoist plan prints: every "$ hoist plan ..." is run again, its output compared, and what the
// text says of it looked up in its report.
// HOIST_UPDATE_GOLDEN=1 writes what it prints now.
#include <cstdlib>
#include <map>
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
    EXPECT_EQ(std::system(line.c_str()), 0) << command << test::contents_of(path("out"));
    EXPECT_NE(test::contents_of(path("out")), "") << command;
    return test::contents_of(path("out"));
  }
};

TEST_F(Scale, ShowsWhatThePlannerPrints) {
  const std::string document = HOIST_SOURCE_DIR "/docs/scale.md";
  std::istringstream lines(test::contents_of(document));
  std::string now;
  std::map<std::string, nlohmann::json> plans;  // by the arguments that the document shows
  bool skipping = false;                        // the old output of a command
  for (std::string line; std::getline(lines, line);) {
    if (line == "```") skipping = false;
    if (skipping) continue;
    now += line + "\n";
    if (line.rfind("$ ", 0) != 0) continue;
    skipping = true;
    const std::string command = line.substr(2), plan = "hoist plan ";
    if (command.rfind(plan, 0) != 0) {
      now += output_of(command);
      continue;
    }
    now += output_of(plan + "--json '" + path("plan.json") + "' " + command.substr(plan.size()));
    plans[command.substr(plan.size(), command.find(" | ") - plan.size())] = json_of("plan.json");
  }
  if (std::getenv("HOIST_UPDATE_GOLDEN") != nullptr) std::ofstream(document, std::ios::binary) << now;
  EXPECT_EQ(now, test::contents_of(document)) << "run this test with HOIST_UPDATE_GOLDEN=1, and read the text again";

  // The claims of its text.
  const std::string node = " --machine machines/h100-8.json";
  const auto& eight = plans.at("--parameters 13e9 --world 8 --device-memory 36GiB" + node);
  const auto& four = plans.at("--parameters 13e9 --world 4 --device-memory 36GiB" + node);
  EXPECT_EQ(eight["rows"][0]["optimizer"], "device");
  EXPECT_EQ(four["rows"][0]["optimizer"], "pinned");
  EXPECT_LE(four["step_seconds"].get<double>(), 1.15 * eight["step_seconds"].get<double>());
  const auto& trillion = plans.at("--parameters 1e12 --tokens 2048" + node);
  EXPECT_EQ(trillion["rows"][0]["fits"], true);
  EXPECT_EQ(trillion["rows"][0]["optimizer"], "nvme");
  EXPECT_EQ(plans.at("--parameters 175e9" + node)["rows"][0]["fits"], true);
}

}  // namespace
}  // namespace hoist::scale_test
