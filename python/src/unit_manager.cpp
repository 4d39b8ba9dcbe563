// SPDX-License-Identifier: Apache-2.0
// Units up and down, passes and their gradients.
#include "unit_manager.hpp"

#include <utility>

#include <nanobind/ndarray.h>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>

#include "host_stream.hpp"
#include "interruption.hpp"

namespace hoist::python {

// --- up and down -----------------------------------------------------------------------------------------------------

// If the unit is up for the current stream already, this only looks through unit.uses, a list of one.
void UnitManager::load(Unit& unit) {
  require_awake();
  if (unit.is_up() && !unit.is_shown) show(unit);
  if (unit.is_up() && computes_on_host()) return;
  const platform::StreamRef stream = stream_of_weights();
  if (unit.is_used_on(stream)) return;
  const bool was_up = unit.is_up();
  while (true) {
    try {
      gather(unit, stream);
      break;
    } catch (const BudgetError&) {
      if (!give_way()) throw;
    }
  }
  if (was_up) return;
  unit.loaded_at = ++clock_;
  show(unit);
}

void UnitManager::gather(Unit& unit, platform::StreamRef stream) {
  const EngineTurn turn(engine_mutex());
  Engine& live = engine();
  unit.uses.push_back({&*stream, live.gather(unit.id, stream)});
  if (computes_on_host()) stream->synchronize();
}

platform::StreamRef UnitManager::current_stream() {
  const nb::object current = torch_.current_stream();
  platform::Stream* stream = nullptr;
  if (TorchHostStream* host = nullptr; nb::try_cast(current, host)) {
    stream = &host->stream();
  } else {
    const auto native = nb::cast<std::uintptr_t>(current);
    const auto [found, is_new] = borrowed_streams_.try_emplace(native, nullptr, kEngine);
    if (is_new) found->second = {runtime().device().borrow_stream(reinterpret_cast<void*>(native), "torch"), kEngine};
    stream = &*found->second;
  }
  return *stream;
}

platform::StreamRef UnitManager::stream_of_weights() {
  return computes_on_host() ? platform::StreamRef(*weights_stream_) : current_stream();
}

platform::StreamRef UnitManager::stream_of_gradients() {
  return computes_on_host() ? platform::StreamRef(*gradients_stream_) : current_stream();
}

// In the first step, two units that share memory may both turn out to be needed in the backward pass. The one that was
// loaded first gives its memory up: it waits for its last gradient, and has mostly been read by then. If it is read
// after all, it is loaded again, or PyTorch refuses the access. From the next pass on the two lie apart; or, if the
// memory for gathered weights is too small for that, they go on to share it while they are watched. In every step, a
// unit gives way whose inputs have their gradients: it only waits for gradients that may never come.
bool UnitManager::give_way() {
  Unit* first = nullptr;
  for (Unit& unit : units_) {
    const bool only_waits = unit.entered == 0 && unit.calls > 0 && unit.calls_done >= unit.calls;
    if (!learning_ && !watched_ && !only_waits) continue;
    if (unit.is_up() && unit.in_backward && (first == nullptr || unit.loaded_at < first->loaded_at)) first = &unit;
  }
  if (first == nullptr) return false;
  unload(*first);
  return gave_way_ = true;
}

// The unit's memory may be reused when each stream has done what is enqueued on it by now. The current stream is one of
// them even if no hook has seen it: it may have waited for a stream that uses the unit.
void UnitManager::unload(Unit& unit) {
  if (!unit.is_up()) return;
  hide(unit);
  const platform::StreamRef stream = stream_of_weights();
  const EngineTurn turn(engine_mutex());
  if (!unit.is_used_on(stream)) unit.uses.front().stream->wait(stream->record(), WaitCause::none);
  for (StreamUse& use : std::exchange(unit.uses, {})) use.lease.release(*use.stream);
}

// Opens the unit's tensors; they are made anew if the unit has moved.
void UnitManager::show(Unit& unit) {
  const ParameterId first = model_.units()[unit.id.index].parameters.front();
  auto* memory = static_cast<std::byte*>(unit.uses.front().lease.view(first).data) - place(first).offset_bytes;
  if (memory != unit.memory) {
    // Tensors of the program's may live longer than the engine, and keep the device's memory.
    using Owner = InOneProcess<std::shared_ptr<platform::Device>>;
    auto* owner = new Owner(std::make_unique<std::shared_ptr<platform::Device>>(runtime().shared_device()), kEngine);
    const nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<Owner*>(p); });
    const std::size_t bytes = place(first).unit_bytes;
    const nb::ndarray<std::uint8_t, nb::ndim<1>> array(memory, {bytes}, capsule, {}, nb::dtype<std::uint8_t>(),
                                                       torch_.dlpack_device_type, torch_.dlpack_device_id);
    torch_.bind(unit.id.index, array);
    unit.memory = memory;
  }
  unit.is_shown = true;
  try {
    torch_.open(unit.id.index);
  } catch (...) {  // interrupted, before or after it opened them
    hide(unit);
    throw;
  }
}

void UnitManager::hide(Unit& unit) noexcept {
  if (!std::exchange(unit.is_shown, false)) return;
  if (const std::string why = call_again_if_interrupted([&] { torch_.close(unit.id.index); }); !why.empty())
    log_warning("unit '{}' can still be read: {}", model_.units()[unit.id.index].name, why);
}

void UnitManager::close_unheld() noexcept {
  for (Unit& unit : units_)
    if (unit.holds == 0 && !unit.is_small) hide(unit);
}

void UnitManager::open() {
  for (Unit& unit : units_)
    if (unit.is_up() && !unit.is_shown) show(unit);
}

void UnitManager::hold(Unit& unit) {
  load(unit);  // first: it may throw, and then nothing has happened
  ++unit.holds;
}

