// SPDX-License-Identifier: Apache-2.0
// tests/zero/toy_program.hpp - a toy model with its runtime and engine, initialized, whose state can be looked at.
#pragma once

#include "toy_model.hpp"

namespace hoist::test {

struct ToyProgram {
  explicit ToyProgram(const ToySetup& setup)
      : runtime(setup.runtime), engine(runtime, setup.engine), model(engine, {}) {
    engine.initialize(model.fill());
  }
  std::vector<float> read(ParameterId parameter, State state, std::uint64_t first, std::size_t count) {
    std::vector<float> values(count);
    engine.read(parameter, state, first, values);
    return values;
  }
  Runtime runtime;
  Engine engine;
  ToyModel model;
};

}  // namespace hoist::test
