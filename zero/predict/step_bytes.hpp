// SPDX-License-Identifier: Apache-2.0
// zero/predict/step_bytes.hpp - how many bytes a step moves over each link, by formula.
//
// Threading  Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <hoist/zero/memory/unit_regions.hpp>
#include <hoist/zero/options.hpp>

namespace hoist::detail {

// The bytes that one step of training moves, by unit and by formula, when each unit is fetched fetches[unit] times:
// bytes per parameter of each link, over the parameters whose state crosses it. If a commit has several steps, their
// mean.
std::vector<UnitStep> unit_steps(const EngineOptions& options, const UnitRegions& units,
                                 std::span<const std::uint32_t> fetches);
// All units together.
StepBytes sum_of(std::span<const UnitStep> steps);

}  // namespace hoist::detail
