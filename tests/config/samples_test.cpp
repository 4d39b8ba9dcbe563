// SPDX-License-Identifier: Apache-2.0
// Sample configurations: accepted ones parse, refused ones give exactly the message beside them.
// HOIST_UPDATE_GOLDEN=1 rewrites the messages; read the difference before committing it.
#include "samples.hpp"

#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/config/config.hpp>

namespace hoist {
namespace {

TEST(Samples, AcceptedOnesAreAccepted) {
  const auto files = test::sample_files("accept");
  EXPECT_GE(files.size(), 8u);
  for (const auto& file : files) {
    EXPECT_NO_THROW({
      const Config config = Config::load(file.string());
      config.check_world_size(4);
    }) << file;
  }
}

TEST(Samples, RefusedOnesSayWhy) {
  const bool update = std::getenv("HOIST_UPDATE_GOLDEN") != nullptr;
  const auto files = test::sample_files("refuse");
  EXPECT_GE(files.size(), 40u);
  for (const auto& file : files) {
    const std::string name = file.filename().string();
    std::string message = "accepted";
    try {
      Config::parse(test::read_text(file), name);
    } catch (const ConfigError& error) {
      message = error.what();
    }
    auto golden = file;
    golden.replace_extension(".txt");
    if (update) std::ofstream(golden) << message << '\n';
    EXPECT_EQ(message + "\n", test::read_text(golden)) << name;
    EXPECT_NE(message, "accepted") << name;
  }
}

// The file the example trains with must always be a good one.
TEST(Samples, TheExampleIsAccepted) {
  const Config config = Config::load(std::string(HOIST_SOURCE_DIR) + "/examples/gpt/offload.json");
  EXPECT_EQ(config.engine.parameters, Placement::nvme);
  EXPECT_EQ(config.engine.optimizer, Placement::nvme);
  EXPECT_THAT(config.warnings, ::testing::IsEmpty());
}

}  // namespace
}  // namespace hoist
