// SPDX-License-Identifier: Apache-2.0
#include "planner.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <string_view>
#include <tuple>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/config/setting.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/predict/activations.hpp>

#include "check_report.hpp"
#include "json_edit.hpp"

namespace hoist::cli {

namespace {

constexpr std::uint64_t kMoreMemoryBytes = 100'000'000'000;
constexpr unsigned kManyBuffers = 1024;
constexpr std::array<std::uint64_t, 2> kLargeSubGroups{4 << 20, 16 << 20};  // elements: 40 and 160 MiB of state
// The store's directory if neither the configuration nor the machine names one.
constexpr const char* kStoreDirectory = "/local_nvme";

constexpr const char* kDurability = "hoist.durability";
constexpr const char* kSpill = "hoist.gradient_spill";
constexpr const char* kUpdateMode = "hoist.update_mode";
constexpr const char* kRatio = "zero_optimization.offload_optimizer.ratio";
constexpr std::array kPathKeys{"zero_optimization.offload_param.nvme_path",
                               "zero_optimization.offload_optimizer.nvme_path", "hoist.checkpoint_path"};

// The key's setting, if the configuration has a value for it; null for "auto".
const ConfigSetting* given_setting(const Config& config, std::string_view key) {
  const auto found = std::ranges::find_if(config.settings(), [&](const ConfigSetting& setting) {
    return setting.row->path == key && setting.source == ConfigSetting::Source::file;
  });
  return found == config.settings().end() ? nullptr : &*found;
}

bool is_given(const Config& config, std::string_view key) { return given_setting(config, key) != nullptr; }

// The directories for state on NVMe: it is in one place, which the configuration may name anywhere.
nlohmann::ordered_json store_paths(const PlanQuestion& question) {
  nlohmann::ordered_json paths = question.machine.drives.directories;
  if (paths.empty()) paths = kStoreDirectory;
  for (const char* const key : kPathKeys)
    if (const ConfigSetting* const given = given_setting(question.config, key))
      paths = nlohmann::ordered_json::parse(to_text(given->value));
  return paths;
}

// As a configuration with these paths.
void set_store_paths(const nlohmann::ordered_json& paths, EngineOptions& engine) {
  std::vector<std::string> directories;
  for (const auto& path : paths)  // of a string: itself
    directories.push_back((std::filesystem::path(path.get<std::string>()) / "hoist").string());
  engine.store_directory = directories.front();
  engine.stripe_directories.assign(directories.begin() + 1, directories.end());
}

EngineOptions placed(const PlanQuestion& question, Placement parameters, Placement optimizer) {
  const Config& config = question.config;
  EngineOptions engine = config.engine_at(question.world_size);
  engine.parameters = parameters;
  engine.optimizer = optimizer;
  if (!is_given(config, "hoist.optimizer_pinned_fraction")) engine.optimizer_pinned_fraction.reset();
  if (!is_given(config, "hoist.parameters_pinned_fraction")) engine.parameters_pinned_fraction.reset();
  // Has an effect beside weights on NVMe alone, where the configuration may not have them.
  if (const ConfigSetting* const most = given_setting(config, "zero_optimization.offload_param.max_in_cpu"))
    engine.parameters_pinned_elements_max = static_cast<std::uint64_t>(std::get<std::int64_t>(most->value));
  if (!question.has_config) engine.gradient_spill_units.reset();  // a file without the key says false
  if (engine.uses_nvme() && engine.store_directory.empty()) set_store_paths(store_paths(question), engine);
  if (!engine.uses_nvme() && !is_given(config, "hoist.checkpoint_path")) {  // the configuration's is for state on NVMe
    engine.store_directory.clear();
    engine.stripe_directories.clear();
  }
  // A GPU updates states in its memory only beside weights that are there; a configuration's rules say the same.
  if (parameters != Placement::device && question.runtime.device == platform::DeviceKind::cuda)
    engine.optimizer_offload_ratio = 1;
  // The default durability of a configuration with this placement, if its own placement needs no store.
  if (engine.uses_nvme() && !is_given(config, kDurability)) engine.durability = tiers::Durability::step;
  if (optimizer != Placement::nvme) engine.optimizer_pinned_fraction = 0;
  if (parameters != Placement::nvme) engine.parameters_pinned_fraction = 0;
  if (optimizer == Placement::device && engine.update_mode != UpdateMode::step)
    engine.update_mode = UpdateMode::automatic;  // the other modes are for offloaded state
  if (optimizer == Placement::device) engine.optimizer_offload_ratio = 1;
  if (optimizer == Placement::device || !engine.uses_nvme()) engine.gradient_spill_units = 0;
  return engine;
}

// How the engine is set up for a placement, as far as the configuration leaves it open: units are fetched two ahead,
// and two more stay. If state is on NVMe, the variants have few or many update buffers. Many buffers take memory that
// could hold state, but let the drives work while kernels run that need nothing from them.
std::vector<EngineOptions> variants_of(const PlanQuestion& question, EngineOptions engine) {
  const auto open = [&](const char* key) { return !is_given(question.config, key); };
  std::uint64_t largest = 0;
  for (const ModelUnit& unit : question.model.model.units()) {
    std::uint64_t elements = 0;
    for (const ParameterId id : unit.parameters) elements += element_count(question.model.model.parameters()[id.index]);
    largest = std::max(largest, elements);
  }
  if (open("zero_optimization.stage3_prefetch_bucket_size"))
    engine.prefetch_elements = std::max(engine.prefetch_elements, 2 * largest);
  if (open("zero_optimization.stage3_max_live_parameters"))
    engine.live_elements_max = std::max(engine.live_elements_max, 4 * largest);
  std::vector<EngineOptions> variants{engine};
  if (engine.optimizer != Placement::nvme || !open("zero_optimization.offload_optimizer.buffer_count") ||
      !open("zero_optimization.sub_group_size"))
    return variants;
  engine.update_buffer_count = kManyBuffers;
  variants.push_back(engine);
  for (const std::uint64_t elements : kLargeSubGroups) {
    engine.sub_group_elements = elements;
    variants.push_back(engine);
  }
  return variants;
}

std::string refusal_of(const EngineOptions& engine, const RuntimeOptions& runtime, int world_size) {
  try {
    check(engine, runtime, world_size);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

// A configuration that asks for commits of steps is refused with all state in memory; so is a placement for it.
std::string durability_refusal(const Config& config, const EngineOptions& engine) {
  const ConfigSetting* const given = given_setting(config, kDurability);
  if (given == nullptr || engine.durability != tiers::Durability::step || engine.uses_nvme()) return "";
  const auto* const every = std::get_if<std::int64_t>(&given->value);
  return fmt::format(
      "{}: {} needs optimizer state or weights on NVMe; leave this key out to plan with both in memory, too",
      kDurability, every == nullptr ? to_text(given->value) : fmt::format(R"({{"every": {}}})", *every));
}

// The program's memory: as the units file says, or activations by formula.
ProgramMemory program_of(const PlanQuestion& question, const EngineOptions& engine) {
  ProgramMemory program = question.model.program;
  if (program.device_bytes > 0) return program;
  const double micro_batch = question.tokens / engine.micro_batches_max;
  const bool keeps_all = engine.micro_batch_order == MicroBatchOrder::vertical;
  program.device_bytes =
      activation_bytes(question.model.model, keeps_all ? question.tokens : micro_batch, micro_batch).sum();
  return program;
}

double compute_seconds(const PlanQuestion& question, double tokens) {
  return operations_per_token(question.model.model).all * tokens / (question.machine.device.compute_tflops * 1e12);
}

StepSpeeds speeds_for(const PlanQuestion& question, double tokens) {
  StepSpeeds speeds = speeds_of(question.machine, question.layout);
  // These speeds are those of all drives together.
  const auto prefer = [&](const std::optional<std::uint64_t>& measured, double& speed) {
    if (measured) speed = static_cast<double>(*measured) / question.layout.ranks_per_node;
  };
  const MeasuredBandwidth& measured = question.config.measured;
  prefer(measured.read_bytes_per_second, speeds.nvme_read);
  prefer(measured.write_bytes_per_second, speeds.nvme_write);
  if (measured.read_bytes_per_second) speeds.nvme_mixed = 0;
  prefer(measured.mixed_bytes_per_second, speeds.nvme_mixed);
  speeds.compute_seconds = compute_seconds(question, tokens);
  const TokenOperations operations = operations_per_token(question.model.model);
  speeds.forward_share = operations.forward / operations.all;
  return speeds;
}

void take(const PlanQuestion& question, PlannedStep step, PlanRow& row) {
  row.engine = std::move(step.engine);
  row.prediction = std::move(step.prediction);
  row.time = step.time;
  row.fit = machine_fit(row.prediction, question.runtime, row.engine, question.node,
                        row.drive_bytes * static_cast<std::uint64_t>(question.layout.ranks_per_node));
}

StepQuestion step_question(const PlanQuestion& question, const ProgramMemory& program) {
  return {question.runtime, question.model.model, question.world_size, program, speeds_for(question, question.tokens)};
}

PlanRow row_of(const PlanQuestion& question, const EngineOptions& engine) {
  PlanRow row{.engine = engine};
  row.refusal = refusal_of(engine, question.runtime, question.world_size);
  if (row.refusal.empty()) row.refusal = durability_refusal(question.config, engine);
  if (row.refusal.empty() && question.is_here)
    row.refusal = fmt::format("{}", fmt::join(directory_problems(engine), "; "));
  row.program = program_of(question, engine);
  row.drive_bytes = static_cast<std::uint64_t>(drive_bytes(question.machine, question.layout));
  take(question, plan_step(step_question(question, row.program), engine), row);
  const EngineOptions& configured = question.config.engine;
  row.configured =
      question.has_config && engine.parameters == configured.parameters && engine.optimizer == configured.optimizer;
  return row;
}

// Times that differ by the rounding of sums are equal: then the configured one is the best, or else the one with the
// fewest bytes on NVMe.
auto rank_of(const PlanRow& row) {
  return std::tuple(!row.refusal.empty(), !row.fits(), std::round(row.time.expected_seconds * 1e9), !row.configured,
                    row.prediction.nvme_bytes);
}

// The best of a placement's variants; it is never slower than fetching on demand.
PlanRow best_row(const PlanQuestion& question, Placement parameters, Placement optimizer) {
  std::optional<PlanRow> best;
  for (const EngineOptions& engine : variants_of(question, placed(question, parameters, optimizer))) {
    PlanRow row = row_of(question, engine);
    if (!best || rank_of(row) < rank_of(*best)) best = std::move(row);
  }
  take(question,
       faster_of_ahead_and_on_demand(step_question(question, best->program),
                                     {best->engine, best->prediction, best->time}),
       *best);
  return *best;
}

// Sorted by the time of an undisturbed step; placements that do not fit come last.
std::vector<PlanRow> ranked_rows(const PlanQuestion& question) {
  std::vector<PlanRow> rows;
  for (const Placement parameters : {Placement::device, Placement::pinned, Placement::nvme})
    for (const Placement optimizer : {Placement::device, Placement::pinned, Placement::nvme})
      rows.push_back(best_row(question, parameters, optimizer));
  std::ranges::stable_sort(rows, {}, rank_of);
  return rows;
}

std::optional<WhatIf> what_if(const char* name, const PlanQuestion& changed) {
  const PlanRow row = ranked_rows(changed).front();
  if (!row.fits()) return std::nullopt;
  return WhatIf{name, row.engine.parameters, row.engine.optimizer, row.time.expected_seconds};
}

// The fastest placements with a little more hardware.
std::vector<WhatIf> what_ifs(const PlanQuestion& question) {
  std::vector<WhatIf> all;
  const auto add = [&](std::optional<WhatIf> one) {
    if (one) all.push_back(*one);
  };
  PlanQuestion drive = question;
  const double more = (question.machine.drives.count + 1) / question.machine.drives.count;
  drive.machine.drives.count += 1;
  for (auto* speed : {&drive.config.measured.read_bytes_per_second, &drive.config.measured.write_bytes_per_second,
                      &drive.config.measured.mixed_bytes_per_second})
    if (*speed) *speed = static_cast<std::uint64_t>(static_cast<double>(**speed) * more);
  add(what_if("one more drive a node", drive));
  PlanQuestion memory = question;
  const std::uint64_t share =
      round_down(kMoreMemoryBytes / static_cast<std::uint64_t>(question.layout.ranks_per_node), kBlockAlignment);
  memory.node.host.free_bytes += kMoreMemoryBytes;
  memory.runtime.pinned_memory_bytes += share;
  if (memory.runtime.host_memory_bytes > 0) {
    memory.runtime.host_memory_bytes += share;
    memory.runtime.device_memory_bytes += share;
  }
  add(what_if("100 GB more memory a node", memory));
  return all;
}

// The number of tokens from which on a step takes at most 2 % longer than its kernels. The memory plan stays the same.
std::optional<double> free_tokens(const PlanQuestion& question, const PlanRow& row) {
  const auto is_free = [&](double tokens) {
    return predict_time(row.prediction, speeds_for(question, tokens)).expected_seconds <=
           1.02 * compute_seconds(question, tokens);
  };
  constexpr double kTokensMax = 1e9;
  double high = 1;
  while (!is_free(high)) {
    high *= 2;
    if (high > kTokensMax) return std::nullopt;
  }
  double low = high / 2;
  while (high / low > 1.01) {
    const double middle = (low + high) / 2;
    (is_free(middle) ? high : low) = middle;
  }
  return high;
}

std::uint64_t divided(std::uint64_t bytes, bool by_ranks, int ranks) {
  return by_ranks ? divide_up(bytes, static_cast<std::uint64_t>(ranks)) : bytes;
}

// Device memory of each ZeRO stage, with and without offload: by the textbook's figures for fp32 training (ZeroRow),
// and as hoist has it.
std::vector<ZeroRow> zero_table(const PlanQuestion& question) {
  const std::uint64_t count = question.model.model.parameter_count();
  const int ranks = question.world_size;
  std::vector<ZeroRow> table;
  for (int stage = 0; stage <= 3; ++stage) {
    const std::uint64_t moments = divided(8 * count, stage >= 1, ranks);
    const std::uint64_t gradients = divided(4 * count, stage >= 2, ranks);
    const std::uint64_t weights = divided(4 * count, stage >= 3, ranks);
    table.push_back({stage, "none", weights + gradients + moments, "textbook"});
    table.push_back({stage, "optimizer", divided(2 * count, stage >= 3, ranks), "textbook"});
    for (const char* offload : {"none", "optimizer", "all"}) {
      const std::string_view name = offload;
      if (name == "all" && stage < 3) continue;
      EngineOptions engine = placed(question, name == "all" ? Placement::pinned : Placement::device,
                                    name == "none" ? Placement::device : Placement::pinned);
      engine.stage = stage;
      const Prediction p = predict(question.runtime, engine, question.model.model, ranks, question.model.program);
      table.push_back({stage, offload, p.device.least_bytes, "hoist"});
    }
  }
  return table;
}

// The row's options with the fractions that the written file names.
EngineOptions with_planned_fractions(const PlanRow& row) {
  EngineOptions engine = row.engine;
  engine.optimizer_pinned_fraction = row.prediction.pinned_fraction;
  engine.parameters_pinned_fraction = row.prediction.parameters_pinned_fraction;
  return engine;
}

// Why no engine takes these options with their value of the key; empty if one does.
std::string problem_of(const EngineOptions& engine, std::string_view key) {
  const std::vector<OptionProblem> problems = problems_between(engine);
  const auto found = std::ranges::find(problems, key, &OptionProblem::key);
  return found == problems.end() ? "" : found->problem;
}

}  // namespace

PlanReport plan_of(const PlanQuestion& question) {
  PlanReport report{.model = question.model.name,
                    .program_pinned_bytes = question.model.program.pinned_bytes,
                    .has_program_bytes = question.model.program.device_bytes > 0,
                    .world_size = question.world_size,
                    .tokens = question.tokens,
                    .machine = question.machine,
                    .layout = question.layout,
                    .disturbance = question.disturbance,
                    .rows = ranked_rows(question),
                    .zero_table = zero_table(question)};
  if (question.disturbance != StepDisturbance{})
    for (PlanRow& row : report.rows)
      row.disturbed = predict_time(row.prediction, speeds_for(question, question.tokens), question.disturbance);
  if (report.best() == nullptr) return report;
  report.overrun = overrun_of_plan(report.best()->prediction, speeds_for(question, question.tokens));
  report.what_ifs = what_ifs(question);
  report.free_tokens = free_tokens(question, *report.best());
  return report;
}

PlannedConfig planned_config(const PlanQuestion& question, const PlanRow& row, std::string text) {
  const auto set = [&](std::initializer_list<std::string_view> path, const nlohmann::ordered_json& value) {
    text = with_member(text, std::vector<std::string_view>(path), value);
  };
  set({"zero_optimization", "stage"}, row.engine.stage);
  // By the names that the text has for it, which it may not contradict.
  const auto set_zero = [&](std::string_view key, const nlohmann::ordered_json& value) {
    std::vector<std::string_view> names = config::find_member("zero_optimization", key)->aliases;
    names.push_back(key);
    std::erase_if(names, [&](std::string_view name) { return text.find(fmt::format("\"{}\"", name)) == text.npos; });
    if (names.empty()) names.push_back(key);
    for (const std::string_view name : names) set({"zero_optimization", name}, value);
  };
  for (const char* const key : {"cpu_offload", "cpu_offload_param"})  // which would contradict the sections
    if (is_given(question.config, fmt::format("zero_optimization.{}", key))) set_zero(key, false);
  const EngineOptions &engine = row.engine, &given = question.config.engine;
  if (engine.prefetch_elements != given.prefetch_elements)
    set_zero("stage3_prefetch_bucket_size", engine.prefetch_elements);
  if (engine.live_elements_max != given.live_elements_max)
    set_zero("stage3_max_live_parameters", engine.live_elements_max);
  if (engine.sub_group_elements != given.sub_group_elements) set_zero("sub_group_size", engine.sub_group_elements);
  const nlohmann::ordered_json paths = store_paths(question);
  const bool has_checkpoint_path = is_given(question.config, kPathKeys.back());  // then state on NVMe goes there, too
  for (const auto& [section, placement, key] : {std::tuple("offload_param", row.engine.parameters, kPathKeys[0]),
                                                std::tuple("offload_optimizer", row.engine.optimizer, kPathKeys[1])}) {
    set({"zero_optimization", section, "device"}, placement_key(placement));
    if (placement == Placement::nvme && (has_checkpoint_path || !is_given(question.config, key)))
      set({"zero_optimization", section, "nvme_path"}, paths);
  }
  // Beside weights that are elsewhere the configuration's own may count as 1.
  if (engine.optimizer != Placement::device && is_given(question.config, kRatio))
    set({"zero_optimization", "offload_optimizer", "ratio"}, engine.optimizer_offload_ratio);
  if (engine.update_buffer_count != given.update_buffer_count)
    set({"zero_optimization", "offload_optimizer", "buffer_count"}, engine.update_buffer_count);
  set({"hoist", "device"}, device_key(question.runtime));
  const nlohmann::ordered_json budgets = budgets_section(row.prediction, question.runtime);
  for (const auto& [key, value] : budgets.items()) set({"hoist", key}, value);
  if (row.engine.optimizer == Placement::nvme)
    set({"hoist", "optimizer_pinned_fraction"}, row.prediction.pinned_fraction);
  if (row.engine.parameters == Placement::nvme)
    set({"hoist", "parameters_pinned_fraction"}, row.prediction.parameters_pinned_fraction);
  std::vector<std::string> replaced;
  // `key` has a value in the file that the placement cannot have, or would not run as planned with.
  const auto replace = [&](std::string_view key, const nlohmann::ordered_json& value, std::string_view reason) {
    set({"hoist", config::last_part(key)}, value);
    replaced.push_back(fmt::format("{} is {} there, not {}: {}", key, value.dump(),
                                   to_text(given_setting(question.config, key)->value), reason));
  };
  if (engine.update_mode != given.update_mode) {
    EngineOptions kept = engine;
    kept.update_mode = given.update_mode;
    replace(kUpdateMode, "auto", problem_of(kept, kUpdateMode));
  }
  if (given.gradient_spill_units == 0u) {
    if (row.prediction.spilled_units > 0) set({"hoist", "gradient_spill"}, true);  // a plan without a configuration
  } else if (row.prediction.spilled_units == 0) {
    EngineOptions kept = with_planned_fractions(row);
    kept.gradient_spill_units.reset();
    std::string reason = problem_of(kept, kSpill);
    if (reason.empty() &&
        predict(question.runtime, kept, question.model.model, question.world_size, row.program).spilled_units > 0)
      reason = "all gradients fit pinned memory; with true, some would leave it for larger buffers";
    if (!reason.empty()) replace(kSpill, false, reason);
  }
  return {std::move(text), std::move(replaced)};
}

void check_written(const PlanQuestion& question, const PlanRow& row, const Config& written) {
  const RuntimeOptions runtime = choose_on(question.machine, question.layout, written.runtime).runtime;
  check(written.engine, runtime, question.world_size);
  const auto bytes_of = [&](const EngineOptions& engine) {
    const Prediction p = predict(runtime, engine, question.model.model, question.world_size, row.program);
    return nlohmann::ordered_json{{"fits", p.fits()},
                                  {"device", p.device.bytes},
                                  {"pinned", p.pinned.bytes},
                                  {"nvme", p.nvme_bytes},
                                  {"step", step_json(p.step)}};
  };
  EngineOptions planned = with_planned_fractions(row);
  const EngineOptions read = written.engine_at(question.world_size);
  if (row.prediction.spilled_units == 0) planned.gradient_spill_units = 0;
  planned.store_directory = read.store_directory;  // a store keeps the names of its drives: they take space
  planned.stripe_directories = read.stripe_directories;
  const auto wanted = bytes_of(planned), found = bytes_of(read);
  if (wanted != found || !found["fits"])
    throw UsageError(fmt::format(
        "{} was not written: a run with it would not be as planned, but {} instead of {}. Please report this, with {}",
        written.origin(), found.dump(), wanted.dump(), question.has_config ? question.config.origin() : "the command"));
}

}  // namespace hoist::cli
