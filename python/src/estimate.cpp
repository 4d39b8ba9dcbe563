// SPDX-License-Identifier: Apache-2.0
// Predicts how much memory a model's units take, and whether this machine has it, without an engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <hoist/config/config.hpp>
#include <hoist/zero/machine.hpp>
#include <hoist/zero/predict/machine_fit.hpp>

#include "bindings.hpp"
#include "unit_manager.hpp"

namespace hoist::python {

using namespace nb::literals;

namespace {

nb::dict estimate(const Config& config, const std::vector<ManagedUnit>& units, int world_size, int local_ranks) {
  RuntimeOptions given = config.runtime;
  given.local_ranks = local_ranks;
  const EngineOptions engine = config.engine_at(world_size);
  const Machine machine = this_machine(given);
  ChosenOptions chosen = choose(given, machine);
  check(engine, chosen.runtime, world_size);
  const Prediction prediction = predict(chosen.runtime, engine, model_of(units, {}), world_size);
  if (chosen.runtime.device == platform::DeviceKind::cuda)  // what wrap() takes
    chosen.runtime.device_arena_bytes = std::max(prediction.device.bytes, kBlockAlignment);
  const MachineFit fit = machine_fit(prediction, chosen.runtime, engine, machine);

  nb::dict result;
  result["parameters"] = prediction.parameter_count;
  result["device_bytes"] = prediction.device.bytes;
  result["pinned_bytes"] = prediction.pinned.bytes;
  result["nvme_bytes"] = prediction.nvme_bytes;
  result["step"] = prediction.step;
  result["fits"] = fit.fits();
  result["problems"] = fit.problems;
  nb::list memories;
  for (const MachineFit::Memory& memory : fit.memories)
    memories.append(nb::make_tuple(memory.name, memory.least_bytes, memory.bytes, memory.free_bytes));
  result["memories"] = memories;
  nb::list choices;
  for (const auto& [key, value, reason] : chosen.choices) choices.append(nb::make_tuple(key, value, reason));
  result["choices"] = choices;
  return result;
}

}  // namespace

void bind_estimate(nb::module_& module) {
  module.def("estimate", &estimate, "config"_a, "units"_a, "world_size"_a, "local_ranks"_a,
             "What hoist.torch.estimate() shows. Memories are (name, least, held, free) in bytes, of all local ranks.");
}

}  // namespace hoist::python
