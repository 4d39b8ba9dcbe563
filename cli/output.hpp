// SPDX-License-Identifier: Apache-2.0
// cli/output.hpp - columns for people, JSON for programs.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace hoist::cli {

// Writes `value` to `path`, replacing it; nothing when the path is empty. Errors: IoError.
void write_json(const std::string& path, const nlohmann::ordered_json& value);

// Rows with their columns lined up; the last column is not padded.
std::string columns(const std::vector<std::vector<std::string>>& rows, std::size_t indent = 2);

}  // namespace hoist::cli
