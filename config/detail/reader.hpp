// SPDX-License-Identifier: Apache-2.0
// config/detail/reader.hpp - checks a JSON tree against the key table; collects every problem and throws none.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <hoist/config/config.hpp>
#include <hoist/config/detail/json_text.hpp>
#include <hoist/config/setting.hpp>

namespace hoist::config::detail {

struct ReadResult {
  std::vector<ConfigSetting> settings;  // one per row that has a value, in table order
  std::vector<ConfigSetting> refused;   // values of the right kind that are not honoured; also among the problems
  std::vector<ConfigProblem> problems;  // in the order of the text, no more than kProblemsMax
  std::size_t unlisted = 0;             // problems beyond those
  std::vector<std::string> hints;       // accepted keys without effect, in the order of the text
  std::vector<std::string> automatic;   // keys given as "auto"
  std::vector<std::string> warnings;    // about old forms of a value

  const ConfigSetting* setting(std::string_view path) const;  // null if it has no value
  ConfigSetting* setting(std::string_view path) {
    return const_cast<ConfigSetting*>(std::as_const(*this).setting(path));
  }
  bool in_file(std::string_view path) const;                 // with a value of its own, not "auto"
  void refuse(std::string_view path, std::string sentence);  // a problem, at the place that the text has it
};

// The first words of the message about a key without a row.
inline constexpr std::string_view kUnknownKey = "unknown key; ";

ReadResult read_settings(const JsonNode& root, std::string_view text);

}  // namespace hoist::config::detail
