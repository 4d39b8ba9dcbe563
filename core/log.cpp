// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <hoist/core/log.hpp>
#include <hoist/core/printable.hpp>

namespace hoist {

namespace {

spdlog::level::level_enum spdlog_level(LogLevel level) {
  static_assert(SPDLOG_LEVEL_CRITICAL - SPDLOG_LEVEL_INFO == static_cast<int>(LogLevel::critical));
  return static_cast<spdlog::level::level_enum>(SPDLOG_LEVEL_INFO + static_cast<int>(level));
}

// Whether this is the logger that spdlog begins with, which writes to stdout.
bool is_untouched(const spdlog::logger& logger) {
  return logger.name().empty() && logger.sinks().size() == 1 &&
         dynamic_cast<const spdlog::sinks::stdout_color_sink_mt*>(logger.sinks().front().get()) != nullptr;
}

}  // namespace

void log_line(LogLevel level, const std::string& text) {
  static const auto on_stderr =
      std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  const std::shared_ptr<spdlog::logger> chosen = spdlog::default_logger();
  if (!chosen || !chosen->should_log(spdlog_level(level))) return;
  (is_untouched(*chosen) ? on_stderr : chosen)->log(spdlog_level(level), "{}", printable(text));
}

}  // namespace hoist
