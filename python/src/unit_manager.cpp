// SPDX-License-Identifier: Apache-2.0
#include "unit_manager.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>

namespace hoist::python {
namespace {

// A little more than the unit's window will have.
std::uint64_t window_bytes_about(const ManagedUnit& unit, int world_size) {
  std::uint64_t bytes = 0;
  for (const ParameterSpec& spec : unit.parameters) {
    std::uint64_t elements = 1;
    for (const std::int64_t extent : spec.shape) elements *= static_cast<std::uint64_t>(extent);
    bytes += round_up(elements * dtype_bytes(spec.dtype), 256);
  }
  return bytes + static_cast<std::uint64_t>(world_size) * 64 * kKiB;
}

}  // namespace

UnitManager::UnitManager(UnitManagerOptions options) : options_(std::move(options)) {
  if (options_.runtime.device != platform::DeviceKind::host) {
    throw UsageError(
        "PyTorch's weights are gathered into CPU memory by this version: set \"hoist\": {\"device\": \"host\"}. "
        "Binding gathered memory to CUDA storages has to be tested on a card first");
  }
  if (options_.engine.micro_batch_order == MicroBatchOrder::vertical) {
    throw ConfigError("hoist.micro_batch_order",
                      "autograd takes a micro-batch through the whole model before the next one; use \"horizontal\"");
  }
  declare_model();
  divide_memory();
  open_runtime();
  make_windows();
}

UnitManager::~UnitManager() { end_engine(); }

void UnitManager::close() {
  if (!is_open() || !process_.is_this()) return;
  if (pass_) discard();
  std::exception_ptr failure;
  if (engine_) {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(engine_mutex());
    try {
      engine_->settle();
    } catch (...) {
      failure = std::current_exception();  // after the store was given up: whoever goes on opens it
    }
  }
  end_engine();
  if (failure) std::rethrow_exception(failure);
}

void UnitManager::abandon(const std::string& why) noexcept {
  if (!is_open() || !process_.is_this()) return;
  if (pass_) discard();
  end_engine(&why);
}

void UnitManager::initialize(const Initializer& initializer) {
  const nb::gil_scoped_release release;
  const std::lock_guard lock(engine_mutex());
  if (engine_) throw UsageError("the model is being trained already");
  engine_ = Engine::create(runtime(), options_.engine, model_, initializer);
}

RestoreReport UnitManager::restore(const std::string& from) {
  if (pass_) discard();
  if (engine_) {
    {
      const nb::gil_scoped_release release;
      const std::lock_guard lock(engine_mutex());
      try {
        engine_->settle();
      } catch (const Error&) {  // of the run that is being left
      }
    }
    end_engine();
    open_runtime();
  }
  const nb::gil_scoped_release release;
  const std::lock_guard lock(engine_mutex());
  engine_ = Engine::restore(runtime(), options_.engine, model_, {.from = from});
  return *engine_->restored();
}

std::optional<std::uint64_t> UnitManager::find_commit() { return Engine::find_commit(runtime(), options_.engine); }

std::vector<KeptStep> UnitManager::find_kept() {
  const std::lock_guard lock(engine_mutex());
  return Engine::find_kept(runtime(), options_.engine);
}

void UnitManager::end_engine(const std::string* why_for_others) noexcept {
  if (!runtime_ || !process_.is_this()) return;
  pass_.reset();
  collecting_ = {};
  adding_ = {};
  const nb::gil_scoped_release release;
  const std::lock_guard lock(engine_mutex());
  if (engine_) engine_->discard();  // ends leases
  for (Unit& unit : units_) unit.lease.reset();
  scope_.reset();
  stream_ = {nullptr, kEngine};
  engine_.reset();  // the step that was decided is carried out, and committed with the others
  if (why_for_others != nullptr) runtime_->communicator().abort(*why_for_others);
  runtime_.reset();
  for (const Unit& unit : units_) {
    if (unit.window->is_open()) windows_->close(*unit.window);  // its gather failed; nothing writes to it any more
  }
}

int UnitManager::world_size_at_start() const {
  if (options_.make_channel) return options_.world_size;
  return options_.runtime.communicator == CommunicatorKind::self ? 1 : std::max(1, comm::mpi_size_of_launch());
}

// Gradient buffers get what they need, two if the largest window still fits beside them; windows get the rest.
void UnitManager::divide_memory() {
  RuntimeOptions& runtime = options_.runtime;
  const int world = world_size_at_start();
  const std::uint64_t budget = runtime.device_memory_bytes;
  const Prediction prediction = predict(runtime, options_.engine, model_, world);
  std::uint64_t largest = 0;
  for (const ManagedUnit& unit : options_.units) largest = std::max(largest, window_bytes_about(unit, world));
  std::uint64_t arena = prediction.device.bytes;
  if (arena + largest > budget) arena = prediction.device.least_bytes;
  if (arena + largest > budget) {
    throw BudgetError({.tier = "device",
                       .have_bytes = budget,
                       .need_bytes = round_up(arena + largest, kBlockAlignment),
                       .key = "hoist.device_memory",
                       .detail = "the largest unit's weights, one unit's gradient and states placed there"});
  }
  runtime.device_memory_bytes = round_up(std::max(arena, kBlockAlignment), kBlockAlignment);
  window_budget_ = round_down(budget - arena, kBlockAlignment);
}

void UnitManager::declare_model() {
  for (const GroupOptions& group : options_.groups) model_.add_group(group);
  const Binding binding{.bind =
                            [this](UnitId id, std::uint64_t, StreamRef) {
                              windows_->open(*units_[id.index].window);
                              return units_[id.index].window->data();
                            },
                        // The stream waits for whatever still reads the window: a secondary shard that is made of it.
                        .unbind =
                            [this](UnitId id, StreamRef stream) {
                              stream->synchronize();
                              windows_->close(*units_[id.index].window);
                            }};
  for (const ManagedUnit& unit : options_.units) model_.add_unit(unit.name, unit.parameters, {.binding = binding});
}

void UnitManager::open_runtime() {
  const nb::gil_scoped_release release;
  if (options_.make_channel) {
    runtime_ = std::make_unique<Runtime>(options_.runtime, [this](const comm::CommunicatorOptions& comm) {
      const std::shared_ptr<comm::Transport> control = options_.make_channel();
      return comm::make_over("torch.distributed", control->duplicate(), control, comm);
    });
  } else {
    runtime_ = std::make_unique<Runtime>(options_.runtime);
  }
  stream_ = {runtime_->device().create_stream("torch"), kEngine};
}

// Once: parameters keep their addresses for good.
void UnitManager::make_windows() {
  places_ = gathered_layout(options_.engine, model_, runtime_->world_size());
  std::uint64_t total = 0;
  for (const ModelUnit& unit : model_.units()) total += place(unit.parameters.front()).unit_bytes;
  windows_ = std::make_unique<Windows>(window_budget_, total);
  for (std::uint32_t u = 0; u < model_.units().size(); ++u) {
    const ModelUnit& declared = model_.units()[u];
    Unit& unit = units_.emplace_back(
        Unit{.id = UnitId{u}, .window = windows_->make(place(declared.parameters.front()).unit_bytes)});
    unit.shared = options_.units[u].shared;
    for (const ParameterSpec& spec : options_.units[u].parameters) {
      unit.trainable += spec.trainable ? 1 : 0;
      unit.has_frozen = unit.has_frozen || !spec.trainable;
    }
  }
  has_arrived_.resize(model_.parameters().size());
}

void UnitManager::know_types(nb::object fp32, nb::object bf16, nb::object fp16) {
  fp32_ = std::move(fp32);
  bf16_ = std::move(bf16);
  fp16_ = std::move(fp16);
}

// --- up and down -----------------------------------------------------------------------------------------------------

void UnitManager::load(Unit& unit) {
  if (!is_open()) throw UsageError("the engine was closed, and the model's weights with it");
  unit.last_use = ++clock_;
  if (unit.lease) return;
  Engine& live = engine();
  make_room(unit);
  const nb::gil_scoped_release release;
  const std::lock_guard lock(engine_mutex());
  unit.lease.emplace(live.gather(unit.id, *stream_));
  stream_->synchronize();  // PyTorch computes on this thread, not on the stream
}

void UnitManager::unload(Unit& unit) {
  if (!unit.lease) return;
  const nb::gil_scoped_release release;
  const std::lock_guard lock(engine_mutex());
  Lease lease = std::move(*unit.lease);
  unit.lease.reset();
  lease.release(*stream_);
}

// What was used longest ago goes first: of the units that a forward pass has left behind, the backward pass needs that
// one last.
void UnitManager::make_room(const Unit& wanted) {
  while (!windows_->fits(wanted.window->bytes())) {
    Unit* oldest = nullptr;
    for (Unit& unit : units_) {
      if (unit.lease && unit.holds == 0 && (oldest == nullptr || unit.last_use < oldest->last_use)) oldest = &unit;
    }
    if (oldest == nullptr) {
      const std::uint64_t have = options_.runtime.device_memory_bytes + window_budget_;
      const std::uint64_t missing = windows_->open_bytes() + wanted.window->bytes() - window_budget_;
      throw BudgetError({.tier = "device",
                         .have_bytes = have,
                         .need_bytes = have + missing,
                         .key = "hoist.device_memory",
                         .detail = fmt::format("the weights of unit '{}' beside those of the units in use",
                                               model_.units()[wanted.id.index].name)});
    }
    unload(*oldest);
    ++evictions_;
  }
}

void UnitManager::hold(Unit& unit) {
  load(unit);  // first: it may throw, and then nothing has happened
  ++unit.holds;
}

void UnitManager::enter(std::uint32_t index) {
  Unit& unit = units_[index];
  if (unit.in_backward) return load(unit);  // computed once more, under the hold of its backward pass
  hold(unit);
  ++unit.entered;
}

void UnitManager::leave(std::uint32_t index) {
  Unit& unit = units_[index];
  if (unit.entered == 0) return;
  --unit.entered;
  --unit.holds;
}

// --- passes ----------------------------------------------------------------------------------------------------------

void UnitManager::begin(Pass pass, PassOptions options) {
  if (pass_) throw UsageError("a pass is already under way");
  if (!is_open()) throw UsageError("the engine was closed, and the model's weights with it");
  {
    Engine& live = engine();
    const nb::gil_scoped_release release;
    const std::lock_guard lock(engine_mutex());
    scope_.emplace(live.begin(pass, options));
  }
  pass_ = pass;
  evictions_ = 0;
}

void UnitManager::forget_pass() {
  pass_.reset();
  arrived_count_ = 0;
  has_arrived_.assign(has_arrived_.size(), false);
  for (Unit& unit : units_) {
    unit.holds = unit.entered = 0;
    unit.in_backward = unit.finished = false;
    unit.arrived = unit.calls = unit.calls_done = 0;
  }
}

void UnitManager::end() {
  if (!pass_) return;
  for (Unit& unit : units_) unload(unit);
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(engine_mutex());
    scope_.reset();
    stream_->synchronize();
  }
  collecting_ = {};
  adding_ = {};
  forget_pass();
}

