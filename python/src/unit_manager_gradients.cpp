// SPDX-License-Identifier: Apache-2.0
// UnitManager's part for gradients: those of a unit wait until the engine has memory for them, are added up, and are
// finished when the last one has come.
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>

#include "unit_manager.hpp"

namespace hoist::python {

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
  type_of_gradient(gradient, parameter);
  gradient = gradient.attr("resolve_neg")();  // as of a conjugate's imaginary part, whose memory has the other sign
  if (!nb::cast<bool>(gradient.attr("is_contiguous")())) gradient = gradient.attr("contiguous")();
  unit.waiting.push_back({parameter, std::move(gradient), computes_on_host() ? nullptr : &*stream_of_gradients()});
  ++arrived_count_;
  const bool is_new = !has_arrived_[parameter.index];
  has_arrived_[parameter.index] = true;
  if (is_new && ++unit.arrived == unit.trainable && !unit.shared && !is_vertical()) {
    complete(unit);
    if (!unit.has_frozen || (unit.calls_done >= unit.calls && !walks_again_)) end_use(unit);
  } else if (may_wait_in_gradient_memory()) {
    add_up(unit);
  }
}

// A unit whose gradients come one by one never takes the last place: those that have all come could not be finished.
bool UnitManager::may_wait_in_gradient_memory() const {
  return !gradient_places_ || gradient_places_taken_ + 1 < *gradient_places_;
}

// Runs `use`, which takes memory for gradients of the unit. False, and nothing has happened, if other units have it
// all.
template <typename Use>
bool UnitManager::takes_gradient_memory(const Unit& unit, const std::string& name, Use use) {
  try {
    use();
    return true;
  } catch (const BudgetError&) {
    if (unit.in_gradient_memory) throw;
    note_refusal(name);
    return false;
  }
}

// False if other units have the memory for gradients; what was not added up then still waits.
bool UnitManager::add_up(Unit& unit) {
  for (Gradient& gradient : unit.waiting) {
    const std::string& name = model_.parameters()[gradient.parameter.index].name;
    if (!takes_gradient_memory(unit, name, [&] { add(gradient); })) return false;
    if (!std::exchange(unit.in_gradient_memory, true)) ++gradient_places_taken_;
    if (computes_on_host()) collecting_.tensors.push_back(std::move(gradient.tensor));
  }
  unit.waiting.clear();
  return true;
}

// Called while a BudgetError is handled, which goes on where waiting would not help.
void UnitManager::note_refusal(const std::string& parameter) {
  if (gradient_places_taken_ == 0) throw;
  if (is_vertical()) {
    throw UsageError(fmt::format(
        "in vertical order a gradient of '{}' arrived in the backward pass of other layers: micro-batches use "
        "different layers (early exit, routing to experts, varying repeats), layers that share weights are called in "
        "turns, or a tensor of its layer, kept in an attribute perhaps, leads to the loss beside what forward() "
        "returns. Return it from forward(), or use horizontal order",
        parameter));
  }
  if (!gradient_places_) {
    log_info(
        "gradients of more than {} units are made at once, such as that of '{}': they stay in PyTorch's memory until "
        "those of their unit are complete",
        gradient_places_taken_, parameter);
  }
  gradient_places_ = gradient_places_taken_;
}

void UnitManager::add(const Gradient& gradient) {
  const ParameterId parameter = gradient.parameter;
  const auto address = nb::cast<std::uintptr_t>(gradient.tensor.attr("data_ptr")());
  const TensorView view{reinterpret_cast<void*>(address), type_of_gradient(gradient.tensor, parameter),
                        model_.parameters()[parameter.index].shape, 0};
  const platform::StreamRef stream = stream_of_gradients();
  // The gradient may have had to wait until now. PyTorch reuses its memory in the order of the stream it was made on.
  const bool crosses = gradient.stream != nullptr && gradient.stream != &*stream;
  const EngineTurn turn(engine_mutex());
  if (crosses) stream->wait(gradient.stream->record(), WaitCause::none);
  engine_->accumulate(parameter, view, stream);
  if (crosses) gradient.stream->wait(stream->record(), WaitCause::none);
  if (computes_on_host()) collecting_.added = stream->record();
}

void UnitManager::complete(Unit& unit) {
  unit.finished = true;
  complete_.push_back(unit.id.index);
  if (!try_to_finish(unit)) return;
  complete_.pop_back();
  while (!complete_.empty() && try_to_finish(units_[complete_.front()])) complete_.pop_front();
}

bool UnitManager::try_to_finish(Unit& unit) {
  return add_up(unit) && takes_gradient_memory(unit, model_.units()[unit.id.index].name, [&] { finish(unit); });
}

void UnitManager::finish(Unit& unit) {
  const platform::StreamRef stream = stream_of_gradients();
  {
    const EngineTurn turn(engine_mutex());
    engine_->finish(unit.id, stream);
  }
  end_part();
  unit.finished = true;
  if (std::exchange(unit.in_gradient_memory, false)) --gradient_places_taken_;
}

void UnitManager::end_part() {
  if (!computes_on_host()) return;
  if (!adding_.empty()) {
    const nb::gil_scoped_release release;
    adding_.back().added.wait();
  }
  while (!adding_.empty() && adding_.front().added.reached()) adding_.pop_front();
  if (!collecting_.tensors.empty()) adding_.push_back(std::exchange(collecting_, {}));
}

}  // namespace hoist::python
