// SPDX-License-Identifier: Apache-2.0
// zero/update/learning_rate.hpp - learning-rate schedules as pure functions of the step.
//
// The five schedules of a DeepSpeed configuration, with DeepSpeed's formulas and timing (deepspeed/runtime/
// lr_schedules.py, 0.19.8): its schedule objects advance after every optimizer step that was not skipped, and the first
// step runs with the rate of their constructor. Here that is one function of n, the number of steps applied so far; a
// skipped step leaves n and therefore the rate as they are, and a resumed run continues where n says.
//
// Threading  Pure functions; any thread.
// Memory     None is allocated.
// Errors     check() refuses what has no meaning; the functions below expect schedules that passed it.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

namespace hoist {

// The rate stays what the parameter group has.
struct ConstantRate {};

enum class WarmupShape : std::uint8_t {
  logarithmic,  // log(n) / log(steps)
  linear,       // (n - 1) / steps
};

// WarmupLR: from min_rate up to max_rate over `steps` steps, then max_rate.
struct WarmupRate {
  double min_rate = 0;
  std::optional<double> max_rate{};  // empty: the group's own rate
  std::uint64_t steps = 1000;        // at least 2 are taken
  WarmupShape shape = WarmupShape::logarithmic;
};

// WarmupDecayLR: the same warm-up, then a straight line from max_rate to zero at step `total_steps`. As in DeepSpeed
// the line does not lead back to min_rate, only the part above it shrinks.
struct WarmupDecayRate {
  WarmupRate warmup{.max_rate = 0.001};
  std::uint64_t total_steps = 0;
};

// WarmupCosineLR: the group's own rate times a ratio that rises to one and falls along half a cosine.
struct WarmupCosineRate {
  std::uint64_t total_steps = 0;
  double warmup_min_ratio = 0;
  double cosine_min_ratio = 0.0001;
  std::uint64_t warmup_steps = 1000;  // at least 2 are taken
  WarmupShape shape = WarmupShape::logarithmic;
};

// beta1 and beta2 of Adam for one step.
struct Betas {
  double beta1 = 0.9;
  double beta2 = 0.999;
};

// OneCycle (Smith, arXiv 1803.09820): up over first_steps, down over second_steps, then decay below min_rate.
struct OneCycleRate {
  // While the rate goes up beta1 goes down from max_beta1, and back. beta2 is kOneCycleBeta2 throughout.
  struct Momentum {
    double min_beta1 = 0.8;
    double max_beta1 = 0.9;
  };
  double min_rate = 0;
  double max_rate = 0;
  std::uint64_t first_steps = 2000;
  std::optional<std::uint64_t> second_steps{};   // empty: first_steps
  std::uint64_t first_stairs = 0;                // 0: a straight line
  std::optional<std::uint64_t> second_stairs{};  // empty: first_stairs
  double decay_rate = 0;                         // min_rate / (1 + decay_rate * intervals) after the cycle
  std::uint64_t decay_interval_steps = 0;        // 0: no decay
  std::optional<Momentum> momentum = Momentum{};
};
inline constexpr double kOneCycleBeta2 = 0.99;  // DeepSpeed's constant; it takes the place of the configured beta2

// LRRangeTest (same paper): a rate that only grows, to find where training diverges.
struct RangeTestRate {
  double min_rate = 0.001;
  std::uint64_t interval_steps = 2000;
  double growth = 1.0;     // per interval, in units of min_rate
  bool staircase = false;  // grow at the interval's end, rather than a little every step
};

using LearningRateSchedule =
    std::variant<ConstantRate, WarmupRate, WarmupDecayRate, WarmupCosineRate, OneCycleRate, RangeTestRate>;

// Errors: ConfigError with the DeepSpeed key ("scheduler.params.total_num_steps") of the first value out of range.
void check(const LearningRateSchedule& schedule);

// The rate of the step that is about to be applied after `applied_steps` others, for a group whose own rate is
// `group_rate`.
double learning_rate(const LearningRateSchedule& schedule, std::uint64_t applied_steps, double group_rate);

// The same for Adam's betas; empty: the schedule leaves them alone.
std::optional<Betas> scheduled_betas(const LearningRateSchedule& schedule, std::uint64_t applied_steps);

}  // namespace hoist