void UnitManager::discard() {
  if (!engine_ || !process_.is_this()) return;
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(engine_mutex());
    for (Unit& unit : units_) unit.lease.reset();
    engine_->discard();
    scope_.reset();
    try {
      stream_->synchronize();
    } catch (...) {  // whatever ended the pass is on its way already
    }
  }
  collecting_ = {};
  adding_ = {};
  forget_pass();
}

// --- gradients -------------------------------------------------------------------------------------------------------

void UnitManager::backward(std::uint32_t index) {
  Unit& unit = units_[index];
  if (!pass_) throw UsageError("a backward pass whose forward pass was given up, or whose step was done already");
  if (unit.in_backward) return load(unit);
  hold(unit);
  unit.in_backward = true;
}

void UnitManager::backward_of_call(std::uint32_t index) {
  if (!units_[index].in_backward) ++units_[index].calls;
}

void UnitManager::input_arrived(std::uint32_t index, bool last) {
  Unit& unit = units_[index];
  ++unit.calls_done;
  end_use(unit);
  // What has not come by now had no part in the result. Of a unit that was called twice only the last call knows.
  if (last && !unit.shared && !unit.finished && unit.arrived > 0 && unit.calls_done >= unit.calls) finish(unit);
}

void UnitManager::end_use(Unit& unit) {
  if (!std::exchange(unit.in_backward, false)) return;
  --unit.holds;
  if (unit.holds == 0) unload(unit);  // the next use is after the step, with other weights
}

