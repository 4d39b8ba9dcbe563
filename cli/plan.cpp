// SPDX-License-Identifier: Apache-2.0
// hoist plan: predicts, before hardware is bought or a run is started, what a model needs of each tier, how long its
// steps take and what limits them, for every placement of its weights and optimizer state, and writes the fastest one
// that fits as a configuration.
#include <memory>
#include <utility>

#include <fmt/format.h>

#include <hoist/config/config.hpp>
#include <hoist/core/named_file.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/scratch_file.hpp>

#include "commands.hpp"
#include "interrupt.hpp"
#include "machine_file.hpp"
#include "output.hpp"
#include "plan_report.hpp"
#include "planner.hpp"
#include "strict_json.hpp"
#include "this_machine.hpp"

namespace hoist::cli {

namespace {

struct PlanArguments : ModelQuestion {  // the machine may be "this"; without one it is assumed
  std::vector<std::string> paths;
  double tokens = 16384;
  StepDisturbance disturbance;
  std::string write;

  bool is_this_machine() const { return machine == "this"; }
};

MachineSpec machine_of(const PlanArguments& arguments) {
  if (arguments.machine.empty()) {
    MachineSpec assumed = assumed_machine();
    assumed.name = "assumed to be " + assumed.name + "; give --machine FILE or --machine this for yours";
    return assumed;
  }
  if (!arguments.is_this_machine()) return about(arguments.machine, [&] { return read_machine(arguments.machine); });
  const InterruptGuard interrupt;
  const std::vector<std::string> paths = arguments.paths.empty() ? std::vector<std::string>{"."} : arguments.paths;
  const ThisMachine found = this_machine_spec(paths, interrupt.flag());
  if (!found.cache_path.empty())
    say("{} {}\n", found.measured_now ? "measured now; kept in" : "measured before; delete this file to measure again:",
        found.cache_path);
  return found.spec;
}

// The machine, with the configuration's budgets, or else with those that a run there would have. A plan does not fill a
// budget of pinned memory in the configuration that the machine has not got: it writes another.
void set_node(const PlanArguments& arguments, PlanQuestion& question) {
  RuntimeOptions runtime = arguments.runtime(question.config);
  runtime.local_ranks = question.layout.ranks_per_node;
  question.node = arguments.is_this_machine() ? this_machine(runtime) : node_of(question.machine, question.layout);
  const auto choose_budgets = [&] {
    question.runtime = arguments.is_this_machine() ? choose(runtime, question.node).runtime
                                                   : choose_on(question.machine, question.layout, runtime).runtime;
  };
  choose_budgets();
  const std::uint64_t given = std::exchange(runtime.pinned_memory_bytes, 0);
  const std::uint64_t offered = question.node.host.free_bytes / static_cast<std::uint64_t>(question.node.processes);
  if (given <= offered || given != question.config.runtime.pinned_memory_bytes) return;
  choose_budgets();
  say("hoist.pinned_memory is {}, more than the machine has free: planned with {}\n", format_bytes(given),
      format_bytes(question.runtime.pinned_memory_bytes));
}

PlanQuestion question_of(const PlanArguments& arguments) {
  const bool has_config = !arguments.config.empty();
  PlanQuestion question{.config = has_config ? Config::load(arguments.config, RunLength::left_to_the_trainer)
                                             : Config::parse("{}", "defaults"),
                        .has_config = has_config,
                        .model = {},
                        .machine = machine_of(arguments),
                        .is_here = arguments.is_this_machine(),
                        .tokens = arguments.tokens,
                        .disturbance = arguments.disturbance};
  question.model = about(arguments.model.units, [&] { return read_model(arguments.model, question.config.engine); });
  check(question.model.model, question.config.engine);
  const int all = arguments.machine.empty() ? 1 : largest_world(question.machine);
  question.world_size = arguments.world_size > 0 ? arguments.world_size : all;
  question.config.check_world_size(question.world_size);
  question.layout = rank_layout(question.machine, question.world_size);
  set_node(arguments, question);
  return question;
}

int write_config(const PlanArguments& arguments, const PlanQuestion& question, const PlanReport& report) {
  if (report.best() == nullptr) throw UsageError(fmt::format("nothing fits, so {} was not written", arguments.write));
  const std::string base =
      question.has_config ? read_file(arguments.config, "name the configuration to start from") : "{}\n";
  const PlannedConfig planned = planned_config(question, *report.best(), base);
  check_written(question, *report.best(), Config::parse(planned.text, arguments.write, RunLength::left_to_the_trainer));
  write_output(arguments.write, planned.text);
  say("\nwritten to {}\n", arguments.write);
  for (const std::string& line : planned.replaced) say("  {}\n", line);
  return kOk;
}

int plan(const PlanArguments& arguments) {
  try {
    if (!arguments.model.given()) throw UsageError("how large a model? --parameters 7e9, --units FILE or --model DIR");
    if (!arguments.paths.empty() && !arguments.is_this_machine())
      throw UsageError("--path names this machine's drives: it belongs to --machine this");
    const OutputPath json{"--json", arguments.json};
    check_outputs_apart({json, {"--write", arguments.write}},
                        {arguments.model.units, arguments.model.weights, arguments.machine});
    check_outputs_apart({json}, {arguments.config});
    check_json(arguments.json);
    check_replaces_only({"--write", arguments.write}, arguments.config,
                        fmt::format("name it as the configuration (hoist plan {} ...)", arguments.write));
    const PlanQuestion question = question_of(arguments);
    if (question.config.measured.read_bytes_per_second && !arguments.machine.empty() && !arguments.is_this_machine())
      say("the drives' speeds are those of hoist.measured in {}, and not those of {}\n", arguments.config,
          arguments.machine);
    const PlanReport report = plan_of(question);
    say("{}", plan_text(report));
    write_json(arguments.json, plan_json(report));
    return arguments.write.empty() ? kOk : write_config(arguments, question, report);
  } catch (const IoError& error) {
    return arguments.refuse_unreadable_file("plan", error);
  }
}

}  // namespace

Command add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Predict where a model's state fits, how long its steps take and why");
  auto arguments = std::make_shared<PlanArguments>();
  command->add_option("CONFIG", arguments->config, "A DeepSpeed JSON file [hoist's defaults]");
  add_model_options(*command, arguments->model);
  command->add_option("--world,--world-size", arguments->world_size, "Ranks [as many as the machine has devices]")
      ->check(rank_count());
  command->add_option("--machine", arguments->machine,
                      "A machine file (machines/*.json), or \"this\": measured once [32 nodes of 8 H100, 1 rank]");
  command->add_option("--path", arguments->paths,
                      "For \"this\": a directory on the drive; again for each further drive");
  command->add_option("--tokens", arguments->tokens, "Tokens of a rank and step [16384]")
      ->check(between(1.0, 1e12, "COUNT"));
  StepDisturbance& disturbance = arguments->disturbance;
  command
      ->add_option("--slow-drive", disturbance.slow_drive, "Also show a step in which one drive takes N times as long")
      ->check(between(1.0, 1e6, "N"));
  command->add_option("--slow-rank", disturbance.slow_rank, "Also show a step in which one rank takes N times as long")
      ->check(between(1.0, 1e6, "N"));
  command
      ->add_option("--noise", disturbance.noise,
                   "Also show a step in which each transfer and kernel takes up to so much longer (0.1: a tenth)")
      ->check(between(0.0, 1e3, "SHARE"));
  command->add_option("--device-memory", arguments->device_memory, "Memory of a device for hoist, such as 70GiB");
  command->add_option("--pinned-memory", arguments->pinned_memory, "Host memory of a rank for hoist");
  command->add_option(
      "--write", arguments->write,
      "Write the fastest placement that fits as a configuration: a new file, or the one that was given");
  command->add_option("--json", arguments->json, "Write the results as JSON to this file");
  command->footer("Example: hoist plan --parameters 70e9 --machine machines/h100-8.json --write offload.json");
  return {command, [arguments] { return plan(*arguments); }, "; its files are removed"};
}

}  // namespace hoist::cli
