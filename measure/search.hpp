// SPDX-License-Identifier: Apache-2.0
// measure/search.hpp - finds a block size and a queue depth that are good for reading, writing and both, in seconds.
//
// Successive halving: every setting is measured briefly, the better ones again and longer, in passes over all remaining
// settings and all patterns in a shuffled order. A drive's speed drifts, so a measurement counts only as a ratio to the
// median of its own pass; the median over the passes ranks a setting. A setting is as good as its worst pattern, since
// a configuration has one block size and one depth for all.
//
// Threading  Blocks its caller. The caller provides the measuring function, so the search is tested without a drive.
// Errors     Those of the measuring function.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <hoist/core/clock.hpp>
#include <hoist/measure/workload.hpp>

namespace hoist::measure {

struct Setting {
  std::uint64_t block_bytes = 0;
  unsigned queue_depth = 0;
  std::uint64_t footprint_bytes() const { return block_bytes * queue_depth; }
  bool operator==(const Setting&) const = default;
};

constexpr std::array kPatterns{Pattern::read, Pattern::write, Pattern::mixed};

// 256 KiB to 4 MiB by 4 to 64 deep, with at most 64 MiB in flight: more was never faster, and the optimizer's buffers
// are as large.
std::vector<Setting> standard_settings();

struct SearchRound {
  std::size_t keep = 0;  // of the settings before it; 0: all
  unsigned passes = 1;
  Nanoseconds leg{0};  // of one measurement
};
// Together about 16 s with the standard settings, on a drive of a few GB/s; `scale` times that.
std::vector<SearchRound> quick_rounds(double scale = 1);
// Every setting, five passes.
std::vector<SearchRound> full_round();
// A few settings that must be told apart: 21 passes.
std::vector<SearchRound> runoff_round();

struct SearchOptions {
  std::vector<Setting> settings = standard_settings();
  std::vector<SearchRound> rounds = quick_rounds();
  std::uint64_t seed = 1;  // of the order
  // Bytes per second.
  std::function<double(const Setting&, Pattern, Nanoseconds leg)> measure{};
  // True: finish with the present results. Asked before each measurement after the first pass over all settings.
  std::function<bool()> out_of_time{};
  std::function<void(std::size_t done, std::size_t total)> progress{};
};

struct SettingResult {
  Setting setting;
  unsigned passes = 0;                                      // complete ones
  std::array<double, kPatterns.size()> bytes_per_second{};  // medians; 0: never measured
  // Relative to the best of the settings that it was last compared with; 1 is the best.
  std::array<double, kPatterns.size()> standing{};
  double mean_standing() const;
  double worst_standing() const;
};

struct SearchResult {
  std::vector<SettingResult> settings;  // in the order given
  std::size_t best = 0;                 // index
  bool complete = true;                 // false: time ran out
};

SearchResult search_settings(const SearchOptions& options);

}  // namespace hoist::measure
