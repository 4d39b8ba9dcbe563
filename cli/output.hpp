// SPDX-License-Identifier: Apache-2.0
// cli/output.hpp - prints text and columns for people, JSON for programs.
#pragma once

#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <hoist/core/error.hpp>
#include <hoist/core/named_file.hpp>

namespace hoist::cli {

// Prints printable(text) to standard output, unbuffered. end_of_output() finds text that could not be written (a full
// disk, a closed descriptor).
void print_text(const std::string& text);
template <typename... Values>
void say(fmt::format_string<Values...> format, Values&&... values) {
  print_text(fmt::format(format, std::forward<Values>(values)...));
}

// Prints printable(text) to standard error; never fails, so that the exit code keeps its meaning.
void complain_text(const std::string& text);
template <typename... Values>
void complain(fmt::format_string<Values...> format, Values&&... values) {
  complain_text(fmt::format(format, std::forward<Values>(values)...));
}

// The exit code of a command that ended with `code`: kFailure if its output was lost, with a message on standard error
// unless the reader has closed the pipe.
int end_of_output(int code);

// True if the file system or the quota has too little room for what was asked.
bool lacks_room(const Error& error);

// True for an error that ends a command with kBadInput: an option, the configuration, a budget, a file of weights or a
// store that cannot be used, or a lack of room. False for a store that somebody changed while the command used it.
bool is_bad_input(const Error& error);

// From now on print_text() prints to standard error: standard output is for the JSON of `--json -`.
void keep_output_for_json();

// replace_file(). Errors: Error and never IoError, so that the exit code is kFailure also for lack of room.
void write_output(const std::string& path, const std::string& text);

// Writes `value` to `path` with write_output(), in ASCII: a terminal shows it safely, and a program reads the true
// text. Does nothing if the path is empty. The path "-" is standard output.
void write_json(const std::string& path, const nlohmann::ordered_json& value);

// Checks early what write_json() would refuse, for commands that work for a long time before they write, and that the
// file is none of a store's. Errors: IoError, UsageError.
void check_json(const std::string& path);

// Rows of printable() cells with their columns lined up; the last column is not padded.
std::string columns(const std::vector<std::vector<std::string>>& rows, std::size_t indent = 2);

// The 95 % interval of the median of measured ratios.
nlohmann::ordered_json interval_json(const std::vector<double>& ratios);

// "a, b, c": what `text` gives for each item.
template <typename Items, typename Text>
std::string listed(const Items& items, Text text) {
  std::string all;
  for (const auto& item : items) all += (all.empty() ? "" : ", ") + std::string(std::invoke(text, item));
  return all;
}

// `text` in single quotes, as one word of a shell's command.
std::string shell_quoted(const std::string& text);

template <typename Value>
nlohmann::ordered_json or_null(const std::optional<Value>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace hoist::cli
