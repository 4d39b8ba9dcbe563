// SPDX-License-Identifier: Apache-2.0
#include "check_report.hpp"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include <hoist/config/setting.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/predict/step_time.hpp>

#include "output.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

// How much of a kind of state is in pinned memory, if that kind is on NVMe.
std::string pinned_text(Placement placement, const std::optional<double>& share) {
  if (placement != Placement::nvme || share == 0.0) return "";
  if (!share) return ", as much of it in pinned memory as fits";
  return fmt::format(", {:.4g} % of it in pinned memory", 100 * *share);
}

// Whether offload_param.max_in_cpu is set.
bool has_weights_limit(const EngineOptions& engine) {
  const auto kUnlimited = EngineOptions{}.parameters_pinned_elements_max;
  return engine.parameters_pinned_elements_max != kUnlimited;
}

std::string weights_place(const EngineOptions& engine) {
  std::string place = placement_name(engine.parameters);
  place += pinned_text(engine.parameters, engine.parameters_pinned_fraction);
  if (engine.parameters == Placement::nvme && has_weights_limit(engine))
    place += fmt::format(", at most {} elements of a rank", engine.parameters_pinned_elements_max);
  return place;
}

std::string optimizer_place(const EngineOptions& engine) {
  std::string place = placement_name(engine.optimizer);
  if (engine.optimizer != Placement::device && engine.optimizer_offload_ratio < 1)
    place += fmt::format(", of it at most {:.4g} % on the device", 100 * (1 - engine.optimizer_offload_ratio));
  return place + pinned_text(engine.optimizer, engine.optimizer_pinned_fraction);
}

