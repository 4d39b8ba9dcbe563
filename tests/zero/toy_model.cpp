// SPDX-License-Identifier: Apache-2.0
#include "toy_model.hpp"

#include <algorithm>
#include <ostream>

#include "toy_kernels.hpp"

namespace hoist::test {

ToySetup toy_setup(Placement parameters, Placement optimizer, const std::string& directory) {
  ToySetup setup;
  setup.runtime.device_memory_bytes = 4 * kMiB;  // each runtime fills it
  setup.runtime.comm_scratch_bytes = kMiB;
  setup.runtime.pinned_memory_bytes = 32 * kMiB;
  setup.runtime.communicator = CommunicatorKind::self;
  setup.runtime.update_threads = 2;
  setup.runtime.host_device.chaos_seed = 0;
  setup.engine.parameters = parameters;
  setup.engine.optimizer = optimizer;
  setup.engine.store_directory = directory;
  setup.engine.sub_group_elements = 20000;
  setup.engine.persistence_elements = 0;
  setup.engine.gradient_clipping = 0.5;
  setup.engine.optimizer_defaults.learning_rate = 1e-2;
  return setup;
}

LossScaleOptions toy_loss_scale() { return {.dynamic = true, .scale = 0x1.0p21, .window = 2, .hysteresis = 1}; }

Model describe(const ToyShape& shape) {
  Model model;
  const GroupId no_decay = model.add_group(shape.vectors);
  UnitId last;
  for (std::size_t u = 0; u < shape.matrices.size(); ++u) {
    const std::string name = "unit" + std::to_string(u);
    std::vector<ParameterSpec> specs{
        {.name = name + ".matrix", .shape = {shape.matrices[u]}, .dtype = shape.dtype},
        {.name = name + ".norm", .shape = {shape.norm}, .dtype = DType::fp32, .group = no_decay}};
    if (shape.frozen && u == 1)
      specs.push_back({.name = name + ".frozen", .shape = {3, 1000}, .dtype = shape.dtype, .trainable = false});
    last = model.add_unit(name, specs, shape.unit_options);
  }
  if (shape.tied && shape.matrices.size() > 1) model.tie(last, model.parameter("unit0.matrix"));
  return model;
}

ToyModel::ToyModel(Runtime& runtime, const EngineOptions& options, const ToyShape& shape)
    : runtime_(runtime),
      options_(options),
      shape_(shape),
      model_(describe(shape)),
      stream_(runtime.device().create_stream("compute")) {
  for (const ModelUnit& unit : model_.units())
    units_.push_back({.id = model_.unit_of(unit.parameters.front()),
                      .matrix = model_.parameter(unit.name + ".matrix"),
                      .norm = model_.parameter(unit.name + ".norm"),
                      .frozen = model_.find(unit.name + ".frozen")});
}

Engine& ToyModel::initialize(const Initializer& initializer, std::span<const std::byte> state) {
  close();
  return engine_.emplace(Engine::create(runtime_, options_, model_, initializer, state));
}

Engine& ToyModel::begin(const InitialState& state) {
  close();
  return engine_.emplace(Engine::create(runtime_, options_, model_, state));
}

const RestoreReport& ToyModel::restore(const RestoreOptions& restore_options) {
  close();
  return *engine_.emplace(Engine::restore(runtime_, options_, model_, restore_options)).restored();
}

Initializer ToyModel::fill() const {
  return [seed = shape_.seed](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    std::vector<float> values(out.size());
    fill_normal(seed + 1000 * parameter.index, first, values);
    std::ranges::copy(values, out.begin());
  };
}

namespace {

std::uint64_t byte_count(const TensorView& view) { return view.element_count() * dtype_bytes(view.dtype); }

std::vector<std::byte> copy_of(const TensorView& view) {
  const auto* const data = static_cast<const std::byte*>(view.data);
  return {data, data + byte_count(view)};
}

constexpr std::uint64_t kMicroBatchStride = 10'000;  // every micro-batch of a step has gradients of its own

}  // namespace

void ToyModel::forward(std::size_t index, double* sum) {
  const Unit& unit = units_[index];
  Lease lease = engine().gather(unit.id, *stream_);
  std::vector<TensorView> views{lease.view(unit.matrix), lease.view(unit.norm)};
  if (unit.frozen) views.push_back(lease.view(*unit.frozen));
  if (shape_.tied && index + 1 == units_.size() && index > 0) views.push_back(lease.view(units_.front().matrix));
  stream_->launch("forward", [views, sum] {
    for (const TensorView& view : views) *sum += weighted_sum(copy_of(view), view.dtype);
  });
  lease.release(*stream_);
  in_forward(index);
}

void ToyModel::make_gradient(const TensorView& weights, const TensorView& gradient, ParameterId parameter,
                             std::uint64_t step) {
  const std::uint64_t seed = shape_.seed + 77 * parameter.index + 1'000'003 * step +
                             7919 * static_cast<std::uint64_t>(equal_gradients ? 0 : runtime_.rank());
  stream_->launch("backward", [weights, gradient, seed, scale = gradient_scale * engine().loss_scale()] {
    std::vector<std::byte> sum = copy_of(gradient);
    add_gradient(copy_of(weights), weights.dtype, sum, gradient.dtype, seed, scale);
    std::ranges::copy(sum, static_cast<std::byte*>(gradient.data));
  });
}

void ToyModel::backward(std::size_t index, std::uint64_t step, int held) {
  const Unit& unit = units_[index];
  Lease lease = engine().gather(unit.id, *stream_);
  const GradientLease gradients = engine().gradients(unit.id, *stream_);
  for (int i = 0; i < held; ++i, step += kMicroBatchStride) {
    make_gradient(lease.view(unit.matrix), gradients.view(unit.matrix), unit.matrix, step);
    make_gradient(lease.view(unit.norm), gradients.view(unit.norm), unit.norm, step);
    if (shape_.tied && index + 1 == units_.size() && index > 0) {
      const ParameterId owner = units_.front().matrix;
      make_gradient(lease.view(owner), engine().gradients(units_.front().id, *stream_).view(owner), owner, step + 500);
    }
  }
  lease.release(*stream_);
  engine().finish(unit.id, *stream_);
  in_backward(index);
}

double ToyModel::pass(std::uint64_t step, PassOptions options) {
  step += kMicroBatchStride * static_cast<std::uint64_t>(options.micro_batch);
  const int held = vertical ? options.micro_batches : 1;
  double sum = 0;
  try {
    const PassScope scope = engine().begin(Pass::train, options);
    for (std::size_t u = 0; u < units_.size(); ++u) forward(u, &sum);
    for (std::size_t u = units_.size(); u-- > 0;) backward(u, step, held);
  } catch (...) {
    stream_->synchronize();  // enqueued work writes to `sum`
    throw;
  }
  stream_->synchronize();
  losses.push_back(sum);
  return sum;
}

double ToyModel::evaluate() {
  double sum = 0;
  {
    const PassScope scope = engine().begin(Pass::evaluate);
    for (std::size_t u = 0; u < units_.size(); ++u) forward(u, &sum);
  }
  stream_->synchronize();
  return sum;
}

void ToyModel::train(std::uint64_t first_step, std::uint64_t last_step) {
  for (std::uint64_t step = first_step; step <= last_step; ++step) {
    for (int i = 0; i < (vertical ? 1 : micro_batches); ++i)
      pass(step, {.micro_batch = i, .micro_batches = micro_batches});
    const auto state = std::as_bytes(std::span(&step, 1));
    reports.push_back(engine().step({.caller_state = state}));
  }
}

MovedBytes ToyModel::bytes_moved(std::uint64_t first_step, std::uint64_t last_step) {
  const auto totals = [&](std::size_t link) { return runtime_.ledger().totals(static_cast<Link>(link)).bytes; };
  MovedBytes moved;
  engine().settle();
  for (std::size_t link = 0; link < kLinkCount; ++link) moved.by_link[link] = totals(link);
  train(first_step, last_step);
  engine().settle();
  for (std::size_t link = 0; link < kLinkCount; ++link) moved.by_link[link] = totals(link) - moved.by_link[link];
  return moved;
}

std::ostream& operator<<(std::ostream& out, const Digests& d) {
  out << d.master << ' ' << d.moment1 << ' ' << d.moment2 << " losses";
  for (const double loss : d.losses) out << ' ' << loss;
  return out;
}

Digests digests_of(ToyModel& model) {
  Digests digests = state_digests(model);
  digests.losses = model.losses;
  return digests;
}

Digests state_digests(ToyModel& model) {
  Engine& engine = model.engine();
  return {state_digest(engine, State::master),
          state_digest(engine, State::moment1),
          state_digest(engine, State::moment2),
          {}};
}

Digests train_once(const ToySetup& setup, const ToyShape& shape, std::uint64_t steps) {
  ToyProgram model(setup, shape);
  model.train(1, steps);
  return digests_of(model);
}

}  // namespace hoist::test