DType UnitManager::type_of_gradient(nb::handle gradient, ParameterId parameter) const {
  const nb::object type = gradient.attr("dtype");
  if (type.is(fp32_)) return DType::fp32;
  if (type.is(bf16_)) return DType::bf16;
  if (type.is(fp16_)) return DType::fp16;
  throw UsageError(fmt::format("the gradient of '{}' is of a type that cannot be added up: {}",
                               model_.parameters()[parameter.index].name, nb::str(type).c_str()));
}

void UnitManager::arrived(ParameterId parameter, nb::handle tensor) {
  nb::object gradient = tensor.attr("grad");
  if (gradient.is_none()) return;
  tensor.attr("grad") = nb::none();
  Unit& unit = units_[place(parameter).unit.index];
  const ParameterSpec& spec = model_.parameters()[parameter.index];
  if (pass_ != Pass::train)
    throw UsageError(fmt::format("a gradient of '{}' arrived outside of a training pass", spec.name));
  if (unit.finished) {
    throw UsageError(
        fmt::format("a second gradient of '{}' arrived after its unit was finished: parts of the model that are "
                    "recomputed one by one (use_reentrant=True) share it; use torch.utils.checkpoint with "
                    "use_reentrant=False",
                    spec.name));
  }
  if (!nb::cast<bool>(gradient.attr("is_contiguous")())) gradient = gradient.attr("contiguous")();
  const auto address = nb::cast<std::uintptr_t>(gradient.attr("data_ptr")());
  const TensorView view{reinterpret_cast<void*>(address), type_of_gradient(gradient, parameter), spec.shape, 0};
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(engine_mutex());
    engine_->accumulate(parameter, view, *stream_);
  }
  collecting_.tensors.push_back(std::move(gradient));
  ++arrived_count_;
  if (has_arrived_[parameter.index]) return;
  has_arrived_[parameter.index] = true;
  if (++unit.arrived < unit.trainable || unit.shared) return;
  finish(unit);
  if (!unit.has_frozen) end_use(unit);
}

void UnitManager::finish(Unit& unit) {
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(engine_mutex());
    engine_->finish(unit.id, *stream_);
    collecting_.added = stream_->record();
    adding_.added.wait();
  }
  adding_ = std::exchange(collecting_, {});
  unit.finished = true;
}

void UnitManager::end_backward() {
  if (pass_ != Pass::train) throw UsageError("backward() without a forward pass before it");
  for (Unit& unit : units_) {
    if (unit.trainable > 0 && !unit.finished) finish(unit);
  }
  end();
}

}  // namespace hoist::python
