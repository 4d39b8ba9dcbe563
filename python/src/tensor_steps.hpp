// SPDX-License-Identifier: Apache-2.0
// python/src/tensor_steps.hpp - an engine as an optimizer: weights and gradients are the program's own tensors
// (hoist.optim). No module's hooks take part.
//
// Streams    Work is ordered by PyTorch's current stream, as in UnitManager. On the host device everything is done
//            when a call returns.
// Threading  One thread at a time, with the GIL held; it is released while the engine works.
// Memory     Tensors are borrowed: addresses of dense memory on the device, by ParameterId::index.
// Errors     Those of the Engine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "unit_manager.hpp"

namespace hoist::python {

// [J] Makes a step with these gradients, and copies the new weights out if it was applied. Address 0 means that a
// parameter has no gradient, which counts as zeros.
StepReport step_tensors(UnitManager& unit_manager, const std::vector<std::uintptr_t>& gradients,
                        const std::vector<DType>& dtypes, const std::vector<std::uintptr_t>& weights,
                        std::span<const std::byte> caller_state);
// [C] Writes the present weights into the program's tensors.
void copy_weights(UnitManager& unit_manager, const std::vector<std::uintptr_t>& weights);
// [J] Makes each value the master of its element, unless the master rounds to it already.
void change_masters(UnitManager& unit_manager, nb::callable unit_values);
// [J] Replaces all state by the given state of step `step`. UnitValues says what the callables return.
void replace_state(UnitManager& unit_manager, std::uint64_t step, nb::callable unit_masters, nb::callable unit_moments1,
                   nb::callable unit_moments2, const nb::bytes& caller_state);

}  // namespace hoist::python
