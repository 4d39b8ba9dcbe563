// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>

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

std::atomic<bool> spdlog_is_gone{false};
std::atomic<int> last_level{spdlog::level::off};  // of the default logger, when spdlog_is_gone

// Destructors of the program's globals may log. So this is its first global, and begins spdlog, which therefore ends
// after the others. The globals of shared libraries that were loaded before end later still.
struct Spdlog {
  Spdlog() { spdlog::default_logger(); }
  ~Spdlog() {
    if (const auto last = spdlog::default_logger()) last_level = last->level();
    spdlog_is_gone = true;
  }
};
[[gnu::init_priority(101)]] const Spdlog kSpdlog;

void log_line_without_spdlog(spdlog::level::level_enum level, const std::string& text) {
  if (level < last_level) return;
  const auto name = spdlog::level::to_string_view(level);
  std::fputs(fmt::format("[{}] {}\n", std::string_view(name.data(), name.size()), text).c_str(), stderr);
}

void log_line(LogLevel level, const std::string& text) {
  if (spdlog_is_gone) return log_line_without_spdlog(spdlog_level(level), printable(text));
  const std::shared_ptr<spdlog::logger> chosen = spdlog::default_logger();
  static const auto* const on_stderr = new std::shared_ptr<spdlog::logger>(
      std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::stderr_color_sink_mt>()));
  if (!chosen || !chosen->should_log(spdlog_level(level))) return;
  (is_untouched(*chosen) ? *on_stderr : chosen)->log(spdlog_level(level), "{}", printable(text));
}

}  // namespace

void log_formatted(LogLevel level, fmt::string_view format, fmt::format_args values) noexcept {
  try {
    log_line(level, fmt::vformat(format, values));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "a line of the log is left out: %s\n", error.what());
  } catch (...) {  // of a sink of the program's
    std::fputs("a line of the log is left out\n", stderr);
  }
}

}  // namespace hoist
