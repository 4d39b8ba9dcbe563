// SPDX-License-Identifier: Apache-2.0
// config/detail/reader.hpp - a JSON tree checked against the key table, every problem noted and none thrown.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <hoist/config/config.hpp>
#include <hoist/config/detail/json_text.hpp>

namespace hoist::config::detail {

struct ReadResult {
  std::vector<ConfigSetting> settings;  // one per row that has a value, in table order
  std::vector<ConfigProblem> problems;  // in the order of the text
  std::vector<std::string> hints;       // accepted keys without effect, in the order of the text
  std::vector<std::string> automatic;   // keys given as "auto"
};

ReadResult read_settings(const JsonNode& root, std::string_view text);

// The value of a table default. Pre: the row has one.
Value default_of(const KeyRow& row);

}  // namespace hoist::config::detail
