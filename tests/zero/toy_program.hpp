// SPDX-License-Identifier: Apache-2.0
// tests/zero/toy_program.hpp - a toy model with its runtime.
#pragma once

#include "toy_model.hpp"

namespace hoist::test {

// Before initialize() or restore().
struct ToyTraining {
  explicit ToyTraining(const ToySetup& setup, const ToyShape& shape = {})
      : runtime(setup.runtime), model(runtime, setup.engine, shape) {}
  Engine& engine() { return model.engine(); }
  Runtime runtime;
  ToyModel model;
};

// Initialized, so that its state can be looked at.
struct ToyProgram : ToyTraining {
  explicit ToyProgram(const ToySetup& setup) : ToyTraining(setup) { model.initialize(); }
  std::vector<float> read(ParameterId parameter, State state, std::uint64_t first, std::size_t count) {
    std::vector<float> values(count);
    engine().read(parameter, state, first, values);
    return values;
  }
};

}  // namespace hoist::test
