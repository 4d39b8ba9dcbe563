// SPDX-License-Identifier: Apache-2.0
// tests/zero/toy_model.hpp - a model without mathematics: enough to drive every path of the engine, cheap enough to run
// hundreds of times.
//
// Gradients are a fixed function of weights, step and rank, so the state after n steps is a fixed function of the
// options; only the engine can make two placements differ.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <hoist/tests/support/temp_directory.hpp>
#include <hoist/zero/engine.hpp>

namespace hoist::test {

struct ToyShape {
  std::uint64_t seed = 1;
  // Elements of the bf16 matrix of each unit; each unit also has an fp32 vector of `norm` elements.
  std::vector<std::int64_t> matrices{40000, 70001, 16384, 9973};
  std::int64_t norm = 97;
  bool frozen = true;  // a frozen matrix beside the trainable one of unit 1
  bool tied = true;    // the last unit also uses unit 0's matrix
  // The options of the vectors. The matrices have EngineOptions::optimizer_defaults.
  GroupOptions vectors{.learning_rate = 2e-2, .weight_decay = 0};
  UnitOptions unit_options{};  // of every unit
  DType dtype = DType::bf16;   // of the matrices
};

struct ToySetup {
  RuntimeOptions runtime{.device = platform::DeviceKind::host};
  EngineOptions engine;
};
// A loss scale that overflows fp16 gradients in the toy model's first steps and, every few steps, once more.
LossScaleOptions toy_loss_scale();
// Small budgets, tiny subgroups, clipping active; everything in `parameters` and `optimizer`.
ToySetup toy_setup(Placement parameters, Placement optimizer, const std::string& directory = "");

// The model that is trained; units and their matrices are ToyModel's.
Model describe(const ToyShape& shape);

struct MovedBytes {
  std::array<std::uint64_t, kLinkCount> by_link{};
  std::uint64_t operator[](Link link) const { return by_link[static_cast<std::size_t>(link)]; }
};

// Describes, makes its engine by initialize(), begin() or restore(), and trains.
class ToyModel {
 public:
  ToyModel(Runtime& runtime, const EngineOptions& options, const ToyShape& shape = {});
  // With a runtime of its own. `join` is what Runtime takes: a MakeCommunicator or Groups.
  explicit ToyModel(const ToySetup& setup, const ToyShape& shape = {})
      : ToyModel(std::make_unique<Runtime>(setup.runtime), setup.engine, shape) {}
  ToyModel(const ToySetup& setup, const auto& join, const ToyShape& shape = {})
      : ToyModel(std::make_unique<Runtime>(setup.runtime, join), setup.engine, shape) {}
  Engine& initialize(std::span<const std::byte> state = {}) { return initialize(fill(), state); }
  Engine& initialize(const Initializer& initializer, std::span<const std::byte> state = {});
  Engine& begin(const InitialState& state);
  const RestoreReport& restore(const RestoreOptions& restore_options = {});
  std::optional<std::uint64_t> find_commit() { return Engine::find_commit(runtime_, options_); }
  std::vector<NamedCheckpoint> find_checkpoints() { return Engine::find_checkpoints(runtime_, options_); }
  Engine& engine() { return engine_.value(); }
  void close() { engine_.reset(); }
  Runtime& runtime() { return runtime_; }

  const Model& model() const { return model_; }
  Initializer fill() const;
  // Forward and backward over all units on `stream`; returns a value that depends on every weight.
  double pass(std::uint64_t step, PassOptions options = {});
  double evaluate();
  void train(std::uint64_t first_step, std::uint64_t last_step);  // inclusive; pass and step() of each
  // Trains, with the engine settled before and after, and returns the bytes that these steps move.
  MovedBytes bytes_moved(std::uint64_t first_step, std::uint64_t last_step);
  UnitId unit(std::size_t index) const { return units_[index].id; }
  ParameterId matrix(std::size_t index) const { return units_[index].matrix; }
  platform::Stream& stream() { return *stream_; }
  std::vector<double> losses;
  std::vector<StepReport> reports;
  std::function<void(std::size_t unit)> in_forward = [](std::size_t) {};   // called after each unit's forward
  std::function<void(std::size_t unit)> in_backward = [](std::size_t) {};  // after each unit's finish()
  float gradient_scale = 1;                                                // in addition to the engine's loss scale
  int micro_batches = 1;                                                   // in each step of train()
  bool vertical = false;                                                   // one pass has all micro-batches of a step
  // Every rank makes rank 0's gradients. Without clipping, the state then does not depend on the number of ranks, if
  // that is a power of two.
  bool equal_gradients = false;

 private:
  struct Unit {
    UnitId id;
    ParameterId matrix, norm;
    std::optional<ParameterId> frozen;
  };
  ToyModel(std::unique_ptr<Runtime> runtime, const EngineOptions& options, const ToyShape& shape)
      : ToyModel(*runtime, options, shape) {
    own_runtime_ = std::move(runtime);
  }
  void forward(std::size_t index, double* sum);
  void backward(std::size_t index, std::uint64_t step, int held);
  void make_gradient(const TensorView& weights, const TensorView& gradient, ParameterId parameter, std::uint64_t step);

  std::unique_ptr<Runtime> own_runtime_;  // outlives the engine
  Runtime& runtime_;
  EngineOptions options_;
  ToyShape shape_;
  Model model_;
  std::optional<Engine> engine_;
  std::unique_ptr<platform::Stream> stream_;
  std::vector<Unit> units_;
};

// Initialized, so that its state can be looked at.
struct ToyProgram : ToyModel {
  explicit ToyProgram(const ToySetup& setup, const ToyShape& shape = {}) : ToyModel(setup, shape) { initialize(); }
  ToyProgram(const ToySetup& setup, const auto& join, const ToyShape& shape = {}) : ToyModel(setup, join, shape) {
    initialize();
  }
  std::vector<float> read(ParameterId parameter, State state, std::uint64_t first, std::size_t count) {
    std::vector<float> values(count);
    engine().read(parameter, state, first, values);
    return values;
  }
};

struct Digests {
  std::string master, moment1, moment2;
  std::vector<double> losses;
  friend bool operator==(const Digests&, const Digests&) = default;
};
std::ostream& operator<<(std::ostream& out, const Digests& digests);
Digests digests_of(ToyModel& model);
Digests state_digests(ToyModel& model);  // without losses, which a run that was interrupted does not have all of

// Trains `steps` steps from scratch in one process and rank; the reference of every comparison.
Digests train_once(const ToySetup& setup, const ToyShape& shape, std::uint64_t steps);

}  // namespace hoist::test
