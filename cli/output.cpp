// SPDX-License-Identifier: Apache-2.0
#include "output.hpp"

#include <algorithm>
#include <cerrno>

#include <hoist/core/error.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/interchange/safetensors.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/tiers/store_changed_error.hpp>

#include "commands.hpp"

namespace hoist::cli {

namespace {

int lost_output_code = 0;  // errno of the first text that could not be written
bool output_is_json = false;
constexpr const char* kOutputItself = "-";  // as the path of --json

void print(const std::string& text) {
  errno = 0;
  const bool arrived = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (!arrived && lost_output_code == 0) lost_output_code = errno == 0 ? EIO : errno;
}

template <typename... Kinds>
bool is_any(const Error& error) {
  return (... || (dynamic_cast<const Kinds*>(&error) != nullptr));
}

}  // namespace

void print_text(const std::string& text) {
  if (output_is_json) return complain_text(text);
  print(printable(text));
}

void keep_output_for_json() { output_is_json = true; }

void complain_text(const std::string& any_text) {
  const std::string text = printable(any_text);
  std::fwrite(text.data(), 1, text.size(), stderr);
}

int end_of_output(int code) {
  print("");  // text that other code printed, CLI11's help for example
  if (lost_output_code == 0 && std::ferror(stdout) == 0) return code;
  if (lost_output_code == EPIPE)
    return code == kOk ? kFailure : code;  // no message: a reader such as `head` has seen enough
  complain("hoist: standard output could not be written: {}; the printed text is incomplete\n",
           errno_text(lost_output_code == 0 ? EIO : lost_output_code));
  return code == kOk ? kFailure : code;
}

bool lacks_room(const Error& error) {
  const auto* io = dynamic_cast<const IoError*>(&error);
  return io != nullptr && (io->where.code == ENOSPC || io->where.code == EDQUOT);
}

bool is_bad_input(const Error& error) {
  if (is_any<tiers::StoreChangedError>(error)) return false;
  return lacks_room(error) ||
         is_any<UsageError, ConfigError, BudgetError, StoreError, interchange::SafetensorsError>(error);
}

void write_output(const std::string& path, const std::string& text) {
  try {
    replace_file(path, text);
  } catch (const IoError& error) {
    throw Error(error.what());
  }
}

void check_json(const std::string& path) {
  if (path.empty() || path == kOutputItself) return;
  check_outputs_apart({{"--json", path}}, {});
  check_replaceable(path, "choose another --json file");
}

void write_json(const std::string& path, const nlohmann::ordered_json& value) {
  if (path.empty()) return;
  // Bytes of a path or of the configuration need not be UTF-8.
  const std::string text = value.dump(2, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  if (path == kOutputItself) return print(text);
  write_output(path, text);
}

std::string shell_quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string columns(const std::vector<std::vector<std::string>>& given_rows, std::size_t indent) {
  auto rows = given_rows;
  for (auto& row : rows)
    for (std::string& cell : row) cell = printable(cell);
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  std::string text;
  for (const auto& row : rows) {
    text.append(indent, ' ');
    for (std::size_t c = 0; c < row.size(); ++c) {
      text += row[c];
      if (c + 1 < row.size()) text.append(widths[c] - row[c].size() + 2, ' ');
    }
    while (text.ends_with(' ')) text.pop_back();
    text += '\n';
  }
  return text;
}

nlohmann::ordered_json interval_json(const std::vector<double>& ratios) {
  const auto [low, high] = measure::median_interval(ratios);
  return nlohmann::ordered_json::array({low, high});
}

}  // namespace hoist::cli
