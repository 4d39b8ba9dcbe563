// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/update/learning_rate.hpp>

namespace hoist {

namespace {

// DeepSpeed's schedules hold the index of the last step, -1 before the first. These take n, the number of applied
// steps, which is that index plus one, and give the value of the constructor at n = 0.

// Two at least, since the logarithm of one is nothing to divide by.
double warmup_length(std::uint64_t steps) { return static_cast<double>(std::max<std::uint64_t>(2, steps)); }

bool warming_up(std::uint64_t applied_steps, double length) { return static_cast<double>(applied_steps) - 1 < length; }

// Share of the way up, from 0 to below 1. Pre: n > 0 and warming_up.
double warmup_share(std::uint64_t applied_steps, double length, WarmupShape shape) {
  const auto n = static_cast<double>(applied_steps);
  return shape == WarmupShape::linear ? (n - 1) / length : (1.0 / std::log(length)) * std::log(n);
}

double rate_of(const ConstantRate&, std::uint64_t, double group_rate) { return group_rate; }

double rate_of(const WarmupRate& s, std::uint64_t n, double group_rate) {
  if (n == 0) return s.min_rate;
  const double length = warmup_length(s.steps);
  const double share = warming_up(n, length) ? warmup_share(n, length, s.shape) : 1.0;
  return s.min_rate + (s.max_rate.value_or(group_rate) - s.min_rate) * share;
}

double rate_of(const WarmupDecayRate& s, std::uint64_t n, double group_rate) {
  const double length = warmup_length(s.warmup.steps);
  if (n == 0 || warming_up(n, length)) return rate_of(s.warmup, n, group_rate);
  const auto total = static_cast<double>(s.total_steps);
  const double share = std::max(0.0, (total - (static_cast<double>(n) - 1)) / std::max(1.0, total - length));
  return s.warmup.min_rate + (s.warmup.max_rate.value_or(group_rate) - s.warmup.min_rate) * share;
}

double rate_of(const WarmupCosineRate& s, std::uint64_t n, double group_rate) {
  if (n == 0) return 0.0;  // the constructor's, whatever warmup_min_ratio says
  const double length = warmup_length(s.warmup_steps);
  if (warming_up(n, length)) {
    const double share = warmup_share(n, length, s.shape);
    return group_rate * (s.warmup_min_ratio + share * (1.0 - s.warmup_min_ratio));
  }
  const double past = static_cast<double>(n) - length;
  const double span = std::max(1.0, static_cast<double>(s.total_steps) - length);
  const double progress = std::min(1.0, past / span);
  const double share = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return group_rate * std::max(0.0, s.cosine_min_ratio + (1.0 - s.cosine_min_ratio) * share);
}

double rate_of(const RangeTestRate& s, std::uint64_t n, double) {
  const double intervals = static_cast<double>(n) / static_cast<double>(s.interval_steps);
  return s.min_rate * (1 + s.growth * (s.staircase ? std::floor(intervals) : intervals));
}

double cycle_steps(const OneCycleRate& s) {
  return static_cast<double>(s.first_steps) + static_cast<double>(s.second_steps.value_or(s.first_steps));
}

// Height within the cycle, 0 at its ends and 1 at its peak. Pre: 0 < n <= cycle_steps.
double cycle_height(const OneCycleRate& s, std::uint64_t applied_steps) {
  const auto first = static_cast<double>(s.first_steps);
  const double total = cycle_steps(s);
  const auto n = static_cast<double>(applied_steps);
  const double x = n < total ? n / total : 0.0;  // the cycle's end is the next one's start
  const double up = first / total;
  const bool rising = x <= up;
  const std::uint64_t stairs = rising ? s.first_stairs : s.second_stairs.value_or(s.first_stairs);
  if (stairs == 0) return rising ? x / up : (x - 1) / (up - 1);
  const auto count = static_cast<double>(stairs);
  const double at = n < total ? n : 0.0;
  const double position = at <= first ? at * count / first : (total - at) * count / (total - first);
  return std::floor(position) / count;
}

double rate_of(const OneCycleRate& s, std::uint64_t n, double) {
  if (n == 0) return s.min_rate;
  if (static_cast<double>(n) <= cycle_steps(s)) return s.min_rate + (s.max_rate - s.min_rate) * cycle_height(s, n);
  if (s.decay_interval_steps == 0) return s.min_rate;
  const double intervals = (static_cast<double>(n) - cycle_steps(s)) / static_cast<double>(s.decay_interval_steps);
  return s.min_rate / (1 + s.decay_rate * intervals);
}

void require(bool holds, const char* key, const char* problem) {
  if (!holds) throw ConfigError(fmt::format("scheduler.params.{}", key), problem);
}

bool is_rate(double rate) { return std::isfinite(rate) && rate >= 0; }

void check_one(const ConstantRate&) {}

void check_one(const WarmupRate& s) {
  require(is_rate(s.min_rate), "warmup_min_lr", "is not a learning rate: use a finite number of at least 0");
  require(!s.max_rate || is_rate(*s.max_rate), "warmup_max_lr",
          "is not a learning rate: use a finite number of at least 0");
  require(s.shape <= WarmupShape::linear, "warmup_type", "is none of its values");
}

void check_one(const WarmupDecayRate& s) {
  check_one(s.warmup);
  require(s.total_steps > 0, "total_num_steps", "is 0; name the step at which the decay ends");
}

void check_one(const WarmupCosineRate& s) {
  require(s.total_steps > 0, "total_num_steps", "is 0; name the step at which the cosine ends");
  require(is_rate(s.warmup_min_ratio), "warmup_min_ratio", "is not a ratio: use a finite number of at least 0");
  require(s.shape <= WarmupShape::linear, "warmup_type", "is none of its values");
  require(is_rate(s.cosine_min_ratio), "cos_min_ratio", "is not a ratio: use a finite number of at least 0");
}

void check_one(const OneCycleRate& s) {
  require(is_rate(s.min_rate), "cycle_min_lr", "is not a learning rate: use a finite number of at least 0");
  require(is_rate(s.max_rate), "cycle_max_lr", "is not a learning rate: use a finite number of at least 0");
  require(s.first_steps > 0, "cycle_first_step_size", "is 0; the rising half needs at least 1 step");
  require(is_rate(s.decay_rate), "decay_lr_rate", "is not a decay rate: use a finite number of at least 0");
  const auto is_beta = [](double beta) { return beta >= 0 && beta < 1; };
  require(!s.momentum || is_beta(s.momentum->min_beta1), "cycle_min_mom", "is not from 0 to below 1");
  require(!s.momentum || is_beta(s.momentum->max_beta1), "cycle_max_mom", "is not from 0 to below 1");
}

void check_one(const RangeTestRate& s) {
  require(is_rate(s.min_rate), "lr_range_test_min_lr", "is not a learning rate: use a finite number of at least 0");
  require(s.interval_steps > 0, "lr_range_test_step_size", "is 0; use at least 1");
  require(is_rate(s.growth), "lr_range_test_step_rate", "is not a growth: use a finite number of at least 0");
}

}  // namespace

void check(const LearningRateSchedule& schedule) {
  std::visit([](const auto& s) { check_one(s); }, schedule);
}

double learning_rate(const LearningRateSchedule& schedule, std::uint64_t applied_steps, double group_rate) {
  return std::visit([&](const auto& s) { return rate_of(s, applied_steps, group_rate); }, schedule);
}

std::optional<Betas> scheduled_betas(const LearningRateSchedule& schedule, std::uint64_t applied_steps) {
  const auto* cycle = std::get_if<OneCycleRate>(&schedule);
  if (cycle == nullptr || !cycle->momentum) return std::nullopt;
  const auto [low, high] = *cycle->momentum;
  if (applied_steps == 0) return Betas{low, kOneCycleBeta2};  // the constructor's: the cycle proper starts at `high`
  if (static_cast<double>(applied_steps) > cycle_steps(*cycle)) return Betas{high, kOneCycleBeta2};
  return Betas{high - (high - low) * cycle_height(*cycle, applied_steps), kOneCycleBeta2};
}

}  // namespace hoist