std::string mirror_text(const MirrorOptions& mirror) {
  const std::string rate =
      mirror.bytes_per_second == 0 ? "" : fmt::format(", at most {} a second", format_bytes(mirror.bytes_per_second));
  if (mirror.every == 0) return fmt::format("in {}, when the program asks for it{}", mirror.directory, rate);
  return fmt::format("in {}, at most every {}{}", mirror.directory,
                     mirror.every == 1 ? "step" : fmt::format("{} steps", mirror.every), rate);
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

// The value in effect, as a file says it.
std::string written_value(const ConfigSetting& setting) {
  const bool cadence = setting.row->type == config::ValueType::cadence;
  if (!cadence || !std::holds_alternative<std::int64_t>(setting.value)) return to_text(setting.value);
  return fmt::format("{{\"every\": {}}}", to_text(setting.value));
}

// The same for people: budgets are rounded.
std::string value_text(const ConfigSetting& setting) {
  if (setting.row->type != config::ValueType::bytes) return written_value(setting);
  return format_bytes(static_cast<std::uint64_t>(std::get<std::int64_t>(setting.value)));
}

std::string placement_text(const EngineOptions& engine) {
  Rows rows{{"weights", weights_place(engine)},
            {"optimizer state", optimizer_place(engine)},
            {"commits", describe_commits(engine)}};
  if (!engine.store_directory.empty()) rows.push_back({"store", engine.store_directory});
  if (!engine.mirror.directory.empty()) rows.push_back({"mirror", mirror_text(engine.mirror)});
  for (const std::string& directory : engine.stripe_directories) rows.push_back({"striped over", directory});
  return "\nplacement\n" + columns(rows);
}

std::string budget_text(const CheckReport& report) {
  const RuntimeOptions& runtime = report.runtime;
  std::string text = "\nbudgets of each rank\n";
  if (runtime.host_memory_bytes > 0) {
    text += fmt::format("  device and pinned memory together: {}\n", format_bytes(runtime.host_memory_bytes));
  } else {
    text += columns({{"device", format_bytes(runtime.device_memory_bytes), "hoist.device_memory"},
                     {"pinned", format_bytes(runtime.pinned_memory_bytes), "hoist.pinned_memory"}});
  }
  if (!report.choices.empty()) text += fmt::format("\nchosen for {}\n", report.machine);
  for (const auto& [key, value, reason] : report.choices)
    text += fmt::format("  {}: {}, because {}\n", key, value, reason);
  return text;
}

std::vector<std::string> tier_row(const CheckReport& report, const char* name, const Prediction::Tier& tier,
                                  const char* key) {
  const std::string budget = format_bytes(tier.budget_bytes);
  const bool is_chosen = std::ranges::any_of(
      report.choices, [&](const auto& choice) { return choice.key.find(key) != std::string::npos; });
  std::string verdict = fmt::format("of {} ({})", budget, key);
  if (!tier.fits())
    verdict = is_chosen ? fmt::format("does not fit: {} has {} for each rank", report.machine, budget)
                        : fmt::format("does not fit: {} is {}, raise it", key, budget);
  return {name, format_bytes(tier.bytes), fmt::format("least {}", format_bytes(tier.least_bytes)), verdict};
}

// The least time of a step: that of its transfers at the drives' measured speed. Empty: not measured.
std::optional<double> least_nvme_seconds(const Prediction& prediction, const MeasuredBandwidth& measured) {
  if (!measured.read_bytes_per_second || !measured.write_bytes_per_second) return std::nullopt;
  const StepSpeeds speeds{.nvme_read = static_cast<double>(*measured.read_bytes_per_second),
                          .nvme_write = static_cast<double>(*measured.write_bytes_per_second),
                          .nvme_mixed = static_cast<double>(measured.mixed_bytes_per_second.value_or(0))};
  return hoist::least_nvme_seconds(static_cast<double>(prediction.step.nvme_read),
                                   static_cast<double>(prediction.step.nvme_write), speeds);
}

// The shares of state on NVMe that pinned memory has. Both are of one budget.
std::string shares_text(const CheckReport& report) {
  const EngineOptions& engine = report.config.engine;
  const Prediction& p = *report.prediction;
  std::string text;
  std::vector<std::string> larger;
  // `most`: empty if the share has no use.
  const auto add = [&](const char* key, const std::optional<double>& configured, double share,
                       const std::optional<double>& most) {
    if (!most) return;
    if (!configured) {
      text += fmt::format("  {} \"auto\" is {:.2f}\n", key, share);
    } else if (*most > share) {
      larger.push_back(fmt::format("{} up to {:.2f}", key, *most));
    }
  };
  if (has_weights_limit(engine) && !engine.parameters_pinned_fraction) {
    text += fmt::format("  zero_optimization.offload_param.max_in_cpu: {:.2f} of the weights are in pinned memory\n",
                        p.pinned_weight_share);
  } else {
    add("hoist.parameters_pinned_fraction", engine.parameters_pinned_fraction, p.parameters_pinned_fraction,
        report.parameters_pinned_fraction_max);
  }
  add("hoist.optimizer_pinned_fraction", engine.optimizer_pinned_fraction, p.pinned_fraction,
      report.pinned_fraction_max);
  if (larger.empty()) return text;
  return text + fmt::format("  the pinned budget allows more{}: {}\n", larger.size() > 1 ? ", of one of these two" : "",
                            fmt::join(larger, ", or "));
}

std::string prediction_text(const CheckReport& report) {
  if (!report.prediction) return "\nAdd --parameters N, --units FILE or --model DIR to see what each tier must hold.\n";
  const Prediction& p = *report.prediction;
  std::string text = fmt::format("\n{} parameters ({}) on {}; each holds\n", p.parameter_count, report.model,
                                 counted(std::max(1, report.world_size), "rank"));
  Rows rows{tier_row(report, "device", p.device, "hoist.device_memory"),
            tier_row(report, "pinned", p.pinned, "hoist.pinned_memory")};
  if (p.nvme_bytes > 0) rows.push_back({"NVMe", format_bytes(p.nvme_bytes), "reserved at the start"});
  if (p.mirror_bytes > 0)
    rows.push_back({"mirror", format_bytes(p.mirror_bytes),
                    "reserved at the start; twice as much to go on from it, until the first copy is whole"});
  text += columns(rows) + program_pinned_text(report.program_pinned_bytes) + "\nand moves in each step\n";
  text += columns(
      {{"NVMe", format_bytes(p.step.nvme_read) + " read", format_bytes(p.step.nvme_write) + " written"},
       {"host and device", format_bytes(p.step.host_to_device) + " up", format_bytes(p.step.device_to_host) + " down"},
       {"between ranks", format_bytes(p.step.wire),
        p.step.wire_in_group > 0 ? format_bytes(p.step.wire_in_group) + " of it within a group" : ""}});
  if (report.config.engine.optimizer != Placement::device && report.config.engine.optimizer_offload_ratio < 1)
    text +=
        fmt::format("  {} of optimizer state, for {:.0f} % of the parameters, are in device memory and updated there\n",
                    format_bytes(p.device_state_bytes), 100 * p.device_state_share);
  if (p.fitting_offload_ratio)
    text += fmt::format("  the device's budget allows less: zero_optimization.offload_optimizer.ratio {:.2f}\n",
                        *p.fitting_offload_ratio);
  if (p.spilled_units > 0)
    text += fmt::format(
        "  gradients of {} of {} units are on NVMe until their update (hoist.gradient_spill), in {} of "
        "scratch space\n",
        p.spilled_units, p.units.size(), format_bytes(p.scratch_bytes));
  text += shares_text(report);
  if (report.pinned_bytes_by_default)
    text += fmt::format(
        "  zero_optimization.sub_group_size {} takes pinned memory: {} would be held without the key, instead of {}\n",
        report.config.engine.sub_group_elements, format_bytes(*report.pinned_bytes_by_default),
        format_bytes(p.pinned.bytes));
  if (const auto seconds = least_nvme_seconds(p, report.config.measured); seconds && *seconds > 0) {
    text += fmt::format(
        "  at least {:.3g} s a step for the drives at their measured speed, if this rank has them alone\n", *seconds);
  }
  return text;
}

std::string fit_text(const MachineFit& fit, const std::string& machine) {
  std::string text =
      fmt::format("\n{} on {} hold{}\n", fit.ranks == 1 ? "one rank" : fmt::format("{} ranks", fit.ranks), machine,
                  fit.ranks == 1 ? "s" : " together");
  std::vector<std::vector<std::string>> rows;
  for (const MachineFit::Memory& memory : fit.memories)
    rows.push_back(
        {memory.name, format_bytes(memory.bytes), fmt::format("of {} free", format_bytes(memory.free_bytes))});
  if (fit.mirror_bytes > 0) rows.push_back({"mirror", format_bytes(fit.mirror_bytes), "its space is not known"});
  text += columns(rows);
  if (fit.fits()) return text + fmt::format("\nfits {}\n", machine);
  text += fmt::format("\nDOES NOT FIT {}\n", machine);
  for (const std::string& problem : fit.problems) text += fmt::format("  {}\n", problem);
  return text;
}

Json fit_json(const MachineFit& fit, const std::string& machine) {
  Json json{{"name", machine},
            {"fits", fit.fits()},
            {"ranks", fit.ranks},
            {"problems", fit.problems},
            {"memories", Json::array()}};
  for (const MachineFit::Memory& memory : fit.memories) {
    json["memories"].push_back({{"name", memory.name},
                                {"least_bytes", memory.least_bytes},
                                {"bytes", memory.bytes},
                                {"free_bytes", memory.free_bytes},
                                {"fits", memory.fits()}});
  }
  json["limiting"] = nullptr;
  for (const MachineFit::Memory& memory : fit.memories)
    if (!memory.fits() && json["limiting"].is_null()) json["limiting"] = memory.name;
  return json;
}

std::string settings_text(const Config& config) {
  Rows rows{{"key", "value", "from"}};
  for (const ConfigSetting& setting : config.settings()) {
    const bool shown = setting.row->status == config::KeyStatus::implemented || setting.line != 0;
    if (shown) rows.push_back({std::string(setting.row->path), value_text(setting), source_text(setting)});
  }
  return "\nsettings in effect\n" + columns(rows);
}

Json setting_json(const ConfigSetting& setting) {
  static constexpr const char* kSources[] = {"file", "default", "auto"};
  Json json{{"key", setting.row->path},
            {"value", Json::parse(written_value(setting))},
            {"source", kSources[static_cast<std::size_t>(setting.source)]},
            {"status", config::key_status_name(setting.row->status)}};
  if (setting.line != 0) {
    json["line"] = setting.line;
    json["column"] = setting.column;
  }
  return json;
}

Json prediction_json(const CheckReport& report) {
  const Prediction& p = *report.prediction;
  Json json{{"parameters", p.parameter_count},   {"model", report.model},
            {"device", tier_json(p.device)},     {"pinned", tier_json(p.pinned)},
            {"nvme", {{"bytes", p.nvme_bytes}}}, {"mirror", {{"bytes", p.mirror_bytes}}},
            {"step", step_json(p.step)}};
  json["program_pinned_bytes"] = report.program_pinned_bytes;
  json["optimizer_pinned_fraction"] = p.pinned_fraction;
  json["optimizer_pinned_fraction_max"] = or_null(report.pinned_fraction_max);
  json["parameters_pinned_fraction"] = p.parameters_pinned_fraction;
  json["parameters_pinned_fraction_max"] = or_null(report.parameters_pinned_fraction_max);
  json["pinned_weight_share"] = p.pinned_weight_share;
  json["spilled_gradients"] = spilled_gradients_json(p);
  json["device_state"] = device_state_json(p);
  json["fitting_offload_ratio"] = or_null(p.fitting_offload_ratio);
  const auto seconds = least_nvme_seconds(p, report.config.measured);
  json["least_nvme_seconds"] = or_null(seconds);
  return json;
}

Json placement_json(const EngineOptions& engine) {
  return {{"parameters", placement_id(engine.parameters)},
          {"optimizer", placement_id(engine.optimizer)},
          {"optimizer_pinned_fraction",
           engine.optimizer_pinned_fraction ? Json(*engine.optimizer_pinned_fraction) : Json("auto")},
          {"parameters_pinned_fraction",
           engine.parameters_pinned_fraction ? Json(*engine.parameters_pinned_fraction) : Json("auto")},
          {"gradient_spill", engine.gradient_spill_units != 0u},
          {"optimizer_offload_ratio", engine.optimizer_offload_ratio},
          {"store", engine.store_directory},
          {"stripes", engine.stripe_directories},
          {"durability", engine.durability == tiers::Durability::step ? "step" : "none"},
          {"commit_every", engine.commit_every},
          {"keep_steps", engine.keep_steps},
          {"mirror", engine.mirror.directory}};
}

// As a file says it: in whole MiB, if these are enough.
Json budget_json(std::uint64_t bytes, std::uint64_t held_bytes) {
  const std::uint64_t whole = round_down(bytes, kMiB);
  return whole >= std::max(held_bytes, kMiB) ? Json(fmt::format("{}MiB", whole / kMiB)) : Json(bytes);
}

struct Budgets {
  std::uint64_t device_bytes = 0, pinned_bytes = 0;
};

// One memory as two budgets in the whole blocks that a configuration's budgets have. If the plan fills the memory,
// there is no room to round both up: the device's buffers shrink by a block or two, or else those in pinned memory.
Budgets divided(std::uint64_t memory_bytes, const Prediction& p) {
  const auto blocks = [](std::uint64_t bytes) { return std::max(round_up(bytes, kBlockAlignment), kBlockAlignment); };
  const std::uint64_t all = round_down(memory_bytes, kBlockAlignment), device = blocks(p.device.bytes);
  const std::uint64_t room = std::max(left_of(all, blocks(p.pinned.bytes)), blocks(p.device.least_bytes));
  const std::uint64_t unused = left_of(room, device);
  const std::uint64_t device_budget = std::min(device, room) + round_down(unused / 2, kBlockAlignment);
  return {device_budget, std::max(left_of(all, device_budget), kBlockAlignment)};
}

}  // namespace

