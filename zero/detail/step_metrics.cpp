// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <memory>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/zero/detail/step_metrics.hpp>

namespace hoist::detail {

namespace {

// JSON has no infinity and no NaN; a norm may be either when a step is skipped.
std::string number(double value) { return std::isfinite(value) ? fmt::format("{}", value) : "null"; }

template <typename Visit>
void for_each_link(const Visit& visit) {
  for (std::size_t i = 0; i < kLinkCount; ++i) visit(link_name(static_cast<Link>(i)), i);
}

template <typename Visit>
void for_each_cause(const Visit& visit) {
  for (std::size_t i = 0; i < kWaitCauseCount; ++i) {
    if (static_cast<WaitCause>(i) != WaitCause::none) visit(wait_cause_name(static_cast<WaitCause>(i)), i);
  }
}

}  // namespace

StepMetrics::StepMetrics(std::string path, Nanoseconds lock_timeout, const Ledger& ledger)
    : path_(std::move(path)),
      file_(open_regular_file(path_, O_RDWR | O_CREAT | O_APPEND, 0666)),
      last_(read(ledger)),
      last_step_(Clock::now()) {
  const int code = errno;
  if (file_.number < 0 && code == EINVAL)  // of open_regular_file() itself
    throw ConfigError("hoist.metrics", fmt::format("{}: {}; name another file", path_, open_file_remedy(code)));
  if (file_.number < 0) throw IoError({"open", path_, 0, 0, code}, "choose another place for hoist.metrics");
  lock(lock_timeout);
  char last = '\n';  // of an earlier run
  if (const off_t bytes = ::lseek(file_.number, 0, SEEK_END); bytes > 0)
    static_cast<void>(::pread(file_.number, &last, 1, bytes - 1));
  at_line_start_ = last == '\n';
}

// Forked processes share the lock, and closing the file would leave it to them.
StepMetrics::~StepMetrics() { ::flock(file_.number, LOCK_UN); }

void StepMetrics::lock(Nanoseconds timeout) const {
  const TimePoint start = Clock::now();
  while (::flock(file_.number, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    if (Clock::now() - start >= timeout)
      throw ConfigError("hoist.metrics", fmt::format("another engine, or a process that was forked from one that was "
                                                     "killed, has {} open; end it, or name another file",
                                                     path_));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

StepMetrics::Statistics StepMetrics::read(const Ledger& ledger) {
  Statistics totals;
  for (std::size_t i = 0; i < kLinkCount; ++i) totals.links[i] = ledger.totals(static_cast<Link>(i));
  for (std::size_t i = 0; i < kWaitCauseCount; ++i) totals.waits[i] = ledger.waited(static_cast<WaitCause>(i));
  return totals;
}

void StepMetrics::write(const StepReport& report, const Ledger& ledger, std::optional<std::uint64_t> committed_step,
                        std::optional<std::uint64_t> mirrored_step) noexcept {
  try {
    const Statistics now = read(ledger);
    const TimePoint ended = Clock::now();
    Line line{.report = report,
              .seconds = to_seconds(ended - last_step_),
              .moved = now,
              .committed_step = committed_step,
              .mirrored_step = mirrored_step};
    for (std::size_t i = 0; i < kLinkCount; ++i) {
      line.moved.links[i].bytes -= last_.links[i].bytes;
      line.moved.links[i].busy -= last_.links[i].busy;
    }
    for (std::size_t i = 0; i < kWaitCauseCount; ++i) line.moved.waits[i] -= last_.waits[i];
    last_ = now;
    last_step_ = ended;
    append_json(line);
    replace_prometheus(line);
  } catch (const std::exception& error) {
    if (!std::exchange(complained_, true)) log_warning("metrics are incomplete from here on: {}", error.what());
  }
}

void StepMetrics::append_json(const Line& line) {
  const StepReport& r = line.report;
  std::string text = fmt::format(
      R"({{"step":{},"applied":{},"seconds":{:.6f},"gradient_norm":{},"clip_factor":{},"learning_rate":{},"loss_scale":{})",
      r.step, r.applied, line.seconds, number(r.gradient_norm), number(r.clip_factor), number(r.learning_rate),
      number(r.loss_scale));
  text += R"(,"links":{)";
  const char* comma = "";
  for_each_link([&](const char* name, std::size_t i) {
    text += fmt::format(R"({}"{}":{{"bytes":{},"busy_seconds":{:.6f}}})", std::exchange(comma, ","), name,
                        line.moved.links[i].bytes, to_seconds(line.moved.links[i].busy));
  });
  text += R"(},"wait_seconds":{)";
  comma = "";
  for_each_cause([&](const char* name, std::size_t i) {
    text += fmt::format(R"({}"{}":{:.6f})", std::exchange(comma, ","), name, to_seconds(line.moved.waits[i]));
  });
  const auto step = [](const std::optional<std::uint64_t>& of) { return of ? fmt::to_string(*of) : "null"; };
  text += fmt::format(R"(}},"committed_step":{},"mirrored_step":{}}})"
                      "\n",
                      step(line.committed_step), step(line.mirrored_step));
  append(std::move(text));
}

// Writes a line by one call, so that a program that follows the file sees whole lines. A full disk or a crash may cut a
// line off; the next one then begins with a newline.
void StepMetrics::append(std::string line) {
  if (!at_line_start_) line.insert(0, "\n");
  ssize_t written = 0;
  do {
    written = ::write(file_.number, line.data(), line.size());
  } while (written < 0 && errno == EINTR);
  const int code = written < 0 ? errno : ENOSPC;
  if (written > 0) at_line_start_ = line[static_cast<std::size_t>(written) - 1] == '\n';
  if (written != static_cast<ssize_t>(line.size())) throw IoError({"write", path_, 0, line.size(), code});
}

void StepMetrics::replace_prometheus(const Line& line) {
  std::string text;
  const auto gauge = [&](const char* name, const char* help, double value) {
    text += fmt::format("# HELP hoist_{0} {1}\n# TYPE hoist_{0} gauge\nhoist_{0} {2}\n", name, help, value);
  };
  const auto head = [&](const char* name, const char* help) {
    text += fmt::format("# HELP hoist_{0} {1}\n# TYPE hoist_{0} gauge\n", name, help);
  };
  gauge("step", "Steps applied.", static_cast<double>(line.report.step));
  const auto step = [](const std::optional<std::uint64_t>& of) { return of ? static_cast<double>(*of) : -1.0; };
  gauge("committed_step", "The newest durable step, -1 for none.", step(line.committed_step));
  gauge("mirrored_step", "The newest step that is whole in the mirror, -1 for none.", step(line.mirrored_step));
  gauge("step_seconds", "Wall time of the last step.", line.seconds);
  gauge("gradient_norm", "Global norm of the last step's gradient, before clipping.", line.report.gradient_norm);
  gauge("learning_rate", "Learning rate of the first parameter group that trains.", line.report.learning_rate);
  gauge("loss_scale", "What the last step's losses were multiplied by.", line.report.loss_scale);
  gauge("step_applied", "1, or 0 where a gradient was not finite and the last step was skipped.",
        line.report.applied ? 1 : 0);
  head("link_bytes", "Bytes the last step moved, by link.");
  for_each_link([&](const char* name, std::size_t i) {
    text += fmt::format("hoist_link_bytes{{link=\"{}\"}} {}\n", name, line.moved.links[i].bytes);
  });
  head("wait_seconds", "What the last step waited for.");
  for_each_cause([&](const char* name, std::size_t i) {
    text += fmt::format("hoist_wait_seconds{{cause=\"{}\"}} {}\n", name, to_seconds(line.moved.waits[i]));
  });
  const std::string target = path_ + ".prom", partial = target + ".partial";
  const std::unique_ptr<std::FILE, CloseFile> file(open_output_file(partial, OutputMode::replace));
  if (!file) throw IoError({"open", partial, 0, 0, errno});
  if (std::fwrite(text.data(), 1, text.size(), file.get()) != text.size() || std::fflush(file.get()) != 0)
    throw IoError({"write", partial, 0, text.size(), errno});
  if (std::rename(partial.c_str(), target.c_str()) != 0) throw IoError({"rename", partial, 0, 0, errno});
}

}  // namespace hoist::detail
