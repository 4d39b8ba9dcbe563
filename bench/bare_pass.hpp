// SPDX-License-Identifier: Apache-2.0
// bench/bare_pass.hpp - a training pass without mathematics.
#pragma once

#include <ranges>
#include <span>

#include <hoist/zero/engine.hpp>

namespace hoist::bench {

// Gathers every unit for the forward and for the backward pass, and finishes its gradient without writing one.
// compute(share) is called with each gathered unit: its share of the pass's time, a third of which is forward.
template <typename Compute>
void bare_pass(Engine& engine, std::span<const UnitId> units, platform::Stream& stream, const Compute& compute) {
  const double share = 1.0 / static_cast<double>(3 * units.size());
  const PassScope pass = engine.begin(Pass::train);
  const auto visit = [&](UnitId unit, double share_of_unit) {
    Lease lease = engine.gather(unit, stream);
    compute(share_of_unit);
    lease.release(stream);
  };
  for (const UnitId unit : units) visit(unit, share);
  for (const UnitId unit : units | std::views::reverse) {
    visit(unit, 2 * share);
    engine.finish(unit, stream);
  }
}

}  // namespace hoist::bench
