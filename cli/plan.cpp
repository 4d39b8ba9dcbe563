// SPDX-License-Identifier: Apache-2.0
// hoist plan: predicts, before hardware is bought or a run is started, what a model needs of each tier, how long its
// steps take and what limits them, for every placement of its weights and optimizer state.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string_view>

#include <fmt/format.h>

#include <hoist/config/config.hpp>
#include <hoist/config/setting.hpp>
#include <hoist/core/units.hpp>
#include <hoist/interchange/safetensors.hpp>
#include <hoist/zero/machine.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "plan_report.hpp"
#include "units_file.hpp"

namespace hoist::cli {

namespace {

constexpr double kGigabyte = 1e9;
// Without a given budget only the minimum matters; this is enough for every possible buffer.
constexpr std::uint64_t kUnlimitedBytes = std::uint64_t{1} << 50;
// Operations of forward and backward for each parameter and token; with recomputation, one forward more.
constexpr double kFlopsPerToken = 6, kFlopsPerTokenRecomputed = 8;

struct PlanArguments {
  std::string config;
  ModelArguments model;
  int world_size = 1;
  std::string device_memory, pinned_memory;
  double nvme_read = 0, nvme_write = 0, nvme_mixed = 0;  // this and the next: GB/s of a rank
  double host_to_device = 0, device_to_host = 0, network = 0, host_memory = 0, device_bandwidth = 0;
  double compute_seconds = 0;
  double tokens = 0;  // of a rank and step
  double tflops = 0;
  bool recompute = false;
  std::string endurance;
  std::string json;
};

// The configuration, or hoist's defaults for a GPU, with the given budgets.
Config base_of(const PlanArguments& arguments) {
  Config config = arguments.config.empty() ? Config::parse("{}", "defaults") : Config::load(arguments.config);
  RuntimeOptions& runtime = config.runtime;
  if (arguments.config.empty()) {
    runtime.device = platform::DeviceKind::cuda;
    runtime.device_memory_bytes = runtime.pinned_memory_bytes = kUnlimitedBytes;
  }
  if (!arguments.device_memory.empty())
    runtime.device_memory_bytes = bytes_of("--device-memory", arguments.device_memory);
  if (!arguments.pinned_memory.empty())
    runtime.pinned_memory_bytes = bytes_of("--pinned-memory", arguments.pinned_memory);
  runtime.local_ranks = arguments.world_size;
  runtime = choose_for_this_machine(runtime).runtime;
  return config;
}

StepSpeeds speeds_of(const PlanArguments& arguments, const MeasuredBandwidth& measured, std::uint64_t parameters) {
  const auto given = [](double option, const std::optional<std::uint64_t>& otherwise) {
    if (option > 0) return option * kGigabyte;
    return otherwise ? static_cast<double>(*otherwise) : 0.0;
  };
  StepSpeeds speeds{.nvme_read = given(arguments.nvme_read, measured.read_bytes_per_second),
                    .nvme_write = given(arguments.nvme_write, measured.write_bytes_per_second),
                    .nvme_mixed = given(arguments.nvme_mixed, measured.mixed_bytes_per_second),
                    .host_to_device = arguments.host_to_device * kGigabyte,
                    .device_to_host = arguments.device_to_host * kGigabyte,
                    .wire = arguments.network * kGigabyte,
                    .host_memory = arguments.host_memory * kGigabyte,
                    .device_memory = arguments.device_bandwidth * kGigabyte,
                    .compute_seconds = arguments.compute_seconds};
  if (arguments.recompute) speeds.forward_share = 0.25;
  if (arguments.tokens > 0 && arguments.tflops > 0) {
    const double flops = arguments.recompute ? kFlopsPerTokenRecomputed : kFlopsPerToken;
    speeds.compute_seconds = flops * static_cast<double>(parameters) * arguments.tokens / (arguments.tflops * 1e12);
  }
  return speeds;
}

bool is_given(const Config& config, std::string_view key) {
  return std::ranges::any_of(
      config.settings(), [&](const ConfigSetting& setting) { return setting.row->path == key && setting.line != 0; });
}

EngineOptions placed(const Config& config, Placement parameters, Placement optimizer) {
  EngineOptions engine = config.engine;
  engine.micro_batches_max = static_cast<unsigned>(config.training.gradient_accumulation_steps.value_or(1));
  engine.parameters = parameters;
  engine.optimizer = optimizer;
  const bool needs_store = parameters == Placement::nvme || optimizer == Placement::nvme;
  if (needs_store && engine.store_directory.empty()) engine.store_directory = "planned";
  // The default durability of a configuration with this placement, if its own placement needs no store.
  if (needs_store && !is_given(config, "hoist.durability")) engine.durability = tiers::Durability::step;
  if (optimizer != Placement::nvme) engine.optimizer_pinned_fraction = 0;
  if (optimizer == Placement::device)
    engine.update_mode = UpdateMode::automatic;  // the other modes are for offloaded state
  if (optimizer == Placement::device) engine.optimizer_offload_ratio = 1;
  return engine;
}

std::string refusal_of(const EngineOptions& engine, const RuntimeOptions& runtime, int world_size) {
  try {
    check(engine, runtime, world_size);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

std::uint64_t divided(std::uint64_t bytes, bool by_ranks, int ranks) {
  return by_ranks ? divide_up(bytes, static_cast<std::uint64_t>(ranks)) : bytes;
}

// The stages with and without offload: what people know of ZeRO's papers, and what hoist makes of them.
std::vector<ZeroRow> zero_table(const Config& config, const Model& model, const ProgramMemory& program, int ranks) {
  const std::uint64_t count = model.parameter_count();
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
      EngineOptions engine = placed(config, name == "all" ? Placement::pinned : Placement::device,
                                    name == "none" ? Placement::device : Placement::pinned);
      engine.stage = stage;
      table.push_back(
          {stage, offload, predict(config.runtime, engine, model, ranks, program).device.least_bytes, "hoist"});
    }
  }
  return table;
}

PlanReport plan_of(const PlanArguments& arguments) {
  const Config config = base_of(arguments);
  const NamedModel model = read_model(arguments.model, config.engine.weights_dtype.value_or(DType::bf16));
  const bool has_config = !arguments.config.empty();
  PlanReport report{.model = model.name,
                    .program_pinned_bytes = model.program.pinned_bytes,
                    .world_size = arguments.world_size,
                    .has_device_budget = has_config || !arguments.device_memory.empty(),
                    .has_pinned_budget = has_config || !arguments.pinned_memory.empty()};
  if (!arguments.endurance.empty())
    report.endurance_bytes = static_cast<double>(bytes_of("--endurance", arguments.endurance));
  for (const Placement parameters : {Placement::device, Placement::pinned, Placement::nvme}) {
    for (const Placement optimizer : {Placement::device, Placement::pinned, Placement::nvme}) {
      PlanRow row{.engine = placed(config, parameters, optimizer)};
      row.refusal = refusal_of(row.engine, config.runtime, arguments.world_size);
      row.prediction = predict(config.runtime, row.engine, model.model, arguments.world_size, model.program);
      report.speeds = speeds_of(arguments, config.measured, row.prediction.parameter_count);
      row.time = predict_time(row.prediction, report.speeds);
      row.configured = has_config && parameters == config.engine.parameters && optimizer == config.engine.optimizer;
      report.rows.push_back(std::move(row));
    }
  }
  report.zero_table = zero_table(config, model.model, model.program, arguments.world_size);
  return report;
}

int bad_plan_input(const std::string& sentence) {
  complain("hoist plan: {}\n", sentence);
  return kBadInput;
}

int plan(const PlanArguments& arguments) {
  if (!arguments.model.given())
    return bad_plan_input("how large a model? --parameters 7e9, --units FILE or --model DIR");
  if ((arguments.tokens > 0) != (arguments.tflops > 0))
    return bad_plan_input("--tokens and --tflops belong together: they determine how long a step computes");
  if (arguments.tokens > 0 && arguments.compute_seconds > 0)
    return bad_plan_input("--compute-seconds already sets what --tokens and --tflops determine");
  try {
    check_json_apart(arguments.json, arguments.config);
    check_json_apart(arguments.json, arguments.model.units);
    const PlanReport report = plan_of(arguments);
    say("{}", plan_text(report));
    write_json(arguments.json, plan_json(report));
    return kOk;
  } catch (const ConfigProblems& error) {
    return bad_plan_input(error.what());
  } catch (const ConfigError& error) {
    return bad_plan_input(fmt::format("{}: {}", arguments.model.units, error.what()));
  } catch (const UsageError& error) {
    return bad_plan_input(error.what());
  } catch (const interchange::SafetensorsError& error) {
    return bad_plan_input(error.what());
  } catch (const IoError& error) {
    if (error.where.path != arguments.config && !arguments.model.is_about(error.where.path)) throw;
    return bad_plan_input(error.what());
  }
}

}  // namespace

Command add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "Predict where a model's state fits, how long its steps take and why");
  auto arguments = std::make_shared<PlanArguments>();
  // CLI::PositiveNumber accepts "nan", and numbers that make seconds infinite.
  const CLI::Validator positive(
      [](const std::string& text) {
        double value = 0;
        const bool reads = CLI::detail::lexical_cast(text, value);
        constexpr double kMin = 1e-9, kMax = 1e15;
        return reads && value >= kMin && value <= kMax ? std::string() : text + " is not a number from 1e-9 to 1e15";
      },
      "POSITIVE");
  command->add_option("CONFIG", arguments->config, "A DeepSpeed JSON file (hoist's defaults, without budgets)");
  command->add_option("--world,--world-size", arguments->world_size, "Ranks (1)")->check(CLI::Range(1, 1 << 24));
  add_model_options(*command, arguments->model);
  command->add_option("--device-memory", arguments->device_memory, "Memory of a device for hoist, such as 70GiB");
  command->add_option("--pinned-memory", arguments->pinned_memory, "Host memory of a rank for hoist");
  const auto speed = [&](const char* name, double& value, const char* what) {
    command->add_option(name, value, std::string(what) + ", GB/s of a rank")->check(positive);
  };
  speed("--nvme-read", arguments->nvme_read, "Drives, reading (the configuration's hoist.measured)");
  speed("--nvme-write", arguments->nvme_write, "Drives, writing");
  speed("--nvme-mixed", arguments->nvme_mixed, "Drives, both at once, added up");
  speed("--host-to-device", arguments->host_to_device, "Host to device");
  speed("--device-to-host", arguments->device_to_host, "Device to host");
  speed("--network", arguments->network, "Between ranks");
  speed("--host-memory", arguments->host_memory, "Host memory, read and written by the update");
  speed("--device-bandwidth", arguments->device_bandwidth, "Device memory, read and written by updates there");
  command->add_option("--compute-seconds", arguments->compute_seconds, "Of a step, when nothing is waited for")
      ->check(positive);
  command->add_option("--tokens", arguments->tokens, "Tokens of a rank and step, for the same")->check(positive);
  command->add_option("--tflops", arguments->tflops, "Speed of a device in the model's kernels, TFLOP/s")
      ->check(positive);
  command->add_flag("--recompute", arguments->recompute, "Backward computes forward once more");
  command->add_option("--endurance", arguments->endurance, "What a rank's drives may be written in their life (1.4PB)");
  command->add_option("--json", arguments->json, "Write the results as JSON to this file");
  command->footer(
      "Example: hoist plan --parameters 70e9 --world 8 --device-memory 70GiB --pinned-memory 200GiB --nvme-read 12 "
      "--nvme-write 6 --host-to-device 50 --device-to-host 50 --network 200 --host-memory 60 --device-bandwidth 2000 "
      "--tokens 16384 --tflops 400");
  return {command, [arguments] { return plan(*arguments); }};
}

}  // namespace hoist::cli
