// SPDX-License-Identifier: Apache-2.0
// cli/progress.hpp - the progress of a long command: a bar on a terminal, elsewhere a plain line every few seconds.
//
// Prints to stderr, so that stdout has only the results.
//
// Threading  One thread at a time.
// Errors     None: the work does not stop because a stream cannot be written.
// Main path  update -> (at most ten times a second) line -> the terminal.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

#include <hoist/core/clock.hpp>

namespace hoist::cli {

enum class ProgressStyle : std::uint8_t {
  automatic,  // a bar if `out` is a terminal, otherwise lines
  bar,        // one line, rewritten in place
  lines,      // a line every few seconds; none if the work is shorter than that
  quiet,      // nothing
};

struct ProgressOptions {
  std::string what;  // "verifying", "exporting layer 3"
  enum class Unit : std::uint8_t { bytes, count, milliseconds } unit = Unit::bytes;
  std::uint64_t total = 0;  // 0: not known; then there is no bar and no time left
  ProgressStyle style = ProgressStyle::automatic;
  Nanoseconds bar_interval = std::chrono::milliseconds(100);
  Nanoseconds line_interval = std::chrono::seconds(5);
  std::FILE* out = stderr;
};

class Progress {
 public:
  explicit Progress(ProgressOptions options);
  // Removes the bar from the terminal.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // `done` of `total` is finished. Cheap enough for every block: most calls look at the clock and return.
  void update(std::uint64_t done) { update(done, Clock::now()); }
  void update(std::uint64_t done, TimePoint now);  // for tests, which control the time
  // Removes the bar; the next update draws it again.
  void clear();

  // The words after the bar: "verifying 1.5 GiB of 4.0 GiB, 1.20 GB/s, 3 s left".
  std::string line(std::uint64_t done, TimePoint now) const;

 private:
  std::string bar(std::uint64_t done) const;
  void print(const std::string& text) const;

  ProgressOptions options_;
  const TimePoint begun_;
  TimePoint shown_;
  std::size_t width_ = 0;  // of the text that is on the terminal now
};

// For options of long work: reports it as `what`, a bar from the first report to the last byte.
// Errors: measure::Interrupted from the report after a signal such as Ctrl-C.
std::function<void(std::uint64_t done_bytes, std::uint64_t total_bytes)> reported_as(std::string what);

}  // namespace hoist::cli
