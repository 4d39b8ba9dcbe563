// SPDX-License-Identifier: Apache-2.0
// cli/strict_json.hpp - reads the JSON files that people write for predictions: units and machines.
//
// Comments and trailing commas are accepted, as in a configuration. A key that is given twice is an error.
#pragma once

#include <string>
#include <string_view>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <hoist/core/error.hpp>

namespace hoist::cli {

// Errors: IoError with `remedy`; ConfigError if the text is not JSON, has a key twice or is nested too deep.
nlohmann::json read_strict_json(const std::string& path, const std::string& remedy);
nlohmann::json parse_strict_json(const std::string& text);

// read(), with the file's name in the errors about its content. Errors: UsageError.
template <typename Read>
auto about(const std::string& path, const Read& read) {
  try {
    return read();
  } catch (const ConfigError& error) {
    throw UsageError(fmt::format("{}: {}", path, error.what()));
  }
}

// Throws ConfigError: the value at `key` is not `allowed` ("an integer from 1 to 8").
[[noreturn]] void refuse(const std::string& key, const nlohmann::json& value, std::string_view allowed);

// The text at `key`. Errors: ConfigError if it is empty, or no text.
std::string text_of(const std::string& key, const nlohmann::json& value);

}  // namespace hoist::cli