const char* placement_id(Placement placement) {
  static constexpr std::array kIds{"device", "pinned", "nvme"};
  return kIds.at(static_cast<std::size_t>(placement));
}

Json budgets_section(const Prediction& p, const RuntimeOptions& runtime) {
  const Budgets budgets = runtime.host_memory_bytes > 0
                              ? divided(runtime.host_memory_bytes, p)
                              : Budgets{runtime.device_memory_bytes, runtime.pinned_memory_bytes};
  return {{"device_memory", budget_json(budgets.device_bytes, p.device.bytes)},
          {"pinned_memory", budget_json(budgets.pinned_bytes, p.pinned.bytes)}};
}

std::string device_key(const RuntimeOptions& runtime) {
  return runtime.device == platform::DeviceKind::cuda ? "cuda" : "host";
}

std::string program_pinned_text(std::uint64_t bytes) {
  if (bytes == 0)
    return "  not counted: pinned memory that the program takes itself, for activation offload for example; set "
           "program_pinned_bytes in a file for --units\n";
  return fmt::format("  {} of the pinned memory are the program's own (program_pinned_bytes)\n", format_bytes(bytes));
}

Json tier_json(const Prediction::Tier& tier) {
  return {{"bytes", tier.bytes},
          {"least_bytes", tier.least_bytes},
          {"budget_bytes", tier.budget_bytes},
          {"fits", tier.fits()}};
}

