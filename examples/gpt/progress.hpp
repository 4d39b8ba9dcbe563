// SPDX-License-Identifier: Apache-2.0
// examples/gpt/progress.hpp - one line that says how far the run is: rewritten in place on a terminal, else printed
// every few seconds. Launchers such as mpirun give ranks a terminal although its text ends in a file.
#pragma once

#include <cstdint>
#include <cstdio>
#include <deque>
#include <string>

#include <hoist/core/clock.hpp>

#include "report.hpp"

namespace hoist::gpt {

struct ProgressOptions {
  std::uint64_t first_step = 0;  // steps done before this process
  std::uint64_t last_step = 0;
  std::uint64_t tokens_per_step = 0;
  bool rewrite = false;  // a terminal
  std::FILE* out = stdout;
};

class Progress {
 public:
  explicit Progress(const ProgressOptions& options) : options_(options) {}
  // After each step.
  void show(const StepRecord& step, const Tiers& tiers, TimePoint now);
  void finish();

  // The line itself.
  std::string line(const StepRecord& step, const Tiers& tiers) const;

 private:
  double recent_seconds() const;
  const ProgressOptions options_;
  std::deque<double> recent_;  // seconds of the last steps
  TimePoint shown_{};
  std::size_t width_ = 0;  // of the line on the terminal
};

}  // namespace hoist::gpt
