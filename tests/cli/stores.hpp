// SPDX-License-Identifier: Apache-2.0
// tests/cli/stores.hpp - small stores for the commands that read them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <hoist/interchange/safetensors_reader.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>

namespace hoist::test {

// Every master of every parameter, by name, as Engine::read has it.
using Masters = std::map<std::string, std::vector<float>>;

inline Masters masters_of(Engine& engine) {
  Masters masters;
  for (const ParameterSpec& spec : engine.model().parameters()) {
    std::vector<float>& values = masters[spec.name];
    values.resize(element_count(spec));
    engine.read(engine.parameter(spec.name), State::master, 0, values);
  }
  return masters;
}

// Trains the toy model (frozen and tied parameters included) on `world_size` ranks into `directory`.
inline Masters make_store(const std::string& directory, int world_size, std::uint64_t steps,
                          const ToyShape& shape = {}) {
  Masters masters;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory);
  train_then(world_size, setup, shape, steps, [&](int rank, ToyModel& model) {
    Masters mine = masters_of(model.engine());
    if (rank == 0) masters = std::move(mine);
  });
  return masters;
}

// Two ranks train to step 2 and keep it as "two"; then `ranks` train to `last_step`, in a store of their own below
// `directory`.
inline void make_two_stores(const std::string& directory, int ranks, std::uint64_t last_step = 4) {
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory);
  setup.engine.keep_steps = 1;
  on_ranks(2, [&](int, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join);
    model.initialize();
    model.train(1, 2);
    model.engine().save("two", {}).wait();
  });
  on_ranks(ranks, [&](int, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join);
    model.restore();
    if (last_step > 2) model.train(3, last_step);
  });
}

// Pre: the model has a tensor of this name and of values of type T.
template <typename T>
std::vector<T> values_of(const interchange::SafetensorsModel& model, const std::string& name) {
  const auto* tensor = model.find(name);
  std::vector<T> values(tensor->info->bytes() / sizeof(T));
  tensor->read(0, std::as_writable_bytes(std::span(values)));
  return values;
}

}  // namespace hoist::test
