// SPDX-License-Identifier: Apache-2.0
// core/log.hpp - hoist's lines in the log. They go to spdlog's default logger, if the program has set one, and
// otherwise to stderr: stdout is for a program's results.
//
// All lines pass through printable(): names and paths in them come from files. A line for which memory is lacking is
// left out. No other module includes spdlog.
//
// Threading  Any thread.
#pragma once

#include <fmt/format.h>

namespace hoist {

enum class LogLevel { info, warning, error, critical };

void log_formatted(LogLevel level, fmt::string_view format, fmt::format_args values) noexcept;

template <typename... Values>
void log_info(fmt::format_string<Values...> format, Values&&... values) noexcept {
  log_formatted(LogLevel::info, format, fmt::make_format_args(values...));
}
template <typename... Values>
void log_warning(fmt::format_string<Values...> format, Values&&... values) noexcept {
  log_formatted(LogLevel::warning, format, fmt::make_format_args(values...));
}
template <typename... Values>
void log_error(fmt::format_string<Values...> format, Values&&... values) noexcept {
  log_formatted(LogLevel::error, format, fmt::make_format_args(values...));
}
template <typename... Values>
void log_critical(fmt::format_string<Values...> format, Values&&... values) noexcept {
  log_formatted(LogLevel::critical, format, fmt::make_format_args(values...));
}

}  // namespace hoist
