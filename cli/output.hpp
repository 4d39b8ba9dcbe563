// SPDX-License-Identifier: Apache-2.0
// cli/output.hpp - text and columns for people, JSON for programs.
#pragma once

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace hoist::cli {

// To standard output, at once. What does not arrive (a full disk, a closed descriptor) is found by end_of_output().
void print_text(const std::string& text);
template <typename... Values>
void say(fmt::format_string<Values...> format, Values&&... values) {
  print_text(fmt::format(format, std::forward<Values>(values)...));
}

// To standard error; never fails, so that the exit code stays what it is about.
template <typename... Values>
void complain(fmt::format_string<Values...> format, Values&&... values) {
  const std::string text = fmt::format(format, std::forward<Values>(values)...);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

// The exit code of a command that ended with `code`: kFailure, said on standard error, when its output was lost.
int end_of_output(int code);

// Writes `value` to `path`, replacing it; nothing when the path is empty. Errors: IoError.
void write_json(const std::string& path, const nlohmann::ordered_json& value);

// What write_json() would refuse at once, for commands that work for long before they write. Errors: IoError.
void check_json(const std::string& path);

// Errors: UsageError when the file that is to be written is the one that is read.
void check_json_apart(const std::string& json, const std::string& input);

// Rows with their columns lined up; the last column is not padded.
std::string columns(const std::vector<std::vector<std::string>>& rows, std::size_t indent = 2);

}  // namespace hoist::cli