Json step_json(const StepBytes& step) {
  return {{"nvme_read", step.nvme_read},
          {"nvme_write", step.nvme_write},
          {"host_to_device", step.host_to_device},
          {"device_to_host", step.device_to_host},
          {"wire", step.wire},
          {"wire_in_group", step.wire_in_group}};
}

Json spilled_gradients_json(const Prediction& prediction) {
  return {{"units", prediction.spilled_units}, {"bytes", prediction.scratch_bytes}};
}

Json device_state_json(const Prediction& prediction) {
  return {{"bytes", prediction.device_state_bytes}, {"share", prediction.device_state_share}};
}

namespace {

// The section "hoist" that a person may put into the file. It names the device only if the file does: states are
// placed by other rules beside a host device that the file names.
Json section_to_paste(const CheckReport& report) {
  const Json budgets = budgets_section(*report.prediction, report.runtime);
  if (!report.config.runtime.device) return budgets;
  Json section{{"device", device_key(report.runtime)}};
  section.update(budgets);
  return section;
}

}  // namespace

std::string accepted_text(const CheckReport& report) {
  const Config& config = report.config;
  std::string text = fmt::format("{}: accepted\n", config.origin());
  text += placement_text(config.engine) + budget_text(report) + prediction_text(report);
  text += report.all_settings ? settings_text(config) : "\nAdd --all to see every setting in effect.\n";
  const TrainingOptions& training = report.training;
  if (report.world_size > 0 && training.train_batch_size) {
    text += fmt::format("\nbatch: {} samples = {} a rank x {} accumulation x {}\n", *training.train_batch_size,
                        *training.train_micro_batch_size_per_gpu, *training.gradient_accumulation_steps,
                        counted(report.world_size, "rank"));
  }
  for (const std::string& note : config.notes) text += fmt::format("\nnote: {}\n", note);
  for (const std::string& warning : config.warnings) text += fmt::format("\nwarning: {}\n", warning);
  if (!report.prediction) return text;
  text += fit_text(report.fit, report.machine);
  if (!report.fit.fits()) return text;
  return text + fmt::format("\nTo have these budgets on every machine, put this into the file:\n  \"hoist\": {}\n",
                            section_to_paste(report).dump());
}

