// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <optional>

#include <fmt/format.h>

#include <hoist/zero/layout/step_rules.hpp>

namespace hoist::detail {

std::vector<GroupOptions> group_options(const EngineOptions& options, const Model& model) {
  std::vector<GroupOptions> groups{options.optimizer_defaults};
  for (const std::optional<GroupOptions>& added : model.added_groups())
    groups.push_back(added.value_or(options.optimizer_defaults));
  return groups;
}

GroupId reported_group(const Model& model) {
  std::optional<GroupId> first;
  for (const ParameterSpec& parameter : model.parameters())
    if (parameter.trainable && (!first || parameter.group.index < first->index)) first = parameter.group;
  return first.value_or(GroupId{0});
}

std::vector<optim::StateForm> state_forms(const EngineOptions& options, const Model& model) {
  std::vector<optim::StateForm> forms;
  for (const GroupOptions& group : group_options(options, model)) forms.push_back(optim::state_form(group));
  return forms;
}

GradientSums gradient_sums(const EngineOptions& options) {
  if (options.micro_batches_max <= 1) return GradientSums::none;
  return options.micro_batch_order == MicroBatchOrder::vertical ? GradientSums::on_device : GradientSums::in_memory;
}

unsigned passes_of_a_step(const EngineOptions& options) {
  return gradient_sums(options) == GradientSums::in_memory ? options.micro_batches_max : 1;
}

std::string describe_updates(const EngineOptions& options) {
  std::string text = fmt::format("update mode {}", update_mode_name(options.resolved_update_mode()));
  if (options.update_mode == UpdateMode::automatic)
    text += fmt::format(" (auto: optimizer states are {})",
                        options.optimizer == Placement::device ? "on the device" : "offloaded");
  return text;
}

UpdateOrder update_order(const EngineOptions& options) {
  const bool delivers = options.parameters == Placement::nvme && updates_under_forward(options);
  return delivers ? UpdateOrder::on_request : UpdateOrder::expected;
}

bool hands_gradients_on(const EngineOptions& options) { return options.resolved_update_mode() == UpdateMode::backward; }
bool may_spill_gradients(const EngineOptions& options) {
  return options.gradient_spill_units == 0u && options.uses_nvme() && options.optimizer != Placement::device &&
         !hands_gradients_on(options);
}
bool updates_under_forward(const EngineOptions& options) {
  return options.resolved_update_mode() == UpdateMode::forward;
}

}  // namespace hoist::detail
