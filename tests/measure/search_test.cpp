// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <gtest/gtest.h>

#include <hoist/core/rng.hpp>
#include <hoist/measure/search.hpp>

namespace hoist::measure::search_test {
namespace {

// A drive with a saturating queue, a price for each block and one for a large footprint; its speed drifts by a third
// over a minute and each measurement is off by some percent.
class ModelDrive {
 public:
  explicit ModelDrive(std::uint64_t seed) : rng_(seed) {}

  static double true_speed(const Setting& setting, Pattern pattern) {
    const double in_flight = static_cast<double>(setting.footprint_bytes());
    const double latency = pattern == Pattern::write ? 0.4e-3 : 1e-3;
    const double top = pattern == Pattern::read ? 6e9 : 4e9;
    const double fill = in_flight / (in_flight + top * latency);
    const double block = static_cast<double>(setting.block_bytes);
    const double overhead = block / (block + 64 * 1024);
    const double footprint = in_flight > 32e6 ? 0.8 : 1.0;
    return top * fill * overhead * footprint;
  }

  double measure(const Setting& setting, Pattern pattern, Nanoseconds leg) {
    clock_seconds_ += to_seconds(leg);
    const double drift = 1 + 0.3 * std::sin(clock_seconds_ / 3);
    const double noise = 1 + 0.08 * (rng_.uniform() - 0.5) * std::sqrt(0.05 / to_seconds(leg));
    return true_speed(setting, pattern) * drift * noise;
  }

 private:
  Rng rng_;
  double clock_seconds_ = 0;
};

double share_of_best(const Setting& chosen, Pattern pattern) {
  double best = 0;
  for (const Setting& setting : standard_settings()) best = std::max(best, ModelDrive::true_speed(setting, pattern));
  return ModelDrive::true_speed(chosen, pattern) / best;
}

// The best that one setting for all patterns can be.
double best_worst_share() {
  double best = 0;
  for (const Setting& setting : standard_settings()) {
    double worst = 1;
    for (const Pattern pattern : kPatterns) worst = std::min(worst, share_of_best(setting, pattern));
    best = std::max(best, worst);
  }
  return best;
}

TEST(Search, FindsAGoodSettingOnADriftingNoisyDrive) {
  ASSERT_GT(best_worst_share(), 0.95);
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    ModelDrive drive(seed);
    const SearchResult result =
        search_settings({.seed = seed, .measure = [&](const Setting& s, Pattern p, Nanoseconds leg) {
                           return drive.measure(s, p, leg);
                         }});
    EXPECT_TRUE(result.complete);
    const Setting& chosen = result.settings[result.best].setting;
    for (const Pattern pattern : kPatterns) {
      EXPECT_GE(share_of_best(chosen, pattern), 0.9)
          << pattern_name(pattern) << ", " << chosen.block_bytes << " x " << chosen.queue_depth << ", seed " << seed;
    }
  }
}

TEST(Search, EqualSettingsGoToTheSmallerFootprint) {
  const SearchResult result = search_settings({.measure = [](const Setting&, Pattern, Nanoseconds) { return 1e9; }});
  // Which settings survive is chance among equals; of those, none is smaller than the chosen one.
  const SettingResult& chosen = result.settings[result.best];
  for (const SettingResult& other : result.settings) {
    if (other.passes < chosen.passes) continue;
    EXPECT_GE(other.setting.footprint_bytes(), chosen.setting.footprint_bytes());
  }
}

TEST(Search, OnePoorPatternSpoilsASetting) {
  const std::vector<Setting> settings{{1 << 20, 8}, {1 << 20, 16}};
  const SearchResult result =
      search_settings({.settings = settings,
                       .rounds = {{.keep = 0, .passes = 3, .leg = std::chrono::milliseconds(1)}},
                       .measure = [&](const Setting& setting, Pattern pattern, Nanoseconds) {
                         if (setting == settings[1]) return 1.0e9;          // even
                         return pattern == Pattern::write ? 0.5e9 : 1.2e9;  // fast, but not at writing
                       }});
  EXPECT_EQ(result.best, 1u);
  EXPECT_DOUBLE_EQ(result.settings[0].worst_standing(), 0.5);
}

TEST(Search, StopsWhenTimeIsOutAndSaysSo) {
  std::size_t measured = 0;
  const auto measure = [&](const Setting&, Pattern, Nanoseconds) {
    ++measured;
    return 1e9;
  };
  const std::size_t one_pass = standard_settings().size() * kPatterns.size();
  const SearchResult result =
      search_settings({.measure = measure, .out_of_time = [&] { return measured == one_pass + 5; }});
  EXPECT_FALSE(result.complete);
  EXPECT_EQ(measured, one_pass + 5);
  for (const SettingResult& setting : result.settings) EXPECT_EQ(setting.passes, 1u);
  measured = 0;
  EXPECT_FALSE(search_settings({.measure = measure, .out_of_time = [] { return true; }}).complete);
  EXPECT_EQ(measured, one_pass) << "without one pass there is nothing to choose from";
}

TEST(Search, SettingsStayWithinTheirFootprint) {
  for (const Setting& setting : standard_settings()) {
    EXPECT_LE(setting.footprint_bytes(), 64 * kMiB);
    EXPECT_EQ(setting.block_bytes % kBlockAlignment, 0u);
  }
}

}  // namespace
}  // namespace hoist::measure::search_test
