// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/layout/step_rules.hpp>

namespace hoist::detail {

std::vector<GroupOptions> group_options(const EngineOptions& options, const Model& model) {
  std::vector<GroupOptions> groups{options.optimizer_defaults};
  for (const std::optional<GroupOptions>& added : model.added_groups())
    groups.push_back(added.value_or(options.optimizer_defaults));
  return groups;
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

void check_step_rules(const EngineOptions& options) {
  const auto refuse = [](bool wrong, const std::string& problem) {
    if (wrong) throw ConfigError("hoist.update_mode", problem);
  };
  const auto mode = static_cast<unsigned>(options.update_mode);
  refuse(options.update_mode > UpdateMode::backward, fmt::format("{} is none of its values", mode));
  const bool backward = hands_gradients_on(options);
  refuse((backward || updates_under_forward(options)) && options.optimizer == Placement::device,
         fmt::format("\"{}\" is for optimizer states that are offloaded; use \"step\", or \"auto\"",
                     backward ? "backward" : "forward"));
  refuse(backward && options.gradient_clipping > 0,
         "\"backward\" updates units before the norm is known that clipping needs; set gradient_clipping to 0, or use "
         "\"forward\"");
  refuse(backward && (options.loss_scale.dynamic || options.loss_scale.scale != 1),
         "\"backward\" cannot skip a step, as loss scaling has to; use \"forward\", or bf16.enabled instead of "
         "fp16.enabled");
}

UpdateMode update_mode(const EngineOptions& options) {
  if (options.update_mode != UpdateMode::automatic) return options.update_mode;
  return options.optimizer == Placement::device ? UpdateMode::step : UpdateMode::forward;
}

const char* update_mode_name(const EngineOptions& options) {
  constexpr std::array kNames{"auto", "step", "forward", "backward"};
  return kNames[static_cast<std::size_t>(update_mode(options))];
}

std::string describe_updates(const EngineOptions& options) {
  std::string text = fmt::format("update mode {}", update_mode_name(options));
  if (options.update_mode == UpdateMode::automatic)
    text += fmt::format(" (auto: optimizer states are {})",
                        options.optimizer == Placement::device ? "on the device" : "offloaded");
  return text;
}

UpdateOrder update_order(const EngineOptions& options) {
  const bool delivers = options.parameters == Placement::nvme && updates_under_forward(options);
  return delivers ? UpdateOrder::on_request : UpdateOrder::expected;
}

bool hands_gradients_on(const EngineOptions& options) { return update_mode(options) == UpdateMode::backward; }
bool may_spill_gradients(const EngineOptions& options) {
  return options.gradient_spill_units == 0u && options.uses_nvme() && options.optimizer != Placement::device &&
         !hands_gradients_on(options);
}
bool updates_under_forward(const EngineOptions& options) { return update_mode(options) == UpdateMode::forward; }

bool writes_resident_state(const EngineOptions& options, bool committed) {
  return options.commits_steps() && committed;
}

}  // namespace hoist::detail
