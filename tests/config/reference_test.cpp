// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <hoist/config/key_table.hpp>
#include <hoist/config/reference.hpp>

#include "samples.hpp"

namespace hoist::config {
namespace {

TEST(Reference, TheDocumentIsTheTable) {
  const std::string document = test::read_text(std::filesystem::path(HOIST_SOURCE_DIR) / "docs" / "config.md");
  EXPECT_TRUE(document == reference_markdown())
      << "docs/config.md is out of date; write it anew: hoist check --print-keys > docs/config.md";
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
}  // namespace hoist::config