Json accepted_json(const CheckReport& report) {
  const Config& config = report.config;
  Json json{{"config", config.origin()}, {"accepted", true}};
  json["placement"] = placement_json(config.engine);
  json["budgets"] = {{"device", report.runtime.device_memory_bytes},
                     {"pinned", report.runtime.pinned_memory_bytes},
                     {"host", report.runtime.host_memory_bytes}};
  json["device"] = device_key(report.runtime);
  json["choices"] = Json::array();
  for (const auto& [key, value, reason] : report.choices)
    json["choices"].push_back({{"key", key}, {"value", value}, {"reason", reason}});
  json["training"] = {{"train_batch_size", or_null(report.training.train_batch_size)},
                      {"train_micro_batch_size_per_gpu", or_null(report.training.train_micro_batch_size_per_gpu)},
                      {"gradient_accumulation_steps", or_null(report.training.gradient_accumulation_steps)}};
  json["prediction"] = report.prediction ? prediction_json(report) : Json(nullptr);
  json["machine"] = report.prediction ? fit_json(report.fit, report.machine) : Json(nullptr);
  json["section"] = report.prediction && report.fit.fits() ? section_to_paste(report) : Json(nullptr);
  json["settings"] = Json::array();
  for (const ConfigSetting& setting : config.settings()) json["settings"].push_back(setting_json(setting));
  json["notes"] = config.notes;
  json["warnings"] = config.warnings;
  return json;
}

Json refused_json(const std::string& origin, const ConfigProblems& error) {
  Json json{{"config", origin}, {"accepted", false}, {"problems", Json::array()}, {"unlisted", error.unlisted}};
  for (const ConfigProblem& problem : error.problems) {
    json["problems"].push_back(
        {{"key", problem.key}, {"problem", problem.problem}, {"line", problem.line}, {"column", problem.column}});
  }
  return json;
}

}  // namespace hoist::cli
