// SPDX-License-Identifier: Apache-2.0
// zero/predict/step_graph.hpp - the tasks that the engine carries out in a few steps, and what each task waits for.
//
// A unit's fetch reads its weights (into a staging buffer), copies them up and gathers them, into its place of the
// gather memory; then the unit computes. Backward also makes its gradient (in a gradient buffer), which is reduced and
// copied down, and written if it is spilled. The update reads, computes and writes a unit's record in pieces, each in
// an update buffer. The update mode decides when. Updates on the device run after backward and before anything else.
//
// Left out: processors that the update and the program share.
//
// Threading  Pure functions.
#pragma once

#include <vector>

#include <hoist/scheduler/simulation.hpp>
#include <hoist/zero/predict/prediction.hpp>
#include <hoist/zero/predict/step_time.hpp>

namespace hoist::detail {

// Tiers of the graph's holds. Each is what the memory plan reserves for them: with the rest of the plan, which does not
// change, they make up the budgets.
enum class HeldIn : std::uint8_t { gather_memory, gradient_buffers, staging_buffers, update_buffers };
inline constexpr std::size_t kHeldInCount = 4;

struct StepGraph {
  scheduler::TaskGraph tasks;
  std::vector<scheduler::TaskIndex> decided;  // when each step has all gradients
};
StepGraph step_graph(const Prediction& prediction, const StepSpeeds& speeds, unsigned steps);
// The bytes that the memory plan reserves, by HeldIn.
std::vector<std::uint64_t> reserved_bytes(const Prediction& prediction);

// 0 where no speed is known.
template <typename Bytes>
double time_of(Bytes bytes, double bytes_per_second) {
  return bytes_per_second > 0 ? static_cast<double>(bytes) / bytes_per_second : 0;
}
// Seconds of a read or write of so many bytes in a step that reads and writes so many in all.
double nvme_seconds(double bytes, double bytes_per_second, const StepBytes& step, const StepSpeeds& speeds);

}  // namespace hoist::detail
