// SPDX-License-Identifier: Apache-2.0
// zero/layout/step_rules.hpp - what the options say a training step consists of.
//
// Threading  Pure functions.
#pragma once

#include <string>

#include <hoist/zero/layout/unit_table.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

// Where the gradients of a step's micro-batches are summed.
GradientSums gradient_sums(const EngineOptions& options);
unsigned passes_of_a_step(const EngineOptions& options);

// The mode that steps are carried out in: never `automatic`.
UpdateMode update_mode(const EngineOptions& options);
std::string describe_update_mode(const EngineOptions& options);  // and the reason, when `automatic` chose it

// Whether a step also writes state that lives in memory to the store: it does when the step is committed.
bool writes_resident_state(const EngineOptions& options, bool committed);

}  // namespace hoist::detail
