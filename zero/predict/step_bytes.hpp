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

// The bytes that one step moves for each unit, if each pass fetches unit u fetches[u] times. They count the elements,
// without what fills up the last tile of a segment. If a commit has several steps, a step has its share of the commit's
// writes.
std::vector<UnitStep> unit_steps(const EngineOptions& options, const UnitRegions& units,
                                 std::span<const std::uint32_t> fetches);
// All units together.
StepBytes sum_of(std::span<const UnitStep> steps);

}  // namespace hoist::detail
