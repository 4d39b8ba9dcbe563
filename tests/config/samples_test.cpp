// SPDX-License-Identifier: Apache-2.0
// Sample configurations: accepted ones parse, refused ones give exactly the message beside them, and those of public
// projects are accepted or refused as their golden files say. HOIST_UPDATE_GOLDEN=1 rewrites the golden files; read the
// difference before committing it.
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

void expect_golden(const std::filesystem::path& sample, const std::string& text) {
  auto golden = sample;
  golden.replace_extension(".txt");
  if (std::getenv("HOIST_UPDATE_GOLDEN") != nullptr) std::ofstream(golden) << text;
  EXPECT_EQ(text, test::read_text(golden)) << sample;
}

// What parsing says: the refusal, or "accepted" with every warning and note.
std::string verdict(const std::filesystem::path& file) {
  try {
    const Config config = Config::parse(test::read_text(file), file.filename().string());
    std::string text = "accepted\n";
    for (const std::string& warning : config.warnings) text += "warning: " + warning + "\n";
    for (const std::string& note : config.notes) text += "note: " + note + "\n";
    return text;
  } catch (const ConfigError& error) {
    return std::string(error.what()) + "\n";
  }
}

TEST(Samples, RefusedOnesSayWhy) {
  const auto files = test::sample_files("refuse");
  EXPECT_GE(files.size(), 60u);
  for (const auto& file : files) {
    const std::string text = verdict(file);
    EXPECT_FALSE(text.starts_with("accepted")) << file;
    expect_golden(file, text);
  }
}

// Configurations of public projects' documentation and examples, written anew with their values.
TEST(Samples, ThoseOfPublicProjectsAreTakenAsStated) {
  const auto files = test::sample_files("wild");
  EXPECT_GE(files.size(), 30u);
  int accepted = 0;
  for (const auto& file : files) {
    const std::string text = verdict(file);
    accepted += text.starts_with("accepted") ? 1 : 0;
    expect_golden(file, text);
  }
  EXPECT_GE(accepted, 15);
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
