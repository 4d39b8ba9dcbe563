// SPDX-License-Identifier: Apache-2.0
// core/log.hpp - hoist's lines in the log. They go to spdlog's default logger, if the program has set one, and
// otherwise to stderr: stdout is for a program's results.
//
// All lines pass through printable(): names and paths in them come from files. No other module includes spdlog.
//
// Threading  Any thread.
#pragma once

#include <string>
#include <utility>

#include <fmt/format.h>

namespace hoist {

enum class LogLevel { info, warning, error, critical };

void log_line(LogLevel level, const std::string& text);

template <typename... Values>
void log_info(fmt::format_string<Values...> format, Values&&... values) {
  log_line(LogLevel::info, fmt::format(format, std::forward<Values>(values)...));
}
template <typename... Values>
void log_warning(fmt::format_string<Values...> format, Values&&... values) {
  log_line(LogLevel::warning, fmt::format(format, std::forward<Values>(values)...));
}
template <typename... Values>
void log_error(fmt::format_string<Values...> format, Values&&... values) {
  log_line(LogLevel::error, fmt::format(format, std::forward<Values>(values)...));
}
template <typename... Values>
void log_critical(fmt::format_string<Values...> format, Values&&... values) {
  log_line(LogLevel::critical, fmt::format(format, std::forward<Values>(values)...));
}

}  // namespace hoist
