// SPDX-License-Identifier: Apache-2.0
#include <spdlog/spdlog.h>

#include <hoist/core/log.hpp>
#include <hoist/core/printable.hpp>

namespace hoist {

namespace {

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warning:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
    case LogLevel::critical:
      break;
  }
  return spdlog::level::critical;
}

}  // namespace

void log_line(LogLevel level, const std::string& text) { spdlog::log(spdlog_level(level), "{}", printable(text)); }

}  // namespace hoist
