// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <hoist/config/config.hpp>
#include <hoist/interchange/import.hpp>
#include <hoist/interchange/safetensors_writer.hpp>

#include "bindings.hpp"
#include "channel.hpp"
#include "lift.hpp"
#include "tensor.hpp"

namespace hoist::python {

using namespace nb::literals;

namespace {

using FloatArray = nb::ndarray<float, nb::shape<-1>, nb::device::cpu, nb::c_contig>;
using ConstFloatArray = nb::ndarray<nb::ro, float, nb::shape<-1>, nb::device::cpu, nb::c_contig>;

std::span<const std::byte> bytes_of(const nb::bytes& state) {
  return {static_cast<const std::byte*>(state.data()), state.size()};
}

// --- initial values --------------------------------------------------------------------------------------------------

// A dense CPU tensor's memory, and what keeps it alive.
struct Values {
  const void* data = nullptr;
  DType dtype = DType::fp32;
  std::uint64_t count = 0;
};

void widen(const Values& values, std::uint64_t first, std::span<float> out) {
  if (first > values.count || out.size() > values.count - first)
    throw UsageError("an initial value has fewer elements than its parameter");
  switch (values.dtype) {
    case DType::fp32:
      std::copy_n(static_cast<const float*>(values.data) + first, out.size(), out.begin());
      return;
    case DType::bf16:
      std::transform(static_cast<const bf16*>(values.data) + first,
                     static_cast<const bf16*>(values.data) + first + out.size(), out.begin(), to_float);
      return;
    case DType::fp16:
      std::transform(static_cast<const std::uint16_t*>(values.data) + first,
                     static_cast<const std::uint16_t*>(values.data) + first + out.size(), out.begin(), fp16_to_float);
  }
}

// Values of one unit at a time: `unit_values(unit)` returns {parameter index: (address, type, count)} of tensors that
// it keeps alive until it is called for the next unit.
class UnitValues {
 public:
  UnitValues(Engine& engine, nb::callable unit_values) : engine_(engine), unit_values_(std::move(unit_values)) {}

  void fill(ParameterId parameter, std::uint64_t first, std::span<float> out) {
    Values values;
    {
      const std::lock_guard lock(mutex_);
      const std::uint32_t unit = engine_.place(parameter).unit.index;
      if (unit_ != unit) load(unit);
      const auto found = values_.find(parameter.index);
      if (found == values_.end())
        throw UsageError("no initial value for parameter '" + engine_.parameters()[parameter.index].name + "'");
      values = found->second;
    }
    // The pieces of a unit are filled before the next unit is asked for.
    widen(values, first, out);
  }

 private:
  void load(std::uint32_t unit) {
    const nb::gil_scoped_acquire acquire;
    values_.clear();
    const auto loaded = nb::cast<nb::dict>(unit_values_(unit));
    for (const auto [key, value] : loaded) {
      const auto entry = nb::cast<nb::tuple>(value);
      values_[nb::cast<std::uint32_t>(key)] = {reinterpret_cast<const void*>(nb::cast<std::uintptr_t>(entry[0])),
                                               nb::cast<DType>(entry[1]), nb::cast<std::uint64_t>(entry[2])};
    }
    unit_ = unit;
  }

