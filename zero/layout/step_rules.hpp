// SPDX-License-Identifier: Apache-2.0
// zero/layout/step_rules.hpp - what the options say a training step consists of.
//
// Threading  Pure functions.
#pragma once

#include <string>
#include <vector>

#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

// The options of every parameter group of a model, group 0 first.
std::vector<GroupOptions> group_options(const EngineOptions& options, const Model& model);
// The first of them that trains a parameter, whose learning rate a step reports; group 0 if none does.
GroupId reported_group(const Model& model);
// The state that the optimizer of each of them keeps.
std::vector<optim::StateForm> state_forms(const EngineOptions& options, const Model& model);

// Where the gradients of a step's micro-batches are summed.
GradientSums gradient_sums(const EngineOptions& options);
unsigned passes_of_a_step(const EngineOptions& options);

// EngineOptions::resolved_update_mode() chooses the UpdatePolicy. Other code in zero/ asks what it means, below.
std::string describe_updates(const EngineOptions& options);  // "update mode forward", and why `automatic` chose it

// Whether units wait in the update queue until somebody asks for them, or follow the order of the next pass.
enum class UpdateOrder : std::uint8_t { expected, on_request };
UpdateOrder update_order(const EngineOptions& options);

// Whether gradients are used by updates as soon as they arrive, before step(): they can then share memory.
bool hands_gradients_on(const EngineOptions& options);
// Whether EngineOptions::gradient_spill_units could free pinned memory, and is not used.
bool may_spill_gradients(const EngineOptions& options);
// Whether an update's reads serve the next forward pass, too.
bool updates_under_forward(const EngineOptions& options);

}  // namespace hoist::detail
