// SPDX-License-Identifier: Apache-2.0
// hoist check: what a configuration will do.
#include <cstdio>
#include <memory>

#include <fmt/format.h>

#include <hoist/config/config.hpp>
#include <hoist/config/reference.hpp>
#include <hoist/core/units.hpp>

#include "commands.hpp"
#include "output.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;

struct CheckArguments {
  std::string config;
  std::string json;
  int world_size = 0;  // 0: not given
  bool print_keys = false;
};

const char* placement_name(Placement placement) {
  switch (placement) {
    case Placement::device:
      return "device";
    case Placement::pinned:
      return "pinned memory";
    case Placement::nvme:
      return "NVMe";
  }
  return "";
}

std::string commits_text(const EngineOptions& engine) {
  if (engine.store_directory.empty()) return "none: no store, so nothing can be saved or resumed";
  if (engine.durability == tiers::Durability::step) return "every step";
  const bool nvme = engine.parameters == Placement::nvme || engine.optimizer == Placement::nvme;
  return nvme ? "none: the store cannot be resumed" : "when the program saves";
}

std::string source_text(const ConfigSetting& setting) {
  switch (setting.source) {
    case ConfigSetting::Source::file:
      return fmt::format("line {}", setting.line);
    case ConfigSetting::Source::automatic:
      return fmt::format("\"auto\" in line {}", setting.line);
    case ConfigSetting::Source::standard:
      return "default";
  }
  return "";
}

// The value in effect, which for budgets is rounded.
std::string value_text(const ConfigSetting& setting) {
  if (setting.row->type != config::ValueType::bytes) return to_text(setting.value);
  return format_bytes(static_cast<std::uint64_t>(std::get<std::int64_t>(setting.value)));
}

void print_accepted(const Config& config, const TrainingOptions& training, int world_size) {
  const EngineOptions& engine = config.engine;
  fmt::print("{}: accepted\n\nplacement\n", config.origin());
  std::vector<std::vector<std::string>> rows{{"weights", placement_name(engine.parameters)},
                                             {"optimizer state", placement_name(engine.optimizer)},
                                             {"commits", commits_text(engine)}};
  if (!engine.store_directory.empty()) rows.push_back({"store", engine.store_directory});
  fmt::print("{}\nbudgets of each rank\n", columns(rows));
  rows = {{"device", format_bytes(config.runtime.device_memory_bytes), "hoist.device_memory"},
          {"pinned", format_bytes(config.runtime.pinned_memory_bytes), "hoist.pinned_memory"}};
  fmt::print("{}", columns(rows));

  rows = {{"key", "value", "from"}};
  for (const ConfigSetting& setting : config.settings()) {
    const bool shown = setting.row->status == config::KeyStatus::implemented || setting.line != 0;
    if (shown) rows.push_back({std::string(setting.row->path), value_text(setting), source_text(setting)});
  }
  fmt::print("\nsettings in effect\n{}", columns(rows));
  if (world_size > 0 && training.train_batch_size) {
    fmt::print("\nbatch: {} samples = {} a rank x {} accumulation x {} ranks\n", *training.train_batch_size,
               *training.train_micro_batch_size_per_gpu, *training.gradient_accumulation_steps, world_size);
  }
  for (const std::string& note : config.notes) fmt::print("\nnote: {}\n", note);
  for (const std::string& warning : config.warnings) fmt::print("\nwarning: {}\n", warning);
}

Json setting_json(const ConfigSetting& setting) {
  static constexpr const char* kSources[] = {"file", "default", "auto"};
  Json json{{"key", setting.row->path},
            {"value", Json::parse(to_text(setting.value))},
            {"source", kSources[static_cast<std::size_t>(setting.source)]},
            {"status", config::key_status_name(setting.row->status)}};
  if (setting.line != 0) {
    json["line"] = setting.line;
    json["column"] = setting.column;
  }
  return json;
}

Json accepted_json(const Config& config, const TrainingOptions& training) {
  static constexpr const char* kPlacements[] = {"device", "pinned", "nvme"};
  const auto placement = [](Placement p) { return kPlacements[static_cast<std::size_t>(p)]; };
  const auto count = [](const std::optional<std::uint64_t>& value) { return value ? Json(*value) : Json(nullptr); };
  Json json{{"config", config.origin()}, {"accepted", true}};
  json["placement"] = {{"parameters", placement(config.engine.parameters)},
                       {"optimizer", placement(config.engine.optimizer)},
                       {"store", config.engine.store_directory},
                       {"durability", config.engine.durability == tiers::Durability::step ? "step" : "none"}};
  json["budgets"] = {{"device", config.runtime.device_memory_bytes}, {"pinned", config.runtime.pinned_memory_bytes}};
  json["training"] = {{"train_batch_size", count(training.train_batch_size)},
                      {"train_micro_batch_size_per_gpu", count(training.train_micro_batch_size_per_gpu)},
                      {"gradient_accumulation_steps", count(training.gradient_accumulation_steps)}};
  json["settings"] = Json::array();
  for (const ConfigSetting& setting : config.settings()) json["settings"].push_back(setting_json(setting));
  json["notes"] = config.notes;
  json["warnings"] = config.warnings;
  return json;
}

Json refused_json(const std::string& origin, const ConfigProblems& error) {
  Json json{{"config", origin}, {"accepted", false}, {"problems", Json::array()}};
  for (const ConfigProblem& problem : error.problems) {
    json["problems"].push_back(
        {{"key", problem.key}, {"problem", problem.problem}, {"line", problem.line}, {"column", problem.column}});
  }
  return json;
}

int check(const CheckArguments& arguments) {
  if (arguments.print_keys) {
    fmt::print("{}", config::reference_markdown());
    return kOk;
  }
  if (arguments.config.empty()) {
    fmt::print(stderr, "hoist check: which configuration? Run with --help for an example.\n");
    return kBadInput;
  }
  try {
    const Config config = Config::load(arguments.config);
    TrainingOptions training = config.training;
    if (arguments.world_size > 0) training = config.check_world_size(arguments.world_size);
    write_json(arguments.json, accepted_json(config, training));
    print_accepted(config, training, arguments.world_size);
    return kOk;
  } catch (const ConfigProblems& error) {
    write_json(arguments.json, refused_json(arguments.config, error));
    fmt::print(stderr, "{}\n{} problem{} in {}\n", error.what(), error.problems.size(),
               error.problems.size() == 1 ? "" : "s", arguments.config);
    return kBadInput;
  } catch (const IoError& error) {
    // A configuration that cannot be read is bad input; a report that cannot be written is a failure.
    if (error.where.path != arguments.config) throw;
    fmt::print(stderr, "hoist check: {}\n", error.what());
    return kBadInput;
  }
}

}  // namespace

Command add_check(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("check", "Say what a configuration will do, or everything that is wrong with it");
  auto arguments = std::make_shared<CheckArguments>();
  command->add_option("CONFIG", arguments->config, "A DeepSpeed JSON file");
  command->add_option("--world-size", arguments->world_size, "Check batch sizes for this many ranks")
      ->check(CLI::Range(1, 1 << 24));
  command->add_option("--json", arguments->json, "Write the same as JSON to this file");
  command->add_flag("--print-keys", arguments->print_keys, "Print the reference of all keys (Markdown) and stop");
  command->footer("Example: hoist check offload.json --world-size 8");
  return {command, [arguments] { return check(*arguments); }};
}

}  // namespace hoist::cli