void UnitManager::enter(std::uint32_t index) {
  hold(units_[index]);
  ++units_[index].entered;
}

void UnitManager::leave(std::uint32_t index) {
  Unit& unit = units_[index];
  if (unit.entered == 0) return;
  --unit.entered;
  --unit.holds;
  if (unit.holds == 0 && !unit.stays_up) unload(unit);
}

// --- passes ----------------------------------------------------------------------------------------------------------

void UnitManager::begin(Pass pass, PassOptions options) {
  if (pass_) throw UsageError("a pass is already under way");
  require_awake();
  gave_way_ = false;
  {
    const EngineTurn turn(engine_mutex());
    Engine& live = engine();
    scope_.emplace(live.begin(pass, options));
  }
  pass_ = pass;
}

void UnitManager::forget_pass() {
  pass_.reset();
  arrived_count_ = 0;
  walked_ = walks_again_ = false;
  recomputations_.clear();
  has_arrived_.assign(has_arrived_.size(), false);
  complete_.clear();
  gradient_places_taken_ = 0;
  for (Unit& unit : units_) {
    unit.holds = unit.entered = 0;
    unit.in_backward = unit.finished = unit.in_gradient_memory = false;
    unit.waiting.clear();
    unit.arrived = unit.calls = unit.calls_done = 0;
  }
}

void UnitManager::end() {
  if (!pass_) return;
  for (Unit& unit : units_) unload(unit);
  {
    const EngineTurn turn(engine_mutex());
    scope_.reset();
  }
  await_gradients();
  forget_pass();
}

// Until all that are kept are added up.
void UnitManager::await_gradients() {
  if (!computes_on_host()) return;
  {
    const EngineTurn turn(engine_mutex());
    gradients_stream_->synchronize();
  }
  collecting_ = {};
  adding_.clear();
}

void UnitManager::discard() {
  leave_pass([&] { engine_->discard(); });
}

bool UnitManager::discard_pass() {
  bool earlier_stay = false;
  if (pass_) leave_pass([&] { earlier_stay = engine_->discard_pass(); });
  return earlier_stay;
}

template <typename EndPass>
void UnitManager::leave_pass(EndPass end_pass) {
  if (!engine_ || !process_.is_this()) return;
  for (Unit& unit : units_) hide(unit);
  {
    const EngineTurn turn(engine_mutex());
    for (Unit& unit : units_) unit.uses.clear();
    end_pass();
    scope_.reset();
    try {
      if (computes_on_host()) gradients_stream_->synchronize();
    } catch (...) {  // whatever ended the pass is on its way already
    }
  }
  collecting_ = {};
  adding_.clear();
  forget_pass();
}

// --- gradients -------------------------------------------------------------------------------------------------------

void UnitManager::backward(std::uint32_t index) {
  Unit& unit = units_[index];
  if (!pass_) {
    throw UsageError(
        "backward() has no forward pass: that one was given up, or its step or its backward pass is over. Add the "
        "losses of a forward pass, and call backward() once");
  }
  walked_ = true;
  end_recomputations();
  if (unit.in_backward) return load(unit);
  hold(unit);
  unit.in_backward = true;
}

bool UnitManager::backward_of_call(std::uint32_t index) {
  if (units_[index].in_backward) return false;
  ++units_[index].calls;
  return true;
}

void UnitManager::recomputed_input_arrived(const Recomputation& recomputation, std::size_t inputs_left) {
  const auto begun = std::ranges::find(recomputations_, recomputation);
  if (inputs_left > 0) {
    if (begun == recomputations_.end()) recomputations_.push_back(recomputation);
    return;
  }
  if (begun != recomputations_.end()) recomputations_.erase(begun);
  input_arrived(recomputation.unit, Input::recomputed);
}

// Graph tasks are numbered as they begin, and one that is nested in another ends before the other goes on.
void UnitManager::end_recomputations() {
  if (recomputations_.empty()) return;
  const auto now = nb::cast<std::int64_t>(nb::module_::import_("torch._C").attr("_current_graph_task_id")());
  std::erase_if(recomputations_, [&](const Recomputation& recomputation) {
    if (now > recomputation.task) return false;
    input_arrived(recomputation.unit, Input::recomputed);
    return true;
  });
}

void UnitManager::input_arrived(std::uint32_t index, Input input) {
  Unit& unit = units_[index];
  ++unit.calls_done;
  if (is_vertical() || walks_again_) return;
  const bool last = input == Input::computed;
  const bool weights_done = unit.arrived == unit.trainable && (input == Input::recomputed || unit.trainable > 0);
  if (last || weights_done) end_use(unit);
  // A gradient that has not arrived by now had no part in the result. Only the last call of a unit can know that.
  if (last && !unit.shared && !unit.finished && unit.arrived > 0 && unit.calls_done >= unit.calls) complete(unit);
}

void UnitManager::end_use(Unit& unit) {
  if (!std::exchange(unit.in_backward, false)) return;
  --unit.holds;
  if (unit.holds == 0) unload(unit);  // the next use is after the step, with other weights
}

void UnitManager::end_unit(std::uint32_t index, bool is_complete) {
  Unit& unit = units_[index];
  end_use(unit);
  const bool ends_later = unit.shared || options_.units[index].own_gradient_memory;
  if (is_complete && !ends_later && !unit.finished && unit.arrived > 0) finish(unit);
}

void UnitManager::end_backward() {
  if (pass_ != Pass::train) throw UsageError("backward() without a forward pass before it");
  for (Unit& unit : units_) {
    if (unit.trainable > 0 && !unit.finished) complete(unit);
  }
  HOIST_ASSERT(complete_.empty(), "{} units have no memory for gradients", complete_.size());
  end();
  learning_ = false;
}

}  // namespace hoist::python
