// SPDX-License-Identifier: Apache-2.0
// hoist check: explains what a configuration will do, and what each tier must hold for a model, before a run.
#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include <hoist/config/config.hpp>
#include <hoist/config/reference.hpp>
#include <hoist/core/units.hpp>

#include "check_report.hpp"
#include "commands.hpp"
#include "machine_file.hpp"
#include "model_question.hpp"
#include "output.hpp"
#include "strict_json.hpp"

namespace hoist::cli {

namespace {

struct CheckArguments : ModelQuestion {  // without a machine: the one that the program runs on
  int local_ranks = 0;                   // 0: all of them
  bool all_settings = false;
  bool print_keys = false;
  bool print_schema = false;
};

// The machine that is checked against.
struct CheckedMachine {
  std::string name = "this machine";
  Machine node;                                // one of its nodes, with these ranks
  std::optional<std::uint64_t> drive_bytes{};  // of a node; empty: the file systems say
  int world_size = 0;                          // 0: not given
  ChosenOptions chosen;
};

CheckedMachine checked_machine(const CheckArguments& arguments, RuntimeOptions runtime) {
  if (arguments.machine.empty()) {
    if (arguments.world_size > 0 && arguments.local_ranks > arguments.world_size)
      throw UsageError(fmt::format("--local-ranks {}: --world is {}, which counts the ranks of all machines",
                                   arguments.local_ranks, arguments.world_size));
    runtime.local_ranks = arguments.local_ranks > 0 ? arguments.local_ranks : std::max(1, arguments.world_size);
    Machine node = this_machine(runtime);
    ChosenOptions chosen = choose(runtime, node);
    return {.node = std::move(node), .world_size = arguments.world_size, .chosen = std::move(chosen)};
  }
  const MachineSpec spec = about(arguments.machine, [&] { return read_machine(arguments.machine); });
  const int world_size = arguments.world_size > 0 ? arguments.world_size : largest_world(spec);
  const RankLayout layout = rank_layout(spec, world_size);
  return {.name = spec.name,
          .node = node_of(spec, layout),
          .drive_bytes = static_cast<std::uint64_t>(drive_bytes(spec, layout) * layout.ranks_per_node),
          .world_size = world_size,
          .chosen = choose_on(spec, layout, runtime)};
}

void add_prediction(const CheckArguments& arguments, const CheckedMachine& machine, CheckReport& report) {
  if (!arguments.model.given()) return;
  const NamedModel model =
      about(arguments.model.units, [&] { return read_model(arguments.model, report.config.engine); });
  hoist::check(model.model, report.config.engine);
  report.model = model.name;
  report.program_pinned_bytes = model.program.pinned_bytes;
  const int ranks = std::max(1, report.world_size);
  const EngineOptions engine = report.config.engine_at(ranks);
  report.prediction = predict(report.runtime, engine, model.model, ranks, model.program);
  report.fit = machine_fit(*report.prediction, report.runtime, engine, machine.node, machine.drive_bytes);
  const auto kDefaultElements = EngineOptions{}.sub_group_elements;
  if (engine.sub_group_elements > kDefaultElements) {
    EngineOptions by_default = engine;
    by_default.sub_group_elements = kDefaultElements;
    const auto bytes = predict(report.runtime, by_default, model.model, ranks, model.program).pinned.bytes;
    if (bytes < report.prediction->pinned.bytes) report.pinned_bytes_by_default = bytes;
  }
  if (!report.prediction->pinned.fits()) return;
  const auto largest = [&](std::optional<double> EngineOptions::*share) {
    return largest_pinned_fraction(report.runtime, engine, model.model, ranks, model.program, share);
  };
  if (engine.optimizer == Placement::nvme)
    report.pinned_fraction_max = largest(&EngineOptions::optimizer_pinned_fraction);
  if (engine.parameters == Placement::nvme)
    report.parameters_pinned_fraction_max = largest(&EngineOptions::parameters_pinned_fraction);
}

// Problems for which every engine would refuse the options, for any model.
void check_engine(const Config& config, const CheckedMachine& machine) {
  try {
    hoist::check(config.engine, machine.chosen.runtime, std::max(1, machine.world_size));
  } catch (const ConfigError& error) {
    const std::string sentence = error.what();  // the key, a colon, the problem
    throw ConfigProblems(config.origin(), {{.key = error.key, .problem = sentence.substr(error.key.size() + 2)}});
  }
}

int check_config(const CheckArguments& arguments) {
  const Config config = Config::load(arguments.config, RunLength::left_to_the_trainer);
  const CheckedMachine machine = checked_machine(arguments, arguments.runtime(config));
  check_engine(config, machine);
  CheckReport report{.config = config,
                     .training = config.training,
                     .world_size = machine.world_size,
                     .runtime = machine.chosen.runtime,
                     .choices = machine.chosen.choices,
                     .machine = machine.name,
                     .all_settings = arguments.all_settings};
  if (machine.world_size > 0) report.training = config.check_world_size(machine.world_size);
  add_prediction(arguments, machine, report);
  say("{}", accepted_text(report));
  write_json(arguments.json, accepted_json(report));
  return report.prediction && !report.fit.fits() ? kBadInput : kOk;
}

int check(const CheckArguments& arguments) {
  if (arguments.print_keys || arguments.print_schema) {
    say("{}", arguments.print_keys ? config::reference_markdown() : config::schema_json());
    return kOk;
  }
  try {
    if (arguments.config.empty()) throw UsageError("which configuration? Run with --help for an example.");
    check_outputs_apart({{"--json", arguments.json}},
                        {arguments.config, arguments.model.units, arguments.model.weights, arguments.machine});
    return check_config(arguments);
  } catch (const ConfigProblems& error) {
    const std::size_t count = error.problems.size() + error.unlisted;
    complain("{}\n{} in {}\n", error.what(), counted(count, "problem"), arguments.config);
    write_json(arguments.json, refused_json(arguments.config, error));
    return kBadInput;
  } catch (const IoError& error) {
    return arguments.refuse_unreadable_file("check", error);
  }
}

}  // namespace

Command add_check(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("check", "Explain what a configuration will do, or everything that is wrong with it");
  auto arguments = std::make_shared<CheckArguments>();
  command->add_option("CONFIG", arguments->config, "A DeepSpeed JSON file");
  command->add_option("--world,--world-size", arguments->world_size, "Check for this many ranks")->check(rank_count());
  CLI::Option* const local_ranks =
      command->add_option("--local-ranks", arguments->local_ranks, "Ranks on this machine [all ranks]")
          ->check(between(1, 1 << 16, "COUNT"));
  command->add_option("--device-memory", arguments->device_memory,
                      "Budget of each rank, instead of the file's, such as 80GiB");
  command->add_option("--pinned-memory", arguments->pinned_memory,
                      "Budget of each rank, instead of the file's, such as 200GiB");
  command
      ->add_option("--machine", arguments->machine,
                   "Check for the machine of this file (machines/*.json), with as many ranks as it has devices")
      ->excludes(local_ranks);
  add_model_options(*command, arguments->model);
  command->add_option("--json", arguments->json, "Write the results as JSON to this file");
  command->add_flag("--all", arguments->all_settings, "Print every setting in effect");
  command->add_flag("--print-keys", arguments->print_keys, "Print the reference of all keys (Markdown) and stop");
  command->add_flag("--print-schema", arguments->print_schema, "Print the JSON Schema for editors and stop");
  command->footer(
      "A units file: {\"units\": [{\"name\": \"layer.0\", \"parameters\": 7077888}], \"program_device_bytes\": 0, "
      "\"program_pinned_bytes\": 0, \"dtype\": \"bf16\"}\n"
      "Exit code 2: refused, or too large for the machine.\n"
      "Example: hoist check offload.json --world 8 --parameters 7e9");
  return {command, [arguments] { return check(*arguments); }};
}

}  // namespace hoist::cli
