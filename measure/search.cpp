// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <utility>

#include <hoist/core/rng.hpp>
#include <hoist/measure/search.hpp>
#include <hoist/measure/statistics.hpp>

namespace hoist::measure {

namespace {

constexpr std::size_t kPatternCount = kPatterns.size();
// Standings closer than this are chance; then the setting that needs less memory is the better one.
constexpr double kEqual = 0.03;
constexpr Nanoseconds kLegMin = std::chrono::milliseconds(5);  // less is the time of one queue

class Search {
 public:
  explicit Search(const SearchOptions& options)
      : options_(options), order_(options.seed), remaining_(options.settings.size()) {
    std::iota(remaining_.begin(), remaining_.end(), std::size_t{0});
    for (const Setting& setting : options.settings) result_.settings.push_back({.setting = setting});
    std::size_t count = remaining_.size();
    for (const SearchRound& round : options.rounds) {
      if (round.keep > 0) count = std::min(count, round.keep);
      total_ += count * round.passes * kPatternCount;
    }
  }

  SearchResult run() {
    for (const SearchRound& round : options_.rounds) {
      if (round.keep > 0) keep_best(round.keep);
      for (unsigned pass = 0; pass < round.passes && result_.complete; ++pass) result_.complete = run_pass(round.leg);
    }
    compare();
    result_.best = choose();
    return std::move(result_);
  }

 private:
  // One pass: speeds by setting and pattern; 0 if a setting did not take part.
  using Pass = std::vector<std::array<double, kPatternCount>>;

  // False if time ran out; the pass then does not count. The first one is always completed.
  bool run_pass(Nanoseconds leg) {
    std::vector<std::pair<std::size_t, std::size_t>> visits;
    for (const std::size_t setting : remaining_) {
      for (std::size_t pattern = 0; pattern < kPatternCount; ++pattern) visits.emplace_back(setting, pattern);
    }
    for (std::size_t i = visits.size(); i > 1; --i) std::swap(visits[i - 1], visits[order_.below(i)]);
    Pass pass(options_.settings.size());
    for (const auto& [setting, pattern] : visits) {
      if (!passes_.empty() && options_.out_of_time && options_.out_of_time()) return false;
      pass[setting][pattern] = options_.measure(options_.settings[setting], kPatterns[pattern], leg);
      if (options_.progress) options_.progress(++done_, total_);
    }
    passes_.push_back(std::move(pass));
    for (const std::size_t setting : remaining_) ++result_.settings[setting].passes;
    return true;
  }

  // Settings only drop out, so every pass of any remaining setting includes all remaining settings.
  void compare() {
    for (std::size_t pattern = 0; pattern < kPatternCount; ++pattern) {
      std::vector<std::vector<double>> relative(options_.settings.size());
      for (const Pass& pass : passes_) {
        std::vector<double> speeds;
        for (const std::size_t setting : remaining_) speeds.push_back(pass[setting][pattern]);
        const double middle = median(speeds);
        for (const std::size_t setting : remaining_) relative[setting].push_back(pass[setting][pattern] / middle);
      }
      double best = 0;
      for (const std::size_t setting : remaining_) best = std::max(best, median(relative[setting]));
      for (const std::size_t setting : remaining_)
        result_.settings[setting].standing[pattern] = median(relative[setting]) / best;
    }
    for (const std::size_t setting : remaining_) take_speeds(setting);
  }

  void take_speeds(std::size_t setting) {
    for (std::size_t pattern = 0; pattern < kPatternCount; ++pattern) {
      std::vector<double> speeds;
      for (const Pass& pass : passes_) {
        if (pass[setting][pattern] > 0) speeds.push_back(pass[setting][pattern]);
      }
      result_.settings[setting].bytes_per_second[pattern] = median(std::move(speeds));
    }
  }

  // Sorts by the mean of the patterns: after few passes the worst of three depends more on chance than on the setting.
  void keep_best(std::size_t count) {
    if (passes_.empty() || remaining_.size() <= count) return;
    compare();
    std::sort(remaining_.begin(), remaining_.end(), [&](std::size_t a, std::size_t b) {
      return result_.settings[a].mean_standing() > result_.settings[b].mean_standing();
    });
    remaining_.resize(count);
  }

  std::size_t choose() const {
    double best = 0;
    for (const std::size_t setting : remaining_) best = std::max(best, result_.settings[setting].worst_standing());
    std::size_t chosen = remaining_.front();
    bool found = false;
    for (const std::size_t setting : remaining_) {
      const SettingResult& candidate = result_.settings[setting];
      if (candidate.worst_standing() < best - kEqual) continue;
      const SettingResult& so_far = result_.settings[chosen];
      if (!found || candidate.setting.footprint_bytes() < so_far.setting.footprint_bytes()) chosen = setting;
      found = true;
    }
    return chosen;
  }

  const SearchOptions& options_;
  Rng order_;
  std::vector<std::size_t> remaining_;
  std::vector<Pass> passes_;
  std::size_t done_ = 0;
  std::size_t total_ = 0;
  SearchResult result_;
};

}  // namespace

std::vector<Setting> standard_settings() {
  constexpr std::uint64_t kFootprintMax = 64 * kMiB;
  std::vector<Setting> settings;
  for (std::uint64_t block_bytes = 256 * kKiB; block_bytes <= 4 * kMiB; block_bytes *= 2) {
    for (unsigned depth = 4; depth <= 64; depth *= 2) {
      if (block_bytes * depth <= kFootprintMax) settings.push_back({block_bytes, depth});
    }
  }
  return settings;
}

std::vector<SearchRound> quick_rounds(double scale) {
  const auto leg = [scale](int milliseconds) {
    return std::max<Nanoseconds>(kLegMin, Nanoseconds(static_cast<Nanoseconds::rep>(scale * milliseconds * 1e6)));
  };
  return {{.keep = 0, .passes = 2, .leg = leg(25)},
          {.keep = 9, .passes = 4, .leg = leg(40)},
          {.keep = 3, .passes = 8, .leg = leg(60)}};
}

std::vector<SearchRound> full_round() { return {{.keep = 0, .passes = 5, .leg = std::chrono::milliseconds(60)}}; }
std::vector<SearchRound> runoff_round() { return {{.keep = 0, .passes = 21, .leg = std::chrono::milliseconds(60)}}; }

double SettingResult::mean_standing() const {
  return std::accumulate(standing.begin(), standing.end(), 0.0) / static_cast<double>(standing.size());
}

double SettingResult::worst_standing() const { return *std::min_element(standing.begin(), standing.end()); }

SearchResult search_settings(const SearchOptions& options) { return Search(options).run(); }

}  // namespace hoist::measure
