// SPDX-License-Identifier: Apache-2.0
// zero/detail/step_form.hpp - what a step is made of, as the options have it, and by formula what it moves.
//
// Threading  Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <hoist/zero/detail/unit_table.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

// Where the options have the gradients of several micro-batches added up.
GradientSums gradient_sums(const EngineOptions& options);
unsigned passes_of_a_step(const EngineOptions& options);

// The mode that steps are carried out in: `automatic` is none.
UpdateMode update_mode(const EngineOptions& options);
std::string describe_update_mode(const EngineOptions& options);  // and why, where it was not asked for

// Whether a step writes to the store what lives in memory, beside what lives there: it does when it is committed.
bool writes_homes(const EngineOptions& options, bool committed);

// What one step of training moves, by formula, when each unit is fetched fetches[unit] times: bytes per parameter of
// each link, summed over the parameters whose state crosses it. Of several steps to a commit, their mean.
StepPhases step_phases(const EngineOptions& options, const UnitTable& table, std::span<const std::uint32_t> fetches,
                       bool homes_apart = false);

}  // namespace hoist::detail
