// SPDX-License-Identifier: Apache-2.0
#include "tensor_steps.hpp"

#include <utility>

#include <hoist/core/dtype.hpp>

#include "unit_values.hpp"

namespace hoist::python {

namespace {

// The call only borrows its tensors. What PyTorch does with them on the calling thread waits for the work on the
// stream; what it does on a stream comes after it.
class EndOfWork {
 public:
  EndOfWork(UnitManager& unit_manager, platform::StreamRef stream)
      : stream_(unit_manager.computes_on_host() ? &*stream : nullptr) {}
  EndOfWork(const EndOfWork&) = delete;
  EndOfWork& operator=(const EndOfWork&) = delete;
  // The call's errors first.
  ~EndOfWork() {
    try {
      wait();
    } catch (...) {
    }
  }
  void wait() {
    if (platform::Stream* const stream = std::exchange(stream_, nullptr)) stream->synchronize();
  }

 private:
  platform::Stream* stream_;
};

void require_all(std::size_t given, const Model& model) {
  if (given != model.parameters().size()) throw UsageError("there has to be one tensor for each parameter");
}

void accumulate_all(Engine& engine, const std::vector<std::uintptr_t>& gradients, const std::vector<DType>& dtypes,
                    platform::StreamRef stream) {
  const PassScope pass = engine.begin(Pass::train);
  const Model& model = engine.model();
  for (std::uint32_t u = 0; u < model.units().size(); ++u) {
    for (const ParameterId p : model.units()[u].parameters) {
      if (gradients[p.index] == 0) continue;
      engine.accumulate(p,
                        {.data = reinterpret_cast<void*>(gradients[p.index]),
                         .dtype = dtypes[p.index],
                         .shape = model.parameters()[p.index].shape},
                        stream);
    }
    engine.finish(UnitId{u}, stream);
  }
}

// A pass of its own, under which the update of the step before is carried out, unit by unit.
void copy_all(Engine& engine, const std::vector<std::uintptr_t>& weights, platform::StreamRef stream) {
  const PassScope pass = engine.begin(Pass::evaluate);
  const Model& model = engine.model();
  for (std::uint32_t u = 0; u < model.units().size(); ++u) {
    Lease lease = engine.gather(UnitId{u}, stream);
    for (const ParameterId p : model.units()[u].parameters) {
      const TensorView view = lease.view(p);
      stream->copy(reinterpret_cast<std::byte*>(weights[p.index]), static_cast<const std::byte*>(view.data),
                   view.element_count() * dtype_bytes(view.dtype), platform::CopyKind::local);
    }
    lease.release(stream);
  }
}

bool rounds_to(float master, float value, DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return to_float(to_bf16(master)) == value;
    case DType::fp16:
      return fp16_to_float(float_to_fp16(master)) == value;
    case DType::fp32:
      break;
  }
  return master == value;
}

}  // namespace

StepReport step_tensors(UnitManager& unit_manager, const std::vector<std::uintptr_t>& gradients,
                        const std::vector<DType>& dtypes, const std::vector<std::uintptr_t>& weights,
                        std::span<const std::byte> caller_state) {
  for (const std::size_t given : {gradients.size(), dtypes.size(), weights.size()})
    require_all(given, unit_manager.model());
  const platform::StreamRef in = unit_manager.stream_of_gradients(), out = unit_manager.stream_of_weights();
  const EngineTurn turn(unit_manager.engine_mutex());
  Engine& engine = unit_manager.engine();
  StepReport report;
  {
    EndOfWork read(unit_manager, in);
    accumulate_all(engine, gradients, dtypes, in);
    try {
      report = engine.step({.caller_state = caller_state});
    } catch (const UsageError&) {
      engine.discard();  // the program calls step() again with the same gradients, or save()
      throw;
    }
    read.wait();
  }
  if (!report.applied) return report;
  EndOfWork written(unit_manager, out);
  copy_all(engine, weights, out);
  written.wait();
  return report;
}

void copy_weights(UnitManager& unit_manager, const std::vector<std::uintptr_t>& weights) {
  require_all(weights.size(), unit_manager.model());
  const platform::StreamRef out = unit_manager.stream_of_weights();
  const EngineTurn turn(unit_manager.engine_mutex());
  Engine& engine = unit_manager.engine();
  EndOfWork written(unit_manager, out);
  copy_all(engine, weights, out);
  written.wait();
}

void change_masters(UnitManager& unit_manager, nb::callable unit_values) {
  const Model& model = unit_manager.model();
  UnitValues values(model, std::move(unit_values));
  const EngineTurn turn(unit_manager.engine_mutex());
  Engine& engine = unit_manager.engine();
  const auto change = [&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    std::vector<float> given(out.size());
    values.fill(parameter, first, given);
    const DType dtype = model.parameters()[parameter.index].dtype;
    for (std::size_t i = 0; i < out.size(); ++i)
      if (!rounds_to(out[i], given[i], dtype)) out[i] = given[i];
  };
  raising([&] { engine.change_masters(change); }, values);
}

void replace_state(UnitManager& unit_manager, std::uint64_t step, nb::callable unit_masters, nb::callable unit_moments1,
                   nb::callable unit_moments2, const nb::bytes& caller_state) {
  const std::span state_bytes(static_cast<const std::byte*>(caller_state.data()), caller_state.size());
  UnitValues masters(unit_manager.model(), std::move(unit_masters));
  UnitValues moments1(unit_manager.model(), std::move(unit_moments1));
  UnitValues moments2(unit_manager.model(), std::move(unit_moments2));
  const EngineTurn turn(unit_manager.engine_mutex());
  Engine& engine = unit_manager.engine();
  const InitialState state{.masters = [&](ParameterId parameter, std::uint64_t first,
                                          std::span<float> out) { masters.fill(parameter, first, out); },
                           .moments =
                               [&](ParameterId parameter, State of, std::uint64_t first, std::span<float> out) {
                                 (of == State::moment1 ? moments1 : moments2).fill(parameter, first, out);
                               },
                           .step = step};
  raising([&] { engine.replace_state(state, state_bytes); }, masters, moments1, moments2);
}

}  // namespace hoist::python