  Engine& engine_;
  nb::callable unit_values_;
  std::mutex mutex_;
  std::optional<std::uint32_t> unit_;
  std::map<std::uint32_t, Values> values_;
};

void initialize(Lift& lift, nb::callable unit_values) {
  UnitValues values(lift.engine(), std::move(unit_values));
  lift.initialize(
      [&](ParameterId parameter, std::uint64_t first, std::span<float> out) { values.fill(parameter, first, out); });
}

void initialize_from(Lift& lift, const std::string& path, const std::map<std::string, std::string>& names,
                     bool allow_unused) {
  const interchange::ImportOptions options{.tensor_name =
                                               [&](const std::string& parameter) {
                                                 const auto found = names.find(parameter);
                                                 return found == names.end() ? parameter : found->second;
                                               },
                                           .allow_unused = allow_unused};
  lift.initialize(interchange::fill_from(path, lift.engine().parameters(), options));
}

// --- weights out -----------------------------------------------------------------------------------------------------

interchange::TensorType tensor_type(DType dtype) {
  constexpr std::array kTypes{interchange::TensorType::bf16, interchange::TensorType::f16,
                              interchange::TensorType::f32};
  return kTypes[static_cast<std::size_t>(dtype)];
}

void refuse_lost_range(const ParameterSpec& spec, DType dtype) {
  if (dtype != DType::fp16 || spec.dtype != DType::bf16) return;
  throw UsageError(
      fmt::format("parameter '{}' is bf16, of which fp16 would lose range; export as bf16 or fp32", spec.name));
}

// As the engine rounds for the forward pass.
void narrow(std::span<const float> masters, DType dtype, const ParameterSpec& spec, std::span<std::uint16_t> out) {
  if (dtype == DType::bf16) {
    std::ranges::transform(masters, out.begin(), [](float value) { return to_bf16(value).bits; });
    return;
  }
  for (std::size_t i = 0; i < masters.size(); ++i) {
    if (!master_is_committable(masters[i], DType::fp16)) {
      throw UsageError(fmt::format("parameter '{}' holds {}, which is too large for fp16; export as fp32 or bf16",
                                   spec.name, masters[i]));
    }
    out[i] = float_to_fp16(masters[i]);
  }
}

// [C] The engine's present masters as safetensors; rank 0 writes. Errors: UsageError for fp16 where a parameter has a
// larger range.
std::vector<std::string> export_model(Lift& lift, const std::string& directory, DType dtype,
                                      std::uint64_t shard_bytes_max) {
  using interchange::SafetensorsWriter;
  const nb::gil_scoped_release release;
  const std::lock_guard lock(lift.engine_mutex());
  Engine& engine = lift.engine();
  const std::span<const ParameterSpec> parameters = engine.parameters();
  std::vector<interchange::TensorSpec> tensors;
  for (const ParameterSpec& spec : parameters) {
    refuse_lost_range(spec, dtype);
    tensors.push_back({.name = spec.name, .type = tensor_type(dtype), .shape = {spec.shape.begin(), spec.shape.end()}});
  }
  std::optional<SafetensorsWriter> writer;
  if (engine.runtime().rank() == 0)
    writer.emplace(interchange::SafetensorsWriterOptions{.directory = directory, .shard_bytes_max = shard_bytes_max},
                   tensors);
  std::vector<float> values(kMiB);
  std::vector<std::uint16_t> narrowed(dtype == DType::fp32 ? 0 : values.size());
  for (std::uint32_t p = 0; p < tensors.size(); ++p) {
    std::uint64_t count = 1;
    for (const std::uint64_t extent : tensors[p].shape) count *= extent;
    for (std::uint64_t first = 0; first < count; first += values.size()) {
      const std::span part(values.data(), std::min<std::uint64_t>(values.size(), count - first));
      engine.read(ParameterId{p}, State::master, first, part);
      const std::span out(narrowed.data(), narrowed.empty() ? 0 : part.size());
      if (!out.empty()) narrow(part, dtype, parameters[p], out);  // on every rank: all refuse alike
      if (writer) writer->write(out.empty() ? std::as_bytes(part) : std::as_bytes(out));
    }
  }
  if (!writer) return {};
  writer->finish();
  return writer->files();
}

// --- the books -------------------------------------------------------------------------------------------------------

nb::dict books(Lift& lift) {
  Runtime& runtime = lift.engine().runtime();
  nb::dict result, links, apart, waits, tiers;
  for (std::size_t i = 0; i < kLinkCount; ++i) {
    const auto link = static_cast<Link>(i);
    links[link_name(link)] = runtime.ledger().totals(link).bytes;
    apart[link_name(link)] = runtime.ledger().totals(link, Ledger::Account::apart).bytes;
  }
  for (std::size_t i = 0; i + 1 < kWaitCauseCount; ++i) {
    const auto cause = static_cast<WaitCause>(i);
    waits[wait_cause_name(cause)] = std::chrono::duration<double>(runtime.ledger().waited(cause)).count();
  }
  const auto tier = [](std::uint64_t budget, std::uint64_t peak) {
    nb::dict entry;
    entry["budget_bytes"] = budget;
    entry["peak_bytes"] = peak;
    return entry;
  };
  tiers["device"] = tier(runtime.device_budget().limit_bytes() + lift.windows().budget_bytes(),
                         runtime.device_budget().peak_bytes() + lift.windows().peak_bytes());
  tiers["pinned"] = tier(runtime.pinned_budget().limit_bytes(), runtime.pinned_budget().peak_bytes());
  result["links"] = links;
  result["wire_in_group"] = lift.engine().wire_bytes_in_group();
  result["links_apart"] = apart;
  result["wait_seconds"] = waits;
  result["tiers"] = tiers;
  return result;
}

// --- hooks -----------------------------------------------------------------------------------------------------------

// Callables for PyTorch to call: no line of Python runs for a tensor in a step.
struct GradientHook {
  Lift* lift;
  ParameterId parameter;
  void operator()(nb::handle tensor) const { lift->arrived(parameter, tensor); }
};
struct BackwardHook {  // on the node that made a unit's output
  Lift* lift;
  std::uint32_t unit;
  void operator()(nb::args) const { lift->backward(unit); }
};
struct InputHook {  // on a unit's input: once for each call of the unit, whatever inputs it has
  Lift* lift;
  std::uint32_t unit;
  bool begins_graph;
  bool done = false;
  void operator()(nb::args) {
    if (!std::exchange(done, true) && lift->pass() == Pass::train) lift->input_arrived(unit, !begins_graph);
  }
};

void bind_hooks(nb::module_& module) {
  nb::class_<GradientHook>(module, "GradientHook").def("__call__", &GradientHook::operator(), "tensor"_a);
  nb::class_<BackwardHook>(module, "BackwardHook").def("__call__", &BackwardHook::operator(), "args"_a);
  nb::class_<InputHook>(module, "InputHook").def("__call__", &InputHook::operator(), "args"_a);
}

}  // namespace

void bind_lift(nb::module_& module) {
  bind_hooks(module);
  const auto keep = nb::keep_alive<0, 1>();

  nb::class_<LiftUnit>(module, "LiftUnit", "What is used together: a layer.")
      .def(
          "__init__",
          [](LiftUnit* self, std::string name, std::vector<ParameterSpec> parameters, bool shared) {
            new (self) LiftUnit{std::move(name), std::move(parameters), shared};
          },
          "name"_a, "parameters"_a, "shared"_a = false);

  nb::class_<Lift>(module, "Lift", nb::is_weak_referenceable(),
                   "The units of a PyTorch module, brought up and down as its hooks say.")
      .def(
          "__init__",
          [](Lift* self, const Config& config, const std::vector<GroupOptions>& groups,
             const std::vector<LiftUnit>& units, const std::optional<nb::callable>& make, int world_size) {
            LiftOptions options{.runtime = config.runtime,
                                .engine = config.engine,
                                .groups = groups,
                                .units = units,
                                .world_size = world_size};
            if (make) {
              options.make_channel = [make = *make] {
                const nb::gil_scoped_acquire acquire;
                return make_channel(make());
              };
            }
            new (self) Lift(std::move(options));
          },
          "config"_a, "groups"_a, "units"_a, "make_channel"_a = nb::none(), "world_size"_a = 0)
      .def(
          "memory",
          [](Lift& lift, std::uint32_t unit) {
            const auto window = lift.window(unit);
            auto* owner = new std::shared_ptr<Window>(window);
            const nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<Window>*>(p); });
            const std::size_t bytes = window->bytes();
            return nb::ndarray<nb::device::cpu, std::uint8_t, nb::shape<-1>>(window->data(), {bytes}, capsule);
          },
          "unit"_a, "The unit's window, as bytes: where its weights appear while it is up.")
      .def("close", &Lift::close)
      .def(
          "abandon", [](Lift& lift, const std::string& why) { lift.abandon(why); }, "why"_a,
          "For a program that ends by an error while other ranks may wait for it.")
      .def("know_types", &Lift::know_types, "fp32"_a, "bf16"_a, "fp16"_a)
      .def(
          "place",
          [](Lift& lift, const std::string& name) {
            const ParameterId id = lift.engine().parameter(name);
            const Engine::Place place = lift.engine().place(id);
            return nb::make_tuple(id.index, place.unit.index, place.offset_bytes);
          },
          "name"_a, "(parameter, unit, offset in the unit's window in bytes)")
      .def("initialize", &initialize, "unit_values"_a)
      .def("initialize_from", &initialize_from, "path"_a, "names"_a, "allow_unused"_a = false)
      .def("find_commit",
           [](Lift& lift) {
             const nb::gil_scoped_release release;
             return lift.engine().find_commit();
           })
      .def("find_kept",
           [](Lift& lift) {
             const nb::gil_scoped_release release;
             const std::lock_guard lock(lift.engine_mutex());
             std::vector<std::pair<std::string, std::uint64_t>> kept;
             for (const Engine::KeptStep& step : lift.engine().find_kept()) kept.emplace_back(step.name, step.step);
             return kept;
           })
      .def(
          "restore",
          [](Lift& lift, const std::string& from) {
            const RestoreReport report = lift.restore(from);
            const auto* state = reinterpret_cast<const char*>(report.caller_state.data());
            return std::make_pair(report.step, nb::bytes(state, report.caller_state.size()));
          },
          "from_"_a = "", "Continues from the newest commit, or from a kept step: (step, caller_state).")
      .def_prop_ro("is_alive", &Lift::is_alive)
      .def_prop_ro("is_open", &Lift::is_open, "Not closed yet.")
      .def(
          "begin",
          [](Lift& lift, Pass pass, int micro_batch, int micro_batches) {
            lift.begin(pass, {.micro_batch = micro_batch, .micro_batches = micro_batches});
          },
          "pass_"_a, "micro_batch"_a = 0, "micro_batches"_a = 1)
      .def("end", &Lift::end)
      .def("discard", &Lift::discard)
      .def_prop_ro("current_pass", &Lift::pass)
      .def("all_still_up", &Lift::all_still_up)
      .def("has_gradients", &Lift::has_gradients)
      .def("is_up", &Lift::is_up, "unit"_a)
      .def("enter", &Lift::enter, "unit"_a)
      .def("leave", &Lift::leave, "unit"_a)
      .def("share", &Lift::share, "unit"_a)
      .def("backward_of_call", &Lift::backward_of_call, "unit"_a)
      .def("end_backward", &Lift::end_backward)
      .def(
          "gradient_hook",
          [](Lift& lift, std::uint32_t p) {
            return GradientHook{&lift, ParameterId{p}};
          },
          "parameter"_a, keep)
      .def(
          "backward_hook",
          [](Lift& lift, std::uint32_t u) {
            return BackwardHook{&lift, u};
          },
          "unit"_a, keep)
      .def(
          "input_hook",
          [](Lift& lift, std::uint32_t u, bool begins) {
            return InputHook{&lift, u, begins};
          },
          "unit"_a, "begins_graph"_a, keep)
      .def(
          "step",
          [](Lift& lift, const nb::bytes& state) {
            const auto bytes = bytes_of(state);
            const nb::gil_scoped_release release;
            const std::lock_guard lock(lift.engine_mutex());
            return lift.engine().step({.caller_state = bytes});
          },
          "caller_state"_a)
      .def("settle",
           [](Lift& lift) {
             const nb::gil_scoped_release release;
             const std::lock_guard lock(lift.engine_mutex());
             lift.engine().settle();
           })
      .def(
          "set_learning_rate",
          [](Lift& lift, std::uint32_t group, double rate) { lift.engine().set_learning_rate(GroupId{group}, rate); },
          "group"_a, "learning_rate"_a)
      .def("loss_scale", [](Lift& lift) { return lift.engine().loss_scale(); })
      .def(
          "learning_rate", [](Lift& lift, std::uint32_t group) { return lift.engine().learning_rate(GroupId{group}); },
          "group"_a)
      .def(
          "read",
          [](Lift& lift, std::uint32_t parameter, State state, std::uint64_t first, const FloatArray& out) {
            const nb::gil_scoped_release release;
            const std::lock_guard lock(lift.engine_mutex());
            lift.engine().read(ParameterId{parameter}, state, first, {out.data(), out.size()});
          },
          "parameter"_a, "state"_a, "first_element"_a, "out"_a)
      .def(
          "write",
          [](Lift& lift, std::uint32_t parameter, State state, std::uint64_t first, const ConstFloatArray& values) {
            const nb::gil_scoped_release release;
            const std::lock_guard lock(lift.engine_mutex());
            lift.engine().write(ParameterId{parameter}, state, first, {values.data(), values.size()});
          },
          "parameter"_a, "state"_a, "first_element"_a, "values"_a)
      .def(
          "save",
          [](Lift& lift, const std::string& name, const nb::bytes& state) {
            const auto bytes = bytes_of(state);
            const nb::gil_scoped_release release;
            const std::lock_guard lock(lift.engine_mutex());
            return lift.engine().save(name, bytes);
          },
          "name"_a, "caller_state"_a)
      .def("export", &export_model, "directory"_a, "dtype"_a, "shard_bytes_max"_a)
      .def_prop_ro("rank", [](Lift& lift) { return lift.engine().runtime().rank(); })
      .def_prop_ro("world_size", [](Lift& lift) { return lift.engine().runtime().world_size(); })
      .def_prop_ro("step_count", [](Lift& lift) { return lift.engine().step_count(); })
      .def_prop_ro("committed_step", [](Lift& lift) { return lift.engine().committed_step(); })
      .def("formula_bytes", [](Lift& lift) { return lift.engine().formula_bytes(); })
      .def("describe", [](Lift& lift) { return lift.engine().describe(); })
      .def("books", &books)
      .def(
          "digest",
          [](Lift& lift, State state) {
            const nb::gil_scoped_release release;
            const std::lock_guard lock(lift.engine_mutex());
            return state_digest(lift.engine(), state);
          },
          "state"_a);
}

}  // namespace hoist::python
