// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/update/step_settings.hpp>

namespace hoist::detail {

namespace {

void require_group(GroupId group, std::size_t count) {
  if (group.index >= count) throw UsageError(fmt::format("there is no group {}", group.index));
}

}  // namespace

StepSettings::StepSettings(const EngineOptions& options, const Model& model, int rank)
    : scaler(options.loss_scale),
      options_(options),
      groups_(group_options(options, model)),
      reported_group_(detail::reported_group(model)),
      rank_(rank) {}

GroupOptions StepSettings::scheduled(GroupOptions group, std::uint64_t applied_steps) const {
  const LearningRateSchedule& schedule = options_.learning_rate_schedule;
  group.learning_rate = hoist::learning_rate(schedule, applied_steps, group.learning_rate);
  if (const auto betas = scheduled_betas(schedule, applied_steps)) {
    group.beta1 = betas->beta1;
    group.beta2 = betas->beta2;
  }
  return group;
}

double StepSettings::learning_rate(GroupId group) const {
  require_group(group, groups_.size());
  return scheduled(groups_[group.index], step_count).learning_rate;
}

bool StepSettings::changes_learning_rate(GroupId group, double learning_rate) const {
  require_group(group, groups_.size());
  if (!(std::isfinite(learning_rate) && learning_rate >= 0))
    throw UsageError(
        fmt::format("{} is not a learning rate: it has to be a finite number of at least 0", learning_rate));
  return learning_rate != groups_[group.index].learning_rate;
}

void StepSettings::set_learning_rate(GroupId group, double learning_rate) {
  if (changes_learning_rate(group, learning_rate)) groups_[group.index].learning_rate = learning_rate;
}

std::shared_ptr<StepUpdate> StepSettings::make_update(std::uint64_t step, double gradient_scale) const {
  std::vector<GroupOptions> now;
  for (const GroupOptions& group : groups_) now.push_back(scheduled(group, step - 1));
  return std::make_shared<StepUpdate>(step, now, gradient_scale, rank_);
}

double StepSettings::gradient_norm_max(double step_max) const {
  return options_.gradient_clipping > 0 ? std::min(options_.gradient_clipping, step_max) : step_max;
}

std::uint64_t StepSettings::hash(double gradient_norm_max) const {
  std::uint64_t hash = std::bit_cast<std::uint64_t>(gradient_norm_max);
  const auto add = [&](auto value) {
    if constexpr (std::is_same_v<decltype(value), double>)
      hash = random_bits(hash, std::bit_cast<std::uint64_t>(value));
    else
      hash = random_bits(hash, static_cast<std::uint64_t>(value));
  };
  for (const GroupOptions& own : groups_) {
    const GroupOptions group = scheduled(own, step_count);
    add(group.kind), add(group.learning_rate), add(group.beta1), add(group.beta2), add(group.epsilon);
    add(group.weight_decay), add(group.bias_correction), add(group.momentum), add(group.dampening);
    add(group.nesterov), add(group.learning_rate_decay), add(group.rounding_seed);
  }
  return hash;
}

std::string StepSettings::describe_groups() const {
  std::string lines;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const GroupOptions group = scheduled(groups_[g], step_count);
    lines += fmt::format(
        "group {}: {}, learning rate {}, betas {} {}, epsilon {}, weight decay {}, bias correction {}, momentum {} {} "
        "{}, "
        "learning rate decay {}, rounding seed {}\n",
        g, optim::optimizer_name(group.kind), group.learning_rate, group.beta1, group.beta2, group.epsilon,
        group.weight_decay, group.bias_correction, group.momentum, group.dampening, group.nesterov,
        group.learning_rate_decay, group.rounding_seed);
  }
  return lines;
}

std::string StepSettings::describe(double gradient_norm_max) const {
  return fmt::format(", learning rate {:g}, clipping {:g}", learning_rate(reported_group_),
                     std::isfinite(gradient_norm_max) ? gradient_norm_max : 0);
}

}  // namespace hoist::detail
