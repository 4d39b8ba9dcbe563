// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <hoist/config/config.hpp>
#include <hoist/interchange/export.hpp>
#include <hoist/interchange/import.hpp>
#include <hoist/interchange/safetensors_reader.hpp>
#include <hoist/interchange/safetensors_writer.hpp>

#include "bindings.hpp"
#include "channel.hpp"
#include "tensor.hpp"
#include "tensor_steps.hpp"
#include "unit_manager.hpp"
#include "unit_values.hpp"

namespace hoist::python {

using namespace nb::literals;

namespace {

std::span<const std::byte> bytes_of(const nb::bytes& state) {
  return {static_cast<const std::byte*>(state.data()), state.size()};
}

// --- initial values --------------------------------------------------------------------------------------------------

void initialize(UnitManager& unit_manager, nb::callable unit_values, const nb::bytes& caller_state) {
  UnitValues values(unit_manager.model(), std::move(unit_values));
  const InitialState state{.masters = [&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    values.fill(parameter, first, out);
  }};
  raising([&] { unit_manager.initialize(state, bytes_of(caller_state)); }, values);
}

void write_units(UnitManager& unit_manager, const std::vector<std::uint32_t>& units, nb::callable changes,
                 const std::optional<nb::bytes>& caller_state) {
  std::vector<UnitId> ids;
  for (const std::uint32_t unit : units) ids.push_back(UnitId{unit});
  std::optional<std::span<const std::byte>> state;
  if (caller_state) state = bytes_of(*caller_state);
  UnitWrites writes(std::move(changes));
  const EngineTurn turn(unit_manager.engine_mutex());
  raising(
      [&] {
        unit_manager.engine().write(
            ids, [&](UnitId unit) { return writes.of(unit); }, state);
      },
      writes);
}

// `values`: (address, bytes) of each.
std::vector<bool> overwrite_with_rank_0(UnitManager& unit_manager,
                                        const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& values) {
  std::vector<std::span<std::byte>> spans;
  for (const auto& [address, bytes] : values) spans.emplace_back(reinterpret_cast<std::byte*>(address), bytes);
  return unit_manager.overwrite_with_rank_0(spans);
}

// Asks values(parameter, state, first_element, out) for every piece of every state, so that nothing is held here.
void begin_at(UnitManager& unit_manager, const nb::callable& values, std::uint64_t step,
              const std::optional<std::tuple<double, std::uint64_t, std::uint32_t>>& loss_scale,
              const nb::bytes& caller_state) {
  const auto ask = [&](ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
    const nb::gil_scoped_acquire acquire;
    const nb::ndarray<nb::pytorch, float, nb::ndim<1>, nb::device::cpu> array(out.data(), {out.size()});
    values(parameter.index, state, first, nb::cast(array, nb::rv_policy::reference));
  };
  InitialState state{.masters = [&](ParameterId parameter, std::uint64_t first,
                                    std::span<float> out) { ask(parameter, State::master, first, out); },
                     .moments = ask,
                     .step = step};
  if (loss_scale) {
    const auto [scale, steps_without_overflow, hysteresis_left] = *loss_scale;
    state.loss_scale = {
        .scale = scale, .steps_without_overflow = steps_without_overflow, .hysteresis_left = hysteresis_left};
  }
  unit_manager.initialize(state, bytes_of(caller_state));
}

// A tensor of a safetensors file, or for one: the type as the format spells it.
using TypeAndShape = std::pair<std::string, std::vector<std::uint64_t>>;

std::map<std::string, TypeAndShape> tensors_in(const std::string& path) {
  std::map<std::string, TypeAndShape> tensors;
  const interchange::SafetensorsModel model(path);
  for (const auto& [name, tensor] : model.tensors())
    tensors[name] = {std::string(interchange::tensor_type_name(tensor.info->type)), tensor.info->shape};
  return tensors;
}

nb::bytes read_tensor(const std::string& path, const std::string& name) {
  const interchange::SafetensorsModel model(path);
  const auto* const tensor = model.find(name);
  if (tensor == nullptr) throw interchange::SafetensorsError(path, fmt::format("there is no tensor '{}'", name));
  std::vector<std::byte> bytes(tensor->info->bytes());
  tensor->read(0, bytes);
  return nb::bytes(bytes.data(), bytes.size());
}

// `aliases`: other names of parameters that are used under several. `others`: tensors that the files may have beside
// the parameters.
void initialize_from(UnitManager& unit_manager, const std::string& path,
                     const std::map<std::string, std::string>& aliases, const std::set<std::string>& others) {
  const auto names_of = [&](const std::string& parameter) {
    std::vector<std::string> names{parameter};
    for (const auto& [alias, name] : aliases)
      if (name == parameter) names.push_back(alias);
    return names;
  };
  unit_manager.initialize({.masters = interchange::fill_from(path, unit_manager.model().parameters(),
                                                             {.tensor_names = names_of, .others = others})});
}

// --- weights out -----------------------------------------------------------------------------------------------------

// A tensor of the program's: its name, type, shape and address in host memory.
using ProgramTensor = std::tuple<std::string, std::string, std::vector<std::uint64_t>, std::uintptr_t>;

// [C] The engine's present masters and tensors of the program's as safetensors; rank 0 writes. Files begin with the
// widest types, so that every tensor is aligned; `buffers` come in that order. `trained_only`: without frozen weights.
// Errors: UsageError for fp16 where a parameter has a larger range; those of rank 0's files, on every rank.
std::vector<std::string> export_model(UnitManager& unit_manager, const std::string& directory, DType dtype,
                                      std::uint64_t shard_bytes_max, const std::vector<ProgramTensor>& buffers,
                                      bool trained_only) {
  using interchange::SafetensorsWriter;
  const EngineTurn turn(unit_manager.engine_mutex());
  Engine& engine = unit_manager.engine();
  const std::span<const ParameterSpec> parameters = engine.model().parameters();
  std::vector<interchange::TensorSpec> tensors;
  std::vector<std::span<const std::byte>> wider, others;  // buffers: before the parameters, and after
  for (const auto& [name, type_name, shape, address] : buffers) {
    const auto type = interchange::find_tensor_type(type_name);
    if (!type) throw UsageError(fmt::format("'{}' is {}, which safetensors files cannot hold", name, type_name));
    const bool is_wider = interchange::tensor_type_bits(*type) >= 8 * dtype_bytes(dtype);
    (is_wider ? wider : others)
        .emplace_back(reinterpret_cast<const std::byte*>(address), interchange::tensor_bytes(*type, shape).value());
    tensors.push_back({.name = name, .type = *type, .shape = shape});
  }
  const auto first_parameter = tensors.begin() + static_cast<std::ptrdiff_t>(wider.size());
  std::vector<interchange::TensorSpec> of_parameters;
  const auto is_written = [&](const ParameterSpec& spec) { return spec.trainable || !trained_only; };
  for (const ParameterSpec& spec : parameters | std::views::filter(is_written)) {
    interchange::refuse_lost_range(spec.name, spec.dtype, dtype);
    of_parameters.push_back(
        {.name = spec.name, .type = interchange::tensor_type(dtype), .shape = {spec.shape.begin(), spec.shape.end()}});
  }
  tensors.insert(first_parameter, of_parameters.begin(), of_parameters.end());
  std::optional<SafetensorsWriter> writer;
  std::exception_ptr failure;
  // Once it fails, masters are still read: the other ranks do.
  const auto on_first_rank = [&](const auto& work) {
    if (engine.runtime().rank() != 0 || failure) return;
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
  };
  const auto share_failure = [&] {
    const std::string first = unit_manager.first_problem(failure ? text_of(failure) : "");
    if (failure) std::rethrow_exception(failure);
    if (!first.empty()) throw Error(first);
  };
  on_first_rank([&] {
    writer.emplace(interchange::SafetensorsWriterOptions{.directory = directory, .shard_bytes_max = shard_bytes_max},
                   tensors);
  });
  share_failure();
  std::vector<float> values(kMiB);
  std::vector<std::byte> narrowed(dtype == DType::fp32 ? 0 : 2 * values.size());
  const auto write = [&](std::span<const std::byte> bytes) { on_first_rank([&] { writer->write(bytes); }); };
  std::ranges::for_each(wider, write);
  for (std::uint32_t p = 0; p < parameters.size(); ++p) {
    if (!is_written(parameters[p])) continue;
    const std::uint64_t count = element_count(parameters[p]);
    for (std::uint64_t first = 0; first < count; first += values.size()) {
      const std::span part(values.data(), std::min<std::uint64_t>(values.size(), count - first));
      engine.read(ParameterId{p}, State::master, first, part);
      std::span<const std::byte> out = std::as_bytes(part);
      if (dtype != DType::fp32) {  // on every rank: all refuse alike
        interchange::narrow(part, dtype, parameters[p].name, narrowed.data());
        out = std::span(narrowed).first(2 * part.size());
      }
      write(out);
    }
  }
  std::ranges::for_each(others, write);
  on_first_rank([&] { writer->finish(); });
  share_failure();
  return writer ? writer->files() : std::vector<std::string>();
}

// --- statistics ------------------------------------------------------------------------------------------------------

nb::dict statistics(UnitManager& unit_manager) {
  Runtime& runtime = unit_manager.runtime();
  nb::dict result, links, apart, waits, tiers;
  for (std::size_t i = 0; i < kLinkCount; ++i) {
    const auto link = static_cast<Link>(i);
    links[link_name(link)] = runtime.ledger().totals(link).bytes;
    apart[link_name(link)] = runtime.ledger().totals(link, Ledger::Account::outside_steps).bytes;
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
  tiers["device"] = tier(runtime.device_budget().limit_bytes(), runtime.device_budget().peak_bytes());
  tiers["pinned"] = tier(runtime.pinned_budget().limit_bytes(), runtime.pinned_budget().peak_bytes());
  result["links"] = links;
  result["wire_in_group"] = unit_manager.engine().wire_bytes_in_group();
  result["links_apart"] = apart;
  result["wait_seconds"] = waits;
  result["tiers"] = tiers;
  return result;
}

// --- hooks -----------------------------------------------------------------------------------------------------------

// Callables for PyTorch to call: no line of Python runs for a tensor in a step.
struct GradientHook {
  UnitManager* unit_manager;
  ParameterId parameter;
  void operator()(nb::handle tensor) const { unit_manager->arrived(parameter, tensor); }
};
struct BackwardHook {  // on the node that made a unit's output
  UnitManager* unit_manager;
  std::uint32_t unit;
  void operator()(nb::args) const { unit_manager->backward(unit); }
};
struct InputHook {  // on inputs of one call of a unit
  UnitManager* unit_manager;
  std::uint32_t unit;
  UnitManager::Input input;
  std::int64_t task;
  std::size_t inputs_left;
  void operator()(nb::args) {
    if (inputs_left == 0 || unit_manager->pass() != Pass::train) return;
    --inputs_left;
    if (input == UnitManager::Input::recomputed) {
      unit_manager->recomputed_input_arrived({unit, task, this}, inputs_left);
    } else {
      unit_manager->input_arrived(unit, input);
    }
  }
};

void bind_hooks(nb::module_& module) {
  nb::class_<GradientHook>(module, "GradientHook").def("__call__", &GradientHook::operator(), "tensor"_a);
  nb::class_<BackwardHook>(module, "BackwardHook").def("__call__", &BackwardHook::operator(), "args"_a);
  nb::class_<InputHook>(module, "InputHook").def("__call__", &InputHook::operator(), "args"_a);
}

}  // namespace

void bind_unit_manager(nb::module_& module) {
  bind_hooks(module);
  module.def("tensors_in", &tensors_in, "path"_a,
             "The (type, shape) of every tensor of a safetensors file, an index or a directory, by name.");
  module.def("read_tensor", &read_tensor, "path"_a, "name"_a, "Its bytes.");
  const auto keep = nb::keep_alive<0, 1>();

  nb::class_<ManagedUnit>(module, "ManagedUnit", "What is used together: a layer.")
      .def(
          "__init__",
          [](ManagedUnit* self, std::string name, std::vector<ParameterSpec> parameters, bool shared,
             std::vector<std::uint32_t> gathered_with, bool own_gradient_memory) {
            new (self) ManagedUnit{std::move(name), std::move(parameters), shared, std::move(gathered_with),
                                   own_gradient_memory};
          },
          "name"_a, "parameters"_a, "shared"_a = false, "gathered_with"_a = std::vector<std::uint32_t>(),
          "own_gradient_memory"_a = false)
      .def_ro("name", &ManagedUnit::name)
      .def_ro("parameters", &ManagedUnit::parameters)
      .def_ro("gathered_with", &ManagedUnit::gathered_with)
      .def_ro("own_gradient_memory", &ManagedUnit::own_gradient_memory);

  nb::class_<UnitManager>(module, "UnitManager", nb::is_weak_referenceable(),
                          "The units of a PyTorch module, brought up and down as its hooks say.")
      .def(
          "__init__",
          [](UnitManager* self, const Config& config, const std::vector<GroupOptions>& groups,
             const std::vector<ManagedUnit>& units, const std::optional<nb::callable>& make, int world_size,
             const std::pair<int, int>& local_place, const std::optional<nb::callable>& make_job) {
            UnitManagerOptions options{.config = config, .groups = groups, .units = units, .world_size = world_size};
            std::tie(options.config.runtime.local_ranks, options.config.runtime.local_rank) = local_place;
            if (make) options.make_channel = channel_maker(*make);
            if (make_job) options.make_job_channel = channel_maker(*make_job);
            new (self) UnitManager(std::move(options));
          },
          "config"_a, "groups"_a, "units"_a, "make_channel"_a = nb::none(), "world_size"_a = 0,
          "local_place"_a = std::pair(0, -1), "make_job_channel"_a = nb::none(),
          "local_place: ranks on this machine and which of them this is, if no channel says; (0, -1): ask the "
          "launcher.")
      .def(
          "connect",
          [](UnitManager& unit_manager, nb::object bind, nb::object open, nb::object close, nb::object unbind,
             nb::object current_stream, std::int32_t dlpack_device_type, std::int32_t dlpack_device_id) {
            unit_manager.connect({std::move(bind), std::move(open), std::move(close), std::move(unbind),
                                  std::move(current_stream), dlpack_device_type, dlpack_device_id});
          },
          "bind"_a, "open"_a, "close"_a, "unbind"_a, "current_stream"_a.none(), "dlpack_device_type"_a,
          "dlpack_device_id"_a,
          "PyTorch's side: bind(unit, memory), open(unit), close(unit) and unbind() are called from now on, and "
          "current_stream() wherever work is ordered by a stream of PyTorch's; None: PyTorch computes on the calling "
          "thread.")
      .def("close", &UnitManager::close)
      .def(
          "abandon", [](UnitManager& unit_manager, const std::string& why) { unit_manager.abandon(why); }, "why"_a,
          "For a program that ends by an error while other ranks may wait for it.")
      .def(
          "place",
          [](UnitManager& unit_manager, const std::string& name) {
            const ParameterId id = unit_manager.model().parameter(name);
            const ParameterPlace& place = unit_manager.place(id);
            return nb::make_tuple(id.index, place.offset_bytes);
          },
          "name"_a, "(parameter, offset in the unit's memory in bytes)")
      .def("initialize", &initialize, "unit_values"_a, "caller_state"_a = nb::bytes("", 0))
      .def(
          "same_on_all",
          [](UnitManager& unit_manager, const std::string& text, bool of_job) {
            using enum UnitManager::Among;
            return unit_manager.same_on_all(text, of_job ? job : sharding_group);
          },
          "text"_a, "of_job"_a = false, "[C] Whether every rank passes the same: of the sharding group, or of the job.")
      .def(
          "first_problem",
          [](UnitManager& unit_manager, const std::string& mine, bool of_job) {
            using enum UnitManager::Among;
            const EngineTurn turn(unit_manager.engine_mutex());
            return unit_manager.first_problem(mine, of_job ? job : sharding_group);
          },
          "mine"_a, "of_job"_a = false,
          "[C] After work that single ranks do: what it failed with on the first rank that passes something, or "
          "nothing.")
      .def("overwrite_with_rank_0", &overwrite_with_rank_0, "values"_a,
           "[C] Gives every rank the bytes of the first one, wherever another rank has others; returns where that was "
           "so. "
           "values: (address, bytes) of each, as many of the same lengths on each rank.")
      .def("initialize_from", &initialize_from, "path"_a, "aliases"_a, "others"_a)
      .def("begin_at", &begin_at, "values"_a, "step"_a, "loss_scale"_a, "caller_state"_a,
           "Begins with what another program's training came to: values(parameter, state, first_element, out) fills a "
           "tensor. loss_scale: None, or (scale, steps without an overflow, overflows until it is lowered).")
      .def("find_commit", &UnitManager::find_commit)
      .def("find_checkpoints",
           [](UnitManager& unit_manager) {
             std::vector<std::pair<std::string, std::uint64_t>> checkpoints;
             for (const NamedCheckpoint& step : unit_manager.find_checkpoints())
               checkpoints.emplace_back(step.name, step.step);
             return checkpoints;
           })
      .def(
          "require_commit",
          [](UnitManager& unit_manager, const std::string& from) {
            const EngineTurn turn(unit_manager.engine_mutex());
            unit_manager.require_commit(from);
          },
          "from_"_a, "[C] Errors: StoreError if there is no such commit or checkpoint; UsageError without a store.")
      .def(
          "restore",
          [](UnitManager& unit_manager, const std::string& from) {
            const RestoreReport report = unit_manager.restore(from);
            const auto* state = reinterpret_cast<const char*>(report.caller_state.data());
            return std::make_pair(report.step, nb::bytes(state, report.caller_state.size()));
          },
          "from_"_a = "", "Continues from the newest commit, or from a named checkpoint: (step, caller_state).")
      .def(
          "sleep", [](UnitManager& unit_manager, const nb::bytes& state) { unit_manager.sleep(bytes_of(state)); },
          "caller_state"_a, "Commits, and gives back memory, threads and the store.")
      .def("wake", &UnitManager::wake, "Goes on where sleep() ended.")
      .def_prop_ro("is_asleep", &UnitManager::is_asleep)
      .def("require_awake", &UnitManager::require_awake, "Errors: UsageError when it was closed, or sleeps.")
      .def("require_process", &UnitManager::require_process, "Errors: UsageError in a process that was forked later.")
      .def_prop_ro("is_alive", &UnitManager::is_alive)
      .def_prop_ro("has_begun_step", &UnitManager::has_begun_step,
                   "Update mode `backward`: units were updated for a step that step() has not taken.")
      .def_prop_ro("is_open", &UnitManager::is_open, "Not closed yet.")
      .def(
          "begin",
          [](UnitManager& unit_manager, Pass pass, int micro_batch, int micro_batches) {
            unit_manager.begin(pass, {.micro_batch = micro_batch, .micro_batches = micro_batches});
          },
          "pass_"_a, "micro_batch"_a = 0, "micro_batches"_a = 1)
      .def("end", &UnitManager::end)
      .def("discard", &UnitManager::discard)
      .def("discard_pass", &UnitManager::discard_pass)
      .def_prop_ro("current_pass", &UnitManager::pass)
      .def("keeps_all_up", &UnitManager::keeps_all_up)
      .def("has_gradients", &UnitManager::has_gradients)
      .def("walks_again", &UnitManager::walks_again)
      .def("walk_is_recorded", &UnitManager::walk_is_recorded)
      .def("is_up", &UnitManager::is_up, "unit"_a)
      .def("is_held", &UnitManager::is_held, "unit"_a)
      .def("watch_backward", &UnitManager::watch_backward, "watched"_a)
      .def("gave_way", &UnitManager::gave_way)
      .def("bring_back", &UnitManager::bring_back, "unit"_a)
      .def("close_unheld", &UnitManager::close_unheld)
      .def("open", &UnitManager::open)
      .def("enter", &UnitManager::enter, "unit"_a)
      .def("leave", &UnitManager::leave, "unit"_a)
      .def("share", &UnitManager::share, "unit"_a)
      .def("backward_of_call", &UnitManager::backward_of_call, "unit"_a)
      .def("end_part", &UnitManager::end_part, "Vertical order: a part of one micro-batch's backward pass is done.")
      .def("end_unit", &UnitManager::end_unit, "unit"_a, "is_complete"_a,
           "Vertical order: the unit's calls of a round have had their backward passes, of all micro-batches.")
      .def("end_backward", &UnitManager::end_backward)
      .def(
          "gradient_hook",
          [](UnitManager& unit_manager, std::uint32_t p) {
            return GradientHook{&unit_manager, ParameterId{p}};
          },
          "parameter"_a, keep)
      .def(
          "backward_hook",
          [](UnitManager& unit_manager, std::uint32_t u) {
            return BackwardHook{&unit_manager, u};
          },
          "unit"_a, keep)
      .def(
          "input_hook",
          [](UnitManager& unit_manager, std::uint32_t u, bool begins_graph, std::int64_t task, std::size_t inputs) {
            using enum UnitManager::Input;
            return InputHook{&unit_manager, u,
                             !begins_graph ? computed
                             : task != -1  ? recomputed
                                           : given,
                             task, inputs};
          },
          "unit"_a, "begins_graph"_a, "task"_a, "inputs"_a, keep,
          "For `inputs` of a call. task: the graph task that makes the call, for a recomputation; -1 for none.")
      .def("end_recomputations", &UnitManager::end_recomputations)
      .def(
          "step",
          [](UnitManager& unit_manager, const nb::bytes& state, double gradient_norm_max) {
            const auto bytes = bytes_of(state);
            const EngineTurn turn(unit_manager.engine_mutex());
            return unit_manager.engine().step({.caller_state = bytes, .gradient_norm_max = gradient_norm_max});
          },
          "caller_state"_a, "gradient_norm_max"_a = StepOptions{}.gradient_norm_max)
      .def(
          "gradient_norm",
          [](UnitManager& unit_manager) {
            const EngineTurn turn(unit_manager.engine_mutex());
            return unit_manager.engine().gradient_norm();
          },
          "The global norm of the gradients that step() will take. Waits for them.")
      .def(
          "step_tensors",
          [](UnitManager& unit_manager, const std::vector<std::uintptr_t>& gradients, const std::vector<DType>& dtypes,
             const std::vector<std::uintptr_t>& weights, const nb::bytes& state) {
            return step_tensors(unit_manager, gradients, dtypes, weights, bytes_of(state));
          },
          "gradients"_a, "dtypes"_a, "weights"_a, "caller_state"_a,
          "A step with gradients in the program's tensors, which leaves the new weights in others: addresses of dense "
          "tensors on the device, by parameter. A gradient of 0: none, as zeros.")
      .def("copy_weights", &copy_weights, "weights"_a, "The present weights, into the program's tensors.")
      .def("change_masters", &change_masters, "unit_values"_a,
           "Makes each value the master of its element, unless it is the master's rounding already.")
      .def("replace_state", &replace_state, "step"_a, "unit_masters"_a, "unit_moments1"_a, "unit_moments2"_a,
           "caller_state"_a, "As initialize(), with moments and the number of steps that they are of.")
      .def("settle",
           [](UnitManager& unit_manager) {
             const EngineTurn turn(unit_manager.engine_mutex());
             unit_manager.engine().settle();
           })
      .def(
          "set_learning_rate",
          [](UnitManager& unit_manager, std::uint32_t group, double rate) {
            unit_manager.engine().set_learning_rate(GroupId{group}, rate);
          },
          "group"_a, "learning_rate"_a)
      .def("loss_scale", [](UnitManager& unit_manager) { return unit_manager.engine().loss_scale(); })
      .def(
          "learning_rate",
          [](UnitManager& unit_manager, std::uint32_t group) {
            return unit_manager.engine().learning_rate(GroupId{group});
          },
          "group"_a)
      .def(
          "read",
          [](UnitManager& unit_manager, std::uint32_t parameter, State state, std::uint64_t first,
             const FloatArray& out) {
            const EngineTurn turn(unit_manager.engine_mutex());
            unit_manager.engine().read(ParameterId{parameter}, state, first, {out.data(), out.size()});
          },
          "parameter"_a, "state"_a, "first_element"_a, "out"_a.noconvert())
      .def(
          "write",
          [](UnitManager& unit_manager, std::uint32_t parameter, State state, std::uint64_t first,
             const ConstFloatArray& values) {
            const EngineTurn turn(unit_manager.engine_mutex());
            unit_manager.engine().write(ParameterId{parameter}, state, first, {values.data(), values.size()});
          },
          "parameter"_a, "state"_a, "first_element"_a, "values"_a)
      .def("write_units", &write_units, "units"_a, "changes"_a, "caller_state"_a.none(),
           "Changes states of these units, which ascend, in one commit. changes(unit): [(parameter, state, values, "
           "None or "
           "a byte for each value that says whether it is written)]; called twice.")
      .def(
          "save",
          [](UnitManager& unit_manager, const std::string& name, const nb::bytes& state, bool mirror) {
            const auto bytes = bytes_of(state);
            const EngineTurn turn(unit_manager.engine_mutex());
            return unit_manager.engine().save(name, bytes, {.mirror = mirror});
          },
          "name"_a, "caller_state"_a, "mirror"_a = false)
      .def("export", &export_model, "directory"_a, "dtype"_a, "shard_bytes_max"_a, "buffers"_a, "trained_only"_a)
      .def_prop_ro(
          "device_ordinal", [](UnitManager& unit_manager) { return unit_manager.runtime().options().device_ordinal; },
          "Which GPU.")
      .def_prop_ro(
          "local_rank", [](UnitManager& unit_manager) { return unit_manager.local_rank(); },
          "The launcher's if it is known, else which of the processes on this machine this is.")
      .def_prop_ro("rank", [](UnitManager& unit_manager) { return unit_manager.runtime().rank(); })
      .def_prop_ro("world_size", [](UnitManager& unit_manager) { return unit_manager.runtime().world_size(); })
      .def_prop_ro("step_count", [](UnitManager& unit_manager) { return unit_manager.engine().step_count(); })
      .def_prop_ro("committed_step", [](UnitManager& unit_manager) { return unit_manager.engine().committed_step(); })
      .def_prop_ro("mirrored_step", [](UnitManager& unit_manager) { return unit_manager.engine().mirror().step; })
      .def("formula_bytes", [](UnitManager& unit_manager) { return unit_manager.engine().formula_bytes(); })
      .def("describe", [](UnitManager& unit_manager) { return unit_manager.engine().describe(); })
      .def("statistics", &statistics)
      .def(
          "digest",
          [](UnitManager& unit_manager, State state) {
            const EngineTurn turn(unit_manager.engine_mutex());
            return state_digest(unit_manager.engine(), state);
          },
          "state"_a);
}

}  // namespace hoist::python
