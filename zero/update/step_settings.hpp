// SPDX-License-Identifier: Apache-2.0
// zero/update/step_settings.hpp - what the next step is computed with, beside its gradients: the number of steps so
// far, the groups' optimizers as the schedule has them, the loss scale.
//
// Threading  The program's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <hoist/zero/options.hpp>
#include <hoist/zero/update/step_update.hpp>

namespace hoist::detail {

class StepSettings {
 public:
  StepSettings(const EngineOptions& options, const Model& model, int rank);

  std::uint64_t step_count = 0;  // steps applied
  LossScaler scaler;             // changes in a step alone, and only after the step before has been carried out

  const std::vector<GroupOptions>& groups() const { return groups_; }
  GroupId reported_group() const { return reported_group_; }  // whose learning rate a step reports
  // Errors (both): UsageError for a group that does not exist; for a rate that is negative or not finite.
  double learning_rate(GroupId group) const;  // of the next step
  // False when the group has that rate already.
  bool changes_learning_rate(GroupId group, double learning_rate) const;
  void set_learning_rate(GroupId group, double learning_rate);

  // The factor for sums of gradients over the micro-batches, whose losses were scaled.
  double gradient_mean(int micro_batches) const { return 1.0 / micro_batches / scaler.scale(); }
  // Updates tiles for step `step`, counted from 1. `gradient_scale`: what sums of gradients are multiplied by.
  std::shared_ptr<StepUpdate> make_update(std::uint64_t step, double gradient_scale) const;
  // The global norm that the next step's gradients are scaled down to; infinity: none. `step_max`: of that step alone.
  double gradient_norm_max(double step_max) const;
  // Equal where the next step changes equal state with equal gradients in the same way.
  std::uint64_t hash(double gradient_norm_max) const;
  std::string describe(double gradient_norm_max) const;  // ", learning rate 0.1, clipping 1"
  std::string describe_groups() const;                   // a line for each

 private:
  // The group's options for the step after `applied_steps` others.
  GroupOptions scheduled(GroupOptions group, std::uint64_t applied_steps) const;

  const EngineOptions& options_;
  std::vector<GroupOptions> groups_;  // group 0 first
  GroupId reported_group_;
  int rank_;
};

}  // namespace hoist::detail
