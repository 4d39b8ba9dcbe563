// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <fstream>
#include <limits>
#include <regex>

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <hoist/config/key_table.hpp>
#include <hoist/config/reference.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tests/support/file_contents.hpp>

#include "samples.hpp"

namespace hoist::config::reference_test {
namespace {

// HOIST_UPDATE_GOLDEN=1 writes the files anew, as `hoist check --print-keys` and `--print-schema` would.
void expect_in_tree(const std::filesystem::path& file, const std::string& text) {
  const std::filesystem::path path = std::filesystem::path(HOIST_SOURCE_DIR) / file;
  if (std::getenv("HOIST_UPDATE_GOLDEN") != nullptr) std::ofstream(path, std::ios::binary) << text;
  EXPECT_TRUE(test::contents_of(path) == text)
      << file << " is out of date; write it anew with HOIST_UPDATE_GOLDEN=1, or with hoist check --print-keys and "
      << "--print-schema";
}

TEST(Reference, TheDocumentIsTheTable) { expect_in_tree("docs/config.md", reference_markdown()); }
TEST(Reference, TheSchemaIsTheTable) { expect_in_tree("docs/hoist.schema.json", schema_json()); }

// An editor must not mark what a run takes.
TEST(Reference, TheSchemaTakesWhatTheParserTakes) {
  const auto top = nlohmann::json::parse(schema_json())["properties"];
  const auto zero = top["zero_optimization"];
  EXPECT_THAT(zero["type"], testing::Contains("boolean")) << "DeepSpeed's old form";
  EXPECT_EQ(zero["additionalProperties"], false);
  EXPECT_EQ(top["tensorboard"]["additionalProperties"], true) << "hints only: a key that is not known is one, too";
  const auto device = zero["properties"]["offload_param"]["properties"]["device"]["anyOf"][0]["anyOf"];
  EXPECT_EQ(device[0]["enum"], nlohmann::json({"none", "cpu", "nvme"}));
  const std::regex pattern(device[1]["pattern"].get<std::string>());
  for (const char* text : {"cpu", "Cpu", "NVMe"}) EXPECT_TRUE(std::regex_match(text, pattern)) << text;
  EXPECT_FALSE(std::regex_match("cpus", pattern));
  const auto sizes = top["hoist"]["properties"]["pinned_memory"]["anyOf"][0]["anyOf"];
  const std::regex size(sizes[1]["pattern"].get<std::string>());
  for (const char* text : {"8GIB", "5e-1GiB", "1.5e+3 kb", "\t8 GiB ", "4096", "2T", "64 b"}) {
    EXPECT_TRUE(parse_bytes(text)) << text;
    EXPECT_TRUE(std::regex_match(text, size)) << text;
  }
  for (const char* text : {"", "GiB", "8 GiBs", "-1", "8i", "1e GiB"}) {
    EXPECT_FALSE(parse_bytes(text)) << text;
    EXPECT_FALSE(std::regex_match(text, size)) << text;
  }
  EXPECT_EQ(top["train_batch_size"]["anyOf"][0]["maximum"], std::numeric_limits<std::int64_t>::max());
}

TEST(Reference, EveryKeyIsInIt) {
  const std::string document = reference_markdown();
  for (const KeyRow& row : key_table()) {
    // A section is a heading with its path, a key a cell with its name.
    const std::string_view name = row.type == ValueType::section ? row.path : last_part(row.path);
    EXPECT_NE(document.find("`" + std::string(name) + "`"), std::string::npos) << row.path;
    for (const std::string_view alias : row.aliases) {
      EXPECT_NE(document.find("`" + std::string(alias) + "`"), std::string::npos) << alias;
    }
  }
}

}  // namespace
}  // namespace hoist::config::reference_test
