// SPDX-License-Identifier: Apache-2.0
// tests/zero/stored_values.hpp - every value of a training's state, compared with those in its store.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/checkpoint/verification.hpp>

#include "toy_ranks.hpp"

namespace hoist::test {

using StateValues = std::map<std::pair<std::string, State>, std::vector<float>>;

// Every state of every parameter, as the engine has it. The engine refuses the states that it does not keep.
inline StateValues values_of(Engine& engine) {
  StateValues values;
  for (const ParameterSpec& spec : engine.model().parameters()) {
    for (const State state : {State::master, State::moment1, State::moment2}) {
      const ParameterId id = engine.parameter(spec.name);
      std::vector<float> out(element_count(spec));
      if (!engine.keeps(id, state)) {
        EXPECT_THROW(engine.read(id, state, 0, out), UsageError);
        EXPECT_THROW(engine.write(id, state, 0, out), UsageError);
        continue;
      }
      engine.read(id, state, 0, out);
      values[{spec.name, state}] = out;
    }
  }
  return values;
}

// Trains from scratch, and returns the values that every rank then has.
inline StateValues trained(int ranks, const ToySetup& setup, const ToyShape& shape, std::uint64_t steps) {
  StateValues values;
  train_then(ranks, setup, shape, steps, [&](int rank, ToyModel& model) {
    StateValues mine = values_of(model.engine());
    if (rank == 0) values = std::move(mine);
  });
  return values;
}

// The store is sound, has these values, and refuses to read any other state.
inline void expect_stored(const std::string& directory, const StateValues& expected) {
  StoredModel model(directory);
  std::size_t compared = 0;
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    const StoredParameter& parameter = model.parameters()[i];
    for (const State state : {State::master, State::moment1, State::moment2}) {
      std::vector<float> values(parameter.element_count());
      const auto right = expected.find({parameter.name, state});
      if (right == expected.end()) {
        EXPECT_THROW(model.read(i, state, 0, values), UsageError);
        continue;
      }
      model.read(i, state, 0, values);
      EXPECT_EQ(values, right->second) << parameter.name;
      ++compared;
    }
  }
  EXPECT_EQ(compared, expected.size());
  EXPECT_TRUE(verify_job(std::vector{directory})[0].is_sound());
}

}  // namespace hoist::test
