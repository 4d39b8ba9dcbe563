// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <hoist/core/units.hpp>

#include "interrupt.hpp"

namespace hoist::cli {

namespace {

constexpr std::size_t kBarWidth = 24;
constexpr std::size_t kTerminalWidth = 80;  // if the terminal does not report it
constexpr double kRateAfterSeconds = 0.5;   // earlier, the rate and the time left would only jump

ProgressStyle resolve(const ProgressOptions& options) {
  if (options.style != ProgressStyle::automatic) return options.style;
  return ::isatty(::fileno(options.out)) != 0 ? ProgressStyle::bar : ProgressStyle::lines;
}

std::size_t terminal_width(std::FILE* out) {
  winsize window{};
  if (::ioctl(::fileno(out), TIOCGWINSZ, &window) != 0 || window.ws_col == 0) return kTerminalWidth;
  return window.ws_col;
}

std::string duration(double seconds) {
  const auto whole = static_cast<std::uint64_t>(std::max(0.0, seconds) + 0.5);
  if (whole >= 3600) return fmt::format("{} h {:02} min", whole / 3600, whole % 3600 / 60);
  return whole >= 60 ? fmt::format("{} min {:02} s", whole / 60, whole % 60) : fmt::format("{} s", whole);
}

std::string amount(ProgressOptions::Unit unit, std::uint64_t value) {
  switch (unit) {
    case ProgressOptions::Unit::bytes:
      return format_bytes(value);
    case ProgressOptions::Unit::count:
      return fmt::format("{}", value);
    case ProgressOptions::Unit::milliseconds:
      return fmt::format("{:.1f} s", static_cast<double>(value) / 1e3);
  }
  return {};
}

}  // namespace

Progress::Progress(ProgressOptions options) : options_(std::move(options)), begun_(Clock::now()), shown_(begun_) {
  options_.style = resolve(options_);
}

Progress::~Progress() { clear(); }

std::string Progress::line(std::uint64_t done, TimePoint now) const {
  const double seconds = to_seconds(now - begun_);
  std::string text = options_.what + " " + amount(options_.unit, done);
  if (options_.total > 0) text += " of " + amount(options_.unit, options_.total);
  if (seconds < kRateAfterSeconds || done == 0) return text;
  const double rate = static_cast<double>(done) / seconds;
  if (options_.unit == ProgressOptions::Unit::bytes) text += fmt::format(", {:.2f} GB/s", rate / 1e9);
  if (options_.total > done)
    text += fmt::format(", {} left", duration(static_cast<double>(options_.total - done) / rate));
  return text;
}

std::string Progress::bar(std::uint64_t done) const {
  if (options_.total == 0) return {};
  const double share = std::min(1.0, static_cast<double>(done) / static_cast<double>(options_.total));
  const auto filled = static_cast<std::size_t>(share * static_cast<double>(kBarWidth));
  return fmt::format("[{:#<{}}{:.<{}}] {:3.0f} % ", "", filled, "", kBarWidth - filled, 100 * share);
}

// Work continues even if its progress cannot be printed.
void Progress::print(const std::string& text) const {
  std::fputs(text.c_str(), options_.out);
  std::fflush(options_.out);
}

void Progress::update(std::uint64_t done, TimePoint now) {
  if (options_.style == ProgressStyle::quiet) return;
  const bool rewrite = options_.style == ProgressStyle::bar;
  if (now - shown_ < (rewrite ? options_.bar_interval : options_.line_interval)) return;
  shown_ = now;
  if (rewrite) {
    // A line that wraps could not be rewritten.
    const std::string text = (bar(done) + line(done, now)).substr(0, terminal_width(options_.out) - 1);
    print(fmt::format("\r{:<{}}", text, width_));
    width_ = text.size();
  } else {
    print(line(done, now) + "\n");
  }
}

void Progress::clear() {
  if (width_ == 0) return;
  print(fmt::format("\r{:{}}\r", "", width_));
  width_ = 0;
}

std::function<void(std::uint64_t, std::uint64_t)> reported_as(std::string what) {
  struct Report {
    InterruptGuard interrupt;
    std::optional<Progress> progress;
  };
  return [what = std::move(what), report = std::make_shared<Report>()](std::uint64_t done, std::uint64_t total) {
    measure::throw_if_stopped(report->interrupt.flag());
    if (!report->progress) report->progress.emplace(ProgressOptions{.what = what, .total = total});
    report->progress->update(done);
    if (done == total) report->progress.reset();
  };
}

}  // namespace hoist::cli
