// SPDX-License-Identifier: Apache-2.0
#include <filesystem>

#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <hoist/comm/launch.hpp>
#include <hoist/config/config.hpp>
#include <hoist/config/key_table.hpp>
#include <hoist/config/plain_json.hpp>
#include <hoist/config/setting.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/free_memory.hpp>

#include "bindings.hpp"

namespace hoist::python {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// The value of a key in the file, for keys that concern the program and are no option of the engine. "auto" is none: it
// selects the default, as a key left out does.
nb::object setting(const Config& config, const std::string& path) {
  for (const ConfigSetting& row : config.settings()) {
    if (row.row == nullptr || row.row->path != path || row.source != ConfigSetting::Source::file) continue;
    return std::visit(
        [](const auto& value) -> nb::object {
          if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::monostate>)
            return nb::none();
          else
            return nb::cast(value);
        },
        row.value);
  }
  return nb::none();
}

}  // namespace

void bind_config(nb::module_& module) {
  module.def(
      "format_bytes", [](std::uint64_t bytes) { return format_bytes(bytes); }, "bytes"_a, "For people: \"1.5 GiB\".");
  module.def("usual_remedy", &usual_remedy, "code"_a,
             "What to do about an errno; \"\" where that depends on the operation.");
  module.def(
      "why_no_gpu",
      [] {
        std::string why;
        return platform::cuda_device_count(&why) > 0 ? std::string() : why;
      },
      "Why this process can use no GPU, part of a sentence; empty if it can.");
  module.def(
      "memory_id", [] { return platform::memory_id(); }, "Is the same for processes that divide one memory.");
  module.def(
      "launched_ranks",
      [] {
        const comm::Launch launch = comm::launch_of_process();
        return std::pair(launch.size, launch.local_rank);
      },
      "How many ranks the launcher announces (1: none did), and which of this machine's this one is (-1: not said).");
  module.def(
      "plain_json", [](const std::string& text) { return config::plain_json(text); }, "text"_a,
      "The text with spaces instead of comments and of commas too many.");

  module.def(
      "key_name",
      [](const std::string& path) -> std::optional<std::string> {
        const config::KeyRow* const row = config::find_key(path);
        return row == nullptr ? std::nullopt : std::optional(std::string(row->path));
      },
      "path"_a, "The first name of a configuration's key that has several, such as bf16 and bfloat16; None: unknown.");

  nb::class_<TrainingOptions>(module, "TrainingOptions", "What the program's own loop needs to know.")
      .def_ro("train_batch_size", &TrainingOptions::train_batch_size)
      .def_ro("train_micro_batch_size_per_gpu", &TrainingOptions::train_micro_batch_size_per_gpu)
      .def_ro("gradient_accumulation_steps", &TrainingOptions::gradient_accumulation_steps);

  nb::class_<Config>(module, "Config", "A DeepSpeed JSON file, understood or refused.")
      .def_static(
          "load",
          [](const std::string& path, bool trains) {
            return Config::load(path, trains ? RunLength::in_the_file : RunLength::left_to_the_trainer);
          },
          "path"_a, nb::kw_only(), "trains"_a = true,
          "`trains` False: a run length of \"auto\" is left to the trainer that will read the file. "
          "Errors: ConfigError with every problem of the file.")
      .def_static(
          "parse",
          [](const std::string& text, const std::string& origin, bool trains) {
            return Config::parse(text, origin, trains ? RunLength::in_the_file : RunLength::left_to_the_trainer);
          },
          "text"_a, "origin"_a = "config", nb::kw_only(), "trains"_a = true,
          "As load; `origin` names the text in messages.")
      .def_ro("training", &Config::training)
      .def("settle", &Config::settle, "world_size"_a,
           "Fills in the batch sizes that the others imply for so many ranks. Errors: ConfigError.")
      .def("copy", [](const Config& c) { return c; })
      .def("setting", &setting, "path"_a, "The file's own value of a key, None where it says none or \"auto\".")
      .def_ro("warnings", &Config::warnings)
      .def_prop_rw(
          "device",
          [](const Config& c) -> std::optional<std::string> {
            if (!c.runtime.device) return std::nullopt;
            return *c.runtime.device == platform::DeviceKind::cuda ? "cuda" : "host";
          },
          [](Config& c, const std::string& device) {
            if (device != "cuda" && device != "host")
              throw UsageError(fmt::format("Config.device takes \"cuda\" or \"host\", not \"{}\"", device));
            c.runtime.device = device == "cuda" ? platform::DeviceKind::cuda : platform::DeviceKind::host;
          },
          "Where weights are gathered: \"cuda\" or \"host\"; None where this machine decides.")
      .def_prop_ro(
          "gradient_clipping", [](const Config& c) { return c.engine.gradient_clipping; }, "Global norm; 0: none.")
      .def_prop_ro(
          "scales_losses",
          [](const Config& c) { return c.engine.loss_scale.dynamic || c.engine.loss_scale.scale != 1; },
          "Whether losses are to be multiplied by a loss scale (section fp16).")
      .def_prop_ro(
          "is_vertical", [](const Config& c) { return c.engine.micro_batch_order == MicroBatchOrder::vertical; },
          "Whether one pass holds all micro-batches of a step.")
      .def_prop_rw(
          "gradients_are_reduced", [](const Config& c) { return c.engine.gradients_are_reduced; },
          [](Config& c, bool reduced) { c.engine.gradients_are_reduced = reduced; },
          "Whether the program averages gradients over the ranks itself.")
      .def_prop_rw(
          "device_ordinal", [](const Config& c) { return c.runtime.device_ordinal; },
          [](Config& c, int ordinal) { c.runtime.device_ordinal = ordinal; }, "Which GPU; -1: by the local rank.")
      .def_prop_rw(
          "keep_steps", [](const Config& c) { return c.engine.keep_steps; },
          [](Config& c, unsigned count) { c.engine.keep_steps = count; }, "Steps that stay under a name.")
      .def_prop_rw(
          "caller_state_bytes_max", [](const Config& c) { return c.engine.caller_state_bytes_max; },
          [](Config& c, std::uint64_t bytes) { c.engine.caller_state_bytes_max = bytes; },
          "Bytes of the program that a commit has room for.")
      .def_prop_ro(
          "can_keep_steps",
          [](const Config& c) {
            const bool nvme = c.engine.parameters == Placement::nvme || c.engine.optimizer == Placement::nvme;
            return !c.engine.store_directory.empty() && !(nvme && c.engine.durability == tiers::Durability::none);
          },
          "Whether there is a store that steps can be kept in.")
      .def_prop_ro("comm_timeout_seconds",
                   [](const Config& c) { return static_cast<double>(c.runtime.comm_timeout.count()) / 1e3; })
      .def_prop_ro(
          "joins_launched_ranks", [](const Config& c) { return c.runtime.communicator == CommunicatorKind::automatic; },
          "Whether ranks that the program's launcher started are ranks of the engine (hoist.communicator is \"auto\").")
      .def(
          "store_in",
          [](Config& c, const std::string& name) {
            const auto below = [&name](std::string& directory) {
              if (directory.empty()) return;
              const std::filesystem::path path(directory);
              directory = path.parent_path() / name / path.filename();
            };
            below(c.engine.store_directory);
            for (std::string& directory : c.engine.stripe_directories) below(directory);
            below(c.engine.mirror.directory);
          },
          "name"_a, "Inserts a directory of this name above those of the store and its mirror.")
      .def(
          "make_paths_absolute",
          [](Config& c) {
            make_paths_absolute(c.runtime);
            make_paths_absolute(c.engine);
          },
          "For an engine, which opens its files again at restore() and wake(): the program may have changed its "
          "directory.")
      .def_prop_ro("store_directory", [](const Config& c) { return c.engine.store_directory; })
      .def_prop_ro(
          "has_schedule",
          [](const Config& c) { return !std::holds_alternative<ConstantRate>(c.engine.learning_rate_schedule); },
          "Whether a section `scheduler` sets the learning rate.")
      .def(
          "learning_rate",
          [](const Config& c, std::uint64_t applied_steps, double group_rate) {
            return learning_rate(c.engine.learning_rate_schedule, applied_steps, group_rate);
          },
          "applied_steps"_a, "group_rate"_a, "By the section `scheduler`, of the step after so many others.")
      .def_prop_ro(
          "optimizer", [](const Config& c) { return c.engine.optimizer_defaults; },
          "Settings of parameters that are in no group of their own.");
}

}  // namespace hoist::python
