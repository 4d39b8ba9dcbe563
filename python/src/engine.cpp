// SPDX-License-Identifier: Apache-2.0
// The Engine as C++ programs see it, for Python programs with forward and backward passes of their own. hoist.torch
// does not need it.
//
// Everything runs on one stream of the host device. Arrays are DLPack tensors over device memory, which is CPU memory.
#include <functional>
#include <memory>
#include <optional>

#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <hoist/config/config.hpp>
#include <hoist/core/owning_process.hpp>
#include <hoist/zero/engine.hpp>

#include "bindings.hpp"
#include "interruption.hpp"
#include "tensor.hpp"

namespace hoist::python {

using namespace nb::literals;

namespace {

std::vector<std::size_t> shape_of(const TensorView& view) { return {view.shape.begin(), view.shape.end()}; }

// Arrays of Python are in CPU memory: the host device, unless the configuration names another.
RuntimeOptions on_host(RuntimeOptions options) {
  if (!options.device) options.device = platform::DeviceKind::host;
  return options;
}

// An engine with the runtime and the stream it works on.
class PyEngine {
 public:
  // `make`: Engine::create or Engine::restore.
  PyEngine(const Config& config, const std::function<Engine(Runtime&, const EngineOptions&)>& make)
      : runtime_(on_host(config.runtime)),
        engine_(make(runtime_, config.engine)),
        stream_(runtime_.device().create_stream("python"), "the engine") {}
  ~PyEngine() {
    const nb::gil_scoped_release release;
    scope_.reset();
  }

  Engine& engine() { return engine_; }
  platform::Stream& stream() { return *stream_; }

  void begin(Pass pass, PassOptions options) { scope_.emplace(engine_.begin(pass, options)); }
  void end() { scope_.reset(); }

 private:
  Runtime runtime_;
  Engine engine_;
  InOneProcess<platform::Stream> stream_;  // goes first: the engine's streams may wait for it
  std::optional<PassScope> scope_;
};

class PyLease {
 public:
  PyLease(PyEngine& engine, UnitId unit) : engine_(engine), lease_(engine.engine().gather(unit, engine.stream())) {
    engine_.stream().synchronize();
  }
  Array view(ParameterId parameter) {
    const TensorView view = lease_.view(parameter);
    const auto shape = shape_of(view);
    return Array(view.data, shape.size(), shape.data(), nb::handle(), nullptr, dlpack_type(view.dtype));
  }
  void release() { lease_.release(engine_.stream()); }

