// SPDX-License-Identifier: Apache-2.0
#include "arguments.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <hoist/config/setting.hpp>
#include <hoist/core/printable.hpp>
#include <hoist/core/units.hpp>

namespace hoist::gpt {

namespace {

constexpr int kExtentMax = 1 << 16;

}  // namespace

std::variant<Arguments, int> parse_arguments(int argc, const char* const* argv) {
  Arguments a;
  CLI::App app{"Trains a byte-level GPT whose state lives on NVMe, in pinned memory or on the device, as FILE says."};
  app.option_defaults()->always_capture_default();
  app.set_help_flag("-h,--help", "Print this and exit");
  const CLI::Range extent(1, kExtentMax);
  // CLI11 would wrap "-1" around to the largest count.
  const CLI::Validator count([](std::string& text) { return text.starts_with('-') ? "is negative" : std::string(); },
                             "");
  // CLI::Range takes "nan", and prints its bounds in all their digits.
  const CLI::Validator rate(
      [](const std::string& text) {
        double value = -1;
        const bool reads = CLI::detail::lexical_cast(text, value);
        return reads && std::isfinite(value) && value >= 0 ? std::string()
                                                           : text + " is not a finite number of at least 0";
      },
      "");
  app.add_option("--config", a.config, "DeepSpeed configuration: where state lives, budgets, optimizer")
      ->required()
      ->type_name("FILE");
  app.add_option("--text", a.text, "What to learn; any file")->required()->type_name("FILE");
  app.add_option("--steps", a.steps, "Steps in total, those before a resume included")
      ->required()
      ->check(count)
      ->type_name("N");
  app.add_option("--layers", a.layers, "Blocks")->check(extent)->type_name("L");
  app.add_option("--width", a.width, "Width of the residual stream")->check(extent)->type_name("D");
  app.add_option("--heads", a.heads, "Attention heads; divides the width")->check(extent)->type_name("H");
  app.add_option("--context", a.context, "Bytes the model sees at once")->check(extent)->type_name("T");
  app.add_option("--batch", a.batch,
                 "Sequences per rank and micro-batch [train_micro_batch_size_per_gpu of FILE, else 8]")
      ->check(extent)
      ->type_name("B");
  app.add_option("--micro-batches", a.micro_batches,
                 "Micro-batches a step, their gradients added up [gradient_accumulation_steps of FILE, else 1]")
      ->check(extent)
      ->type_name("M");
  app.add_flag("--vertical", a.vertical,
               "Vertical order: each layer works through all micro-batches before the next layer does; weights and "
               "gradients move once a step, and the activations of all micro-batches stay in memory "
               "[hoist.micro_batch_order of FILE]");
  app.add_option("--seed", a.seed, "Seed of the initial weights and the batches")->check(count)->type_name("S");
  app.add_option("--learning-rate", a.learning_rate, "Learning rate after the warmup [optimizer.params.lr of FILE]")
      ->check(rate)
      ->type_name("R");
  app.add_option("--warmup", a.warmup, "Steps over which the learning rate rises to its value")
      ->check(count)
      ->type_name("N");
  // CLI::Transformer would take "7", too.
  const auto take_activations = [&a](const std::string& name) {
    const std::map<std::string, ActivationPolicy> policies{{"recompute", ActivationPolicy::recompute},
                                                           {"keep", ActivationPolicy::keep},
                                                           {"offload", ActivationPolicy::offload}};
    const auto policy = policies.find(name);
    if (policy == policies.end())
      throw CLI::ValidationError("--activations", name + " is not recompute, keep or offload");
    a.activations = policy->second;
  };
  app.add_option_function<std::string>(
         "--activations", take_activations,
         "How backward gets a block's activations: recompute (from its input, which stays in memory), keep (all stay "
         "in memory), offload (from its input, which waits in pinned memory)")
      ->default_str("recompute")
      ->type_name("A");
  app.add_option("--threads", a.threads, "Threads of the model's kernels; 0: every CPU")
      ->check(CLI::Range(0u, 4096u))
      ->type_name("N");
  app.add_option("--report", a.report, "Write what happened as JSON")->type_name("FILE.json");
  app.add_option("--units", a.units, "Only describe the model there, for hoist check --units")->type_name("FILE.json");
  app.add_flag("--resume", a.resume, "Continue from the store's newest commit");
  app.add_option("--from", a.from, "With --resume: continue from the step that was saved under this name")
      ->type_name("NAME");
  app.add_option("--save-every", a.save_every, "Save as step-N, each so many steps; hoist.keep_steps of them stay")
      ->check(count)
      ->type_name("N");
  app.add_option("--init", a.init, "Begin with these weights: safetensors, as hoist export writes them")
      ->type_name("DIR");
  for (CLI::Option* option : app.get_options()) {
    const std::string standard = option->get_default_str();
    if (!standard.empty() && !option->get_required())
      option->description(fmt::format("{} [{}]", option->get_description(), standard));
    option->default_str("");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fputs(printable(fmt::format("hoist-gpt: {} (see --help)\n", error.what())).c_str(), stderr);
    return kExitBadInput;
  }
  return a;
}

void check_shape(const Arguments& a) {
  if (a.width % a.heads != 0) {
    throw BadInputError(
        fmt::format("--heads {} does not divide --width {}: every head needs the same width", a.heads, a.width));
  }
  if (a.resume && !a.init.empty()) {
    throw BadInputError("--init begins a run and --resume continues one; pass one of them");
  }
  if (!a.from.empty() && !a.resume) throw BadInputError("--from names the step to continue from: it needs --resume");
}

RuntimeOptions runtime_options(const Config& config) {
  RuntimeOptions options = config.runtime;
  if (options.device.value_or(platform::DeviceKind::host) != platform::DeviceKind::host)
    throw BadInputError(fmt::format("{}: hoist.device is not \"host\": {}", config.origin(), kComputesOnCpu));
  options.device = platform::DeviceKind::host;
  return options;
}

namespace {

// The file's batch sizes, with those of the command line in their place.
TrainingOptions batch_sizes(const Arguments& a, const Config& config, int world_size) {
  if (!a.batch && !a.micro_batches) return config.check_world_size(world_size);
  Config asked = config;
  TrainingOptions& sizes = asked.training;
  if (a.batch) sizes.train_micro_batch_size_per_gpu = *a.batch;
  if (a.micro_batches) sizes.gradient_accumulation_steps = *a.micro_batches;
  if (sizes.train_micro_batch_size_per_gpu) {  // the two decide; where only one is given, the total may imply the other
    sizes.gradient_accumulation_steps = asked.micro_batches(world_size);
    sizes.train_batch_size.reset();
  }
  return asked.check_world_size(world_size);
}

int at_most_extent_max(std::uint64_t value, const char* what, const Config& config) {
  if (value > kExtentMax) {
    throw BadInputError(
        fmt::format("{}: {} {} are more than hoist-gpt takes: at most {}", config.origin(), value, what, kExtentMax));
  }
  return static_cast<int>(value);
}

// Names every batch size of the file that is not the one in effect.
void note_batch_sizes(const Arguments& a, const Config& config, int world_size, Settled& settled) {
  const TrainingOptions& file = config.training;
  const auto note = [&](const std::string& winner, const char* key, const std::optional<std::uint64_t>& of_file,
                        std::uint64_t in_effect) {
    if (of_file && *of_file != in_effect)
      settled.notes.push_back(fmt::format("{} over {} {} of {}", winner, key, *of_file, config.origin()));
  };
  const auto batch = static_cast<std::uint64_t>(settled.batch);
  const auto micro_batches = static_cast<std::uint64_t>(settled.micro_batches);
  if (a.batch)
    note(fmt::format("--batch {} wins", batch), "train_micro_batch_size_per_gpu", file.train_micro_batch_size_per_gpu,
         batch);
  if (a.micro_batches)
    note(fmt::format("--micro-batches {} wins", micro_batches), "gradient_accumulation_steps",
         file.gradient_accumulation_steps, micro_batches);
  const std::uint64_t samples = batch * micro_batches * static_cast<std::uint64_t>(world_size);
  note(fmt::format("{} samples a step (--batch {} x --micro-batches {} x {}) win", samples, batch, micro_batches,
                   counted(world_size, "rank")),
       "train_batch_size", file.train_batch_size, samples);
}

void settle_batch(const Arguments& a, const Config& config, int world_size, Settled& settled) {
  const TrainingOptions sizes = batch_sizes(a, config, world_size);
  const std::optional<std::uint64_t> batch = sizes.train_micro_batch_size_per_gpu;
  settled.micro_batches = at_most_extent_max(*sizes.gradient_accumulation_steps, "micro-batches a step", config);
  if (batch) settled.batch = at_most_extent_max(*batch, "samples per rank and micro-batch", config);
  note_batch_sizes(a, config, world_size, settled);
}

bool has_learning_rate(const Config& config) {
  return std::ranges::any_of(config.settings(), [](const ConfigSetting& setting) {
    return setting.row->path == "optimizer.params.lr" && setting.source == ConfigSetting::Source::file;
  });
}

void settle_learning_rate(const Arguments& a, const Config& config, Settled& settled) {
  if ((a.learning_rate || a.warmup > 0) &&
      !std::holds_alternative<ConstantRate>(config.engine.learning_rate_schedule)) {
    throw BadInputError(fmt::format(
        "{}: its section \"scheduler\" sets the learning rate of each step, so --learning-rate and --warmup "
        "would not have their effect: leave them out, or remove the section",
        config.origin()));
  }
  settled.learning_rate = config.engine.optimizer_defaults.learning_rate;
  if (!a.learning_rate || *a.learning_rate == settled.learning_rate) return;
  if (has_learning_rate(config))
    settled.notes.push_back(fmt::format("--learning-rate {} wins over optimizer.params.lr {} of {}", *a.learning_rate,
                                        settled.learning_rate, config.origin()));
  settled.learning_rate = *a.learning_rate;
}

}  // namespace

Settled settle(const Arguments& a, const Config& config, int world_size) {
  Settled settled;
  if (!config.runtime.device && platform::cuda_device_count() > 0)
    settled.notes.push_back(fmt::format("the GPU is not used: {}", kComputesOnCpu));
  settle_batch(a, config, world_size, settled);
  settle_learning_rate(a, config, settled);
  settled.vertical = a.vertical || config.engine.micro_batch_order == MicroBatchOrder::vertical;
  return settled;
}

}  // namespace hoist::gpt
