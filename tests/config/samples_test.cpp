// SPDX-License-Identifier: Apache-2.0
// Sample configurations: accepted ones parse, refused ones give exactly the message in their table, and those of public
// projects are accepted or refused as their tables say. HOIST_UPDATE_GOLDEN=1 rewrites the tables; read the difference
// before committing it.
#include "samples.hpp"

#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/config/config.hpp>

namespace hoist::samples_test {
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

// The result of parsing: the refusal, or "accepted" with every warning and note.
std::string verdict(const test::Sample& sample) {
  try {
    const Config config = Config::parse(sample.text, sample.name + ".json");
    std::string text = "accepted\n";
    for (const std::string& warning : config.warnings) text += "warning: " + warning + "\n";
    for (const std::string& note : config.notes) text += "note: " + note + "\n";
    return text;
  } catch (const ConfigError& error) {
    return std::string(error.what()) + "\n";
  }
}

void update_tables(const std::string& kind) {
  for (const auto& file : test::sample_files(kind)) {
    std::vector<test::Sample> samples = test::read_table(file);
    for (test::Sample& sample : samples) sample.verdict = verdict(sample);
    std::ofstream(file) << test::format_table(samples);
  }
}

// Compares every verdict of a kind with its table; counts the accepted samples.
int expect_verdicts(const std::string& kind) {
  if (std::getenv("HOIST_UPDATE_GOLDEN") != nullptr) update_tables(kind);
  int accepted = 0;
  for (const test::Sample& sample : test::table_samples(kind)) {
    const std::string text = verdict(sample);
    EXPECT_EQ(text, sample.verdict) << sample.name;
    accepted += text.starts_with("accepted") ? 1 : 0;
  }
  return accepted;
}

TEST(Samples, RefusedOnesSayWhy) {
  EXPECT_EQ(test::table_samples("refuse").size(), 121u);
  EXPECT_EQ(expect_verdicts("refuse"), 0);
}

// Configurations of public projects' documentation and examples, written anew with their values.
TEST(Samples, ThoseOfPublicProjectsAreTakenAsStated) {
  EXPECT_EQ(test::table_samples("wild").size(), 74u);
  EXPECT_GE(expect_verdicts("wild"), 58);
}

// The file the example trains with must always be a good one.
TEST(Samples, TheExampleIsAccepted) {
  const Config config = Config::load(std::string(HOIST_SOURCE_DIR) + "/examples/gpt/offload.json");
  EXPECT_EQ(config.engine.parameters, Placement::nvme);
  EXPECT_EQ(config.engine.optimizer, Placement::nvme);
  EXPECT_THAT(config.warnings, ::testing::IsEmpty());
}

}  // namespace
}  // namespace hoist::samples_test