 private:
  PyEngine& engine_;
  Lease lease_;
};

// Asks a Python function: values(parameter, first_element, out). Borrows it, because copies of an Initializer may be
// made without the GIL.
Initializer initializer_of(const nb::callable& values) {
  return [&values](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    const nb::gil_scoped_acquire acquire;
    const nb::ndarray<nb::numpy, float, nb::shape<-1>, nb::device::cpu> array(out.data(), {out.size()});
    values(parameter, first, nb::cast(array, nb::rv_policy::reference));
  };
}

TensorView view_of(const ConstArray& array, std::vector<std::int64_t>& shape) {
  shape.assign(array.shape_ptr(), array.shape_ptr() + array.ndim());
  return {const_cast<void*>(array.data()), type_of(array.dtype()), shape, 0};
}

template <typename Id>
void bind_id(nb::module_& module, const char* name) {
  nb::class_<Id>(module, name)
      .def(nb::init<std::uint32_t>(), "index"_a)
      .def_ro("index", &Id::index)
      .def("__index__", [](Id id) { return id.index; })
      .def("__eq__", [](Id a, Id b) { return a == b; })
      .def("__hash__", [](Id id) { return id.index; })
      .def("__repr__", [name](Id id) { return std::string(name) + "(" + std::to_string(id.index) + ")"; });
}

void bind_words(nb::module_& module) {
  bind_id<UnitId>(module, "UnitId");
  bind_id<ParameterId>(module, "ParameterId");
  bind_id<GroupId>(module, "GroupId");
  nb::enum_<DType>(module, "DType").value("bf16", DType::bf16).value("fp16", DType::fp16).value("fp32", DType::fp32);
  nb::enum_<Pass>(module, "Pass")
      .value("train", Pass::train)
      .value("evaluate", Pass::evaluate)
      .value("generate", Pass::generate);
  nb::enum_<State>(module, "State")
      .value("master", State::master)
      .value("moment1", State::moment1)
      .value("moment2", State::moment2)
      .value("gradient", State::gradient);

  nb::class_<ParameterSpec>(module, "ParameterSpec", "A parameter as it is declared.")
      .def(
          "__init__",
          [](ParameterSpec* self, std::string name, std::vector<std::int64_t> shape, DType dtype, bool trainable,
             GroupId group, bool counts_in_norm) {
            new (self) ParameterSpec{.name = std::move(name),
                                     .shape = std::move(shape),
                                     .dtype = dtype,
                                     .trainable = trainable,
                                     .group = group,
                                     .counts_in_norm = counts_in_norm};
          },
          "name"_a, "shape"_a, "dtype"_a = DType::bf16, "trainable"_a = true, "group"_a = GroupId{},
          "counts_in_norm"_a = true)
      .def_ro("name", &ParameterSpec::name)
      .def_ro("shape", &ParameterSpec::shape)
      .def_ro("dtype", &ParameterSpec::dtype)
      .def_ro("trainable", &ParameterSpec::trainable)
      .def_ro("group", &ParameterSpec::group);

  nb::class_<Completion>(module, "Completion", "Something that can be seen to finish.")
      .def("done", &Completion::done)
      .def("wait", &wait_for, "Blocks, without the GIL; raises what went wrong.");

  nb::class_<StepReport>(module, "StepReport", "What a step did.")
      .def_ro("step", &StepReport::step, "Counted from 1; unchanged when not applied.")
      .def_ro("applied", &StepReport::applied, "False: a gradient was not finite, and the step was skipped.")
      .def_ro("gradient_norm", &StepReport::gradient_norm, "Global, before clipping.")
      .def_ro("clip_factor", &StepReport::clip_factor)
      .def_ro("loss_scale", &StepReport::loss_scale, "What this step's losses were multiplied by.")
      .def_ro("learning_rate", &StepReport::learning_rate)
      .def_ro("committed", &StepReport::committed, "Done when the step is durable.");

  nb::class_<StepBytes>(module, "StepBytes", "Bytes one step moves over each link.")
      .def_ro("nvme_read", &StepBytes::nvme_read)
      .def_ro("nvme_write", &StepBytes::nvme_write)
      .def_ro("host_to_device", &StepBytes::host_to_device)
      .def_ro("device_to_host", &StepBytes::device_to_host)
      .def_ro("wire", &StepBytes::wire);
}

}  // namespace

void bind_engine(nb::module_& module) {
  bind_words(module);
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();

  nb::class_<PyLease>(module, "Lease", "Gathered weights of a unit, until released or the pass ends.")
      .def("view", &PyLease::view, "parameter"_a, nb::rv_policy::reference_internal,
           "The whole parameter as a DLPack array; valid until release().")
      .def("release", &PyLease::release, no_gil)
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](PyLease& self, const nb::args&) { self.release(); });

  nb::class_<Model>(module, "Model", "What is trained: units (layers) and their parameters, optimizer groups, ties.")
      .def(nb::init<>())
      .def(
          "add_group", [](Model& m, const std::optional<GroupOptions>& options) { return m.add_group(options); },
          "options"_a = nb::none())
      .def(
          "add_unit",
          [](Model& m, std::string name, const std::vector<ParameterSpec>& parameters) {
            return m.add_unit(std::move(name), parameters);
          },
          "name"_a, "parameters"_a)
      .def("tie", &Model::tie, "user"_a, "owner"_a)
      .def(
          "parameter", [](const Model& m, const std::string& name) { return m.parameter(name); }, "name"_a)
      .def_prop_ro("parameters", [](const Model& m) {
        return std::vector<ParameterSpec>(m.parameters().begin(), m.parameters().end());
      });

  nb::class_<PyEngine>(module, "Engine", "ZeRO-partitioned training state on three tiers.")
      .def_static(
          "create",
          [](const Config& config, const Model& model, const nb::callable& values) {
            const Initializer initializer = initializer_of(values);
            const nb::gil_scoped_release release;
            return std::make_unique<PyEngine>(config, [&](Runtime& runtime, const EngineOptions& options) {
              return Engine::create(runtime, options, model, initializer);
            });
          },
          "config"_a, "model"_a, "values"_a,
          "An engine with fresh state: values(parameter, first_element, out) writes into the array `out`.")
      .def_static(
          "restore",
          [](const Config& config, const Model& model, const std::string& from) {
            return std::make_unique<PyEngine>(config, [&](Runtime& runtime, const EngineOptions& options) {
              return Engine::restore(runtime, options, model, {.from = from});
            });
          },
          "config"_a, "model"_a, "from_"_a = "", no_gil,
          "An engine that continues from the newest commit, or from a named checkpoint.")
      .def_static(
          "find_commit",
          [](const Config& config) {
            Runtime runtime(on_host(config.runtime));
            return Engine::find_commit(runtime, config.engine);
          },
          "config"_a, no_gil)
      .def_static(
          "find_checkpoints",
          [](const Config& config) {
            Runtime runtime(on_host(config.runtime));
            std::vector<std::pair<std::string, std::uint64_t>> checkpoints;
            for (const NamedCheckpoint& step : Engine::find_checkpoints(runtime, config.engine))
              checkpoints.emplace_back(step.name, step.step);
            return checkpoints;
          },
          "config"_a, no_gil, "Named checkpoints, oldest first: [(name, step)].")
      .def_prop_ro(
          "restored",
          [](PyEngine& e) -> std::optional<std::pair<std::uint64_t, nb::bytes>> {
            const RestoreReport* const report = e.engine().restored();
            if (report == nullptr) return std::nullopt;
            const auto* state = reinterpret_cast<const char*>(report->caller_state.data());
            return std::make_pair(report->step, nb::bytes(state, report->caller_state.size()));
          },
          "(step, caller_state) that restore() continued from, or None.")
      .def_prop_ro("model", [](PyEngine& e) { return e.engine().model(); })
      .def(
          "parameter", [](PyEngine& e, const std::string& name) { return e.engine().parameter(name); }, "name"_a)
      .def(
          "begin",
          [](PyEngine& e, Pass pass, int micro_batch, int micro_batches) {
            e.begin(pass, {.micro_batch = micro_batch, .micro_batches = micro_batches});
          },
          "pass_"_a, "micro_batch"_a = 0, "micro_batches"_a = 1, no_gil)
      .def("end", &PyEngine::end, no_gil)
      .def(
          "discard", [](PyEngine& e) { e.engine().discard(); }, no_gil)
      .def(
          "gather", [](PyEngine& e, UnitId unit) { return std::make_unique<PyLease>(e, unit); }, "unit"_a,
          nb::keep_alive<0, 1>(), no_gil)
      .def(
          "accumulate",
          [](PyEngine& e, ParameterId parameter, const ConstArray& gradient) {
            std::vector<std::int64_t> shape;
            const TensorView view = view_of(gradient, shape);
            const nb::gil_scoped_release release;
            e.engine().accumulate(parameter, view, e.stream());
            e.stream().synchronize();
          },
          "parameter"_a, "gradient"_a)
      .def(
          "finish", [](PyEngine& e, UnitId unit) { e.engine().finish(unit, e.stream()); }, "unit"_a, no_gil)
      .def(
          "set_learning_rate",
          [](PyEngine& e, GroupId group, double rate) { e.engine().set_learning_rate(group, rate); }, "group"_a,
          "learning_rate"_a)
      .def(
          "step",
          [](PyEngine& e, const nb::bytes& state, double gradient_norm_max) {
            const std::span bytes(static_cast<const std::byte*>(state.data()), state.size());
            const nb::gil_scoped_release release;
            return e.engine().step({.caller_state = bytes, .gradient_norm_max = gradient_norm_max});
          },
          "caller_state"_a = nb::bytes("", 0), "gradient_norm_max"_a = StepOptions{}.gradient_norm_max)
      .def(
          "gradient_norm", [](PyEngine& e) { return e.engine().gradient_norm(); }, no_gil,
          "The global norm of the gradients that step() will take. Waits for them.")
      .def(
          "settle", [](PyEngine& e) { e.engine().settle(); }, no_gil)
      .def(
          "read",
          [](PyEngine& e, ParameterId parameter, State state, std::uint64_t first,
             nb::ndarray<float, nb::shape<-1>, nb::device::cpu, nb::c_contig> out) {
            const nb::gil_scoped_release release;
            e.engine().read(parameter, state, first, {out.data(), out.size()});
          },
          "parameter"_a, "state"_a, "first_element"_a, "out"_a.noconvert())
      .def(
          "write",
          [](PyEngine& e, ParameterId parameter, State state, std::uint64_t first,
             nb::ndarray<nb::ro, float, nb::shape<-1>, nb::device::cpu, nb::c_contig> values) {
            const nb::gil_scoped_release release;
            e.engine().write(parameter, state, first, {values.data(), values.size()});
          },
          "parameter"_a, "state"_a, "first_element"_a, "values"_a)
      .def(
          "save",
          [](PyEngine& e, const std::string& name, const nb::bytes& state, bool mirror) {
            const std::span bytes(static_cast<const std::byte*>(state.data()), state.size());
            const nb::gil_scoped_release release;
            return e.engine().save(name, bytes, {.mirror = mirror});
          },
          "name"_a, "caller_state"_a = nb::bytes("", 0), "mirror"_a = false)
      .def_prop_ro(
          "loss_scale", [](PyEngine& e) { return e.engine().loss_scale(); },
          "What losses are to be multiplied by until the next step.")
      .def_prop_ro("step_count", [](PyEngine& e) { return e.engine().step_count(); })
      .def_prop_ro("committed_step", [](PyEngine& e) { return e.engine().committed_step(); })
      .def_prop_ro(
          "mirrored_step", [](PyEngine& e) { return e.engine().mirror().step; },
          "The newest step that this engine knows to be whole in the mirror.")
      .def("formula_bytes", [](PyEngine& e) { return e.engine().formula_bytes(); })
      .def("describe", [](PyEngine& e) { return e.engine().describe(); })
      .def(
          "digest", [](PyEngine& e, State state) { return state_digest(e.engine(), state); }, "state"_a, no_gil);
}

}  // namespace hoist::python
