// SPDX-License-Identifier: Apache-2.0
// zero/detail/step_metrics.hpp - what each step did, in files that other programs watch.
//
// `path` gets a line of JSON for every step, appended; `path`.prom the numbers of the last step in the text format of
// Prometheus, replaced as a whole, for a node exporter's text collector.
//
// Threading  One thread at a time.
// Errors     IoError from construction when the file cannot be opened, ConfigError while another engine has it. Later
//            ones never stop training: a line in the log, once.
#pragma once

#include <array>
#include <optional>
#include <string>

#include <hoist/core/clock.hpp>
#include <hoist/core/ledger.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/zero/types.hpp>

namespace hoist::detail {

class StepMetrics {
 public:
  // Waits up to `lock_timeout` for an engine that is about to end. A file system without locks cannot tell.
  StepMetrics(std::string path, Nanoseconds lock_timeout, const Ledger& ledger);
  ~StepMetrics();
  StepMetrics(const StepMetrics&) = delete;
  StepMetrics& operator=(const StepMetrics&) = delete;

  // The step that has just returned: its report, and what the ledger says since the last call.
  void write(const StepReport& report, const Ledger& ledger, std::optional<std::uint64_t> committed_step,
             std::optional<std::uint64_t> mirrored_step) noexcept;

 private:
  struct Statistics {
    std::array<Ledger::LinkTotals, kLinkCount> links{};
    std::array<Nanoseconds, kWaitCauseCount> waits{};
  };
  struct Line {
    const StepReport& report;
    double seconds = 0;
    Statistics moved;  // since the last step
    std::optional<std::uint64_t> committed_step, mirrored_step;
  };

  void lock(Nanoseconds timeout) const;
  static Statistics read(const Ledger& ledger);
  void append_json(const Line& line);
  void append(std::string line);
  void replace_prometheus(const Line& line);

  const std::string path_;
  const Descriptor file_;  // regular: a step must not wait for the reader of a pipe
  bool at_line_start_ = true;
  Statistics last_;
  TimePoint last_step_;
  bool complained_ = false;
};

}  // namespace hoist::detail
