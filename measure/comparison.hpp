// SPDX-License-Identifier: Apache-2.0
// measure/comparison.hpp - compares two programs on a drive whose speed drifts.
//
// A drive's speed changes from second to second, so nothing follows from one long run of each. Short legs alternate
// (A B, B A, A B ...), each pair on the same part of the same files, and the result is the ratio of each pair: the
// median, and the interval that holds the true median with 95 % confidence (of fewer than six pairs, their range).
// After every second pair A runs against itself: that control shows what a ratio of equals looks like on this drive. "A
// is at least as fast as B" is contradicted only when the whole interval lies below what the control explains. Before
// each of its legs A rests as long as B needs to start, because some drives reward a rest.
//
// Threading  Blocks its caller; progress is called there.
// Errors     Those of the contenders; Interrupted.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <hoist/measure/contender.hpp>
#include <hoist/measure/statistics.hpp>

namespace hoist::measure {

struct ComparisonOptions {
  Pattern pattern = Pattern::read;
  unsigned pairs = 40;
  Nanoseconds leg = std::chrono::milliseconds(500);  // about this long, as far as the files are large enough
  const StopFlag* stop = nullptr;
  std::function<void(unsigned pairs_done)> progress{};
};

struct ComparisonResult {
  std::string tool;                    // the contender
  std::string description;             // its settings
  std::uint64_t leg_bytes = 0;         // of each drive
  std::vector<double> ratios;          // of speeds, ours / theirs, one for each pair
  std::vector<double> control_ratios;  // ours / ours
  std::vector<double> our_processor_seconds_per_gb;
  std::vector<double> their_processor_seconds_per_gb;
  std::vector<double> our_bytes_per_second;
  std::vector<double> their_bytes_per_second;
};

// `ours` and `theirs` work on `drives`, whose files must be full.
ComparisonResult compare(Contender& ours, Contender& theirs, std::span<Drive* const> drives,
                         const ComparisonOptions& options);

}  // namespace hoist::measure
