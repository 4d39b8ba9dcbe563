// SPDX-License-Identifier: Apache-2.0
// hoist bench optimizer: compares updates with the memory's speed, and a whole step with a drive's.
#include <algorithm>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/measure/kernels.hpp>
#include <hoist/measure/scratch_file.hpp>
#include <hoist/measure/statistics.hpp>
#include <hoist/measure/streamed_step.hpp>
#include <hoist/optim_cpu/update.hpp>

#include "commands.hpp"
#include "interrupt.hpp"
#include "model_question.hpp"
#include "output.hpp"
#include "progress.hpp"
#include "storage.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;
using measure::Interval;
using measure::KernelCase;
using measure::KernelResult;
using measure::median_text;
using measure::StreamedStepResult;
using optim::OptimizerKind;
using optim::OptimizerOptions;

struct BenchOptimizerArguments {
  std::string path;  // empty: kernels only
  std::string size = "1050MiB";
  std::string only;
  std::int64_t pairs = 31;
  std::int64_t step_pairs = 0;  // 0: as many
  std::int64_t threads = 0;
  std::string parameters = "200000000";
  std::string pinned = "512MiB";
  std::string block_size = "1MiB";
  std::int64_t queue_depth = 16;
  std::string mixed_block_size;        // empty: block_size
  std::int64_t mixed_queue_depth = 0;  // 0: queue_depth
  std::int64_t sub_group = 256 * 1024;
  std::int64_t buffers = 8;
  std::string json;
  bool quiet = false;
};

struct Kernel {
  KernelCase what;
  double target = 0;  // share of the stream's speed; 0: no target
};

std::string_view master_name(const KernelCase& what) {
  if (what.master == DType::fp16) return "fp32 beside fp16";
  if (what.master == DType::bf16 && what.optimizer.remainder == RemainderType::int8) return "24-bit split";
  return what.master == DType::fp32 ? "fp32" : "split";
}

// "AdamW, split master, fp32 moments, bf16 gradient"
std::string title(const KernelCase& what) {
  std::string text = std::string(optim::optimizer_name(what.optimizer.kind));
  const optim::StateForm state = optim::state_form(what.optimizer);
  if (state.state == optim::OptimizerState::momentum) text += " with momentum";
  text += fmt::format(", {} master", master_name(what));
  if (optim::moment_count(state.state) > 0) text += fmt::format(", {} moments", moment_type_name(state.moments));
  text += fmt::format(", {} gradient", dtype_name(what.gradient));
  if (!what.instruction_set.empty()) text += ", " + what.instruction_set;
  if (what.checksum) text += ", checksums";
  return text;
}

OptimizerOptions bench_options(OptimizerKind kind, MomentType moments, RemainderType remainder = RemainderType::int16) {
  OptimizerOptions options = optim::default_options(kind);
  options.learning_rate = 1e-5;
  options.moments = moments;
  options.remainder = remainder;
  return options;
}

// Every form of master and moments that AdamW's state can have, each with the gradient that comes with its weights.
std::vector<KernelCase> adamw_forms(const std::string& instruction_set) {
  std::vector<KernelCase> all;
  for (const DType master : {DType::fp32, DType::bf16, DType::fp16}) {
    for (const RemainderType remainder : {RemainderType::int16, RemainderType::int8}) {
      if (master != DType::bf16 && remainder == RemainderType::int8) continue;
      for (const MomentType moments : {MomentType::fp32, MomentType::bf16, MomentType::fp8}) {
        all.push_back({.optimizer = bench_options(OptimizerKind::adamw, moments, remainder),
                       .master = master,
                       .gradient = master,
                       .instruction_set = instruction_set});
      }
    }
  }
  return all;
}

// Beside a split master and a bf16 gradient; the last one with a master of 24 bits.
std::vector<KernelCase> other_forms(OptimizerKind kind, double momentum = 0) {
  std::vector<KernelCase> all;
  const bool keeps = kind != OptimizerKind::sgd || momentum != 0;
  for (const MomentType moments : {MomentType::fp32, MomentType::bf16, MomentType::fp8})
    if (keeps || moments == MomentType::fp32) all.push_back({.optimizer = bench_options(kind, moments)});
  all.push_back({.optimizer = bench_options(kind, keeps ? MomentType::fp8 : MomentType::fp32, RemainderType::int8)});
  for (KernelCase& one : all) one.optimizer.momentum = momentum;
  return all;
}

// Target of AdamW's update as a share of the stream's speed. 0: no target.
double target_of(const KernelCase& what) {
  const OptimizerOptions& options = what.optimizer;
  if (options.kind != OptimizerKind::adamw) return 0;
  if (what.checksum) {
    if (options.moments != MomentType::fp32) return 0;
    return what.instruction_set.empty() ? 0.88 : 0.75;
  }
  if (!what.instruction_set.empty()) return 0;
  if (options.moments == MomentType::fp8 || options.remainder == RemainderType::int8) return 0;
  if (what.master == DType::fp32 && what.gradient == DType::fp32 && options.moments == MomentType::fp32) return 0.95;
  if (what.master != DType::bf16 || what.gradient != DType::bf16) return 0;
  return options.moments == MomentType::fp32 ? 0.92 : 0.80;
}

// The kernel that training with state on NVMe runs by default. The verdict is about this one.
bool is_usual(const KernelCase& what) {
  const OptimizerOptions& options = what.optimizer;
  return options.kind == OptimizerKind::adamw && what.checksum && what.instruction_set.empty() &&
         options.moments == MomentType::fp32;
}

std::vector<Kernel> kernels() {
  std::vector<KernelCase> cases = adamw_forms("");
  const auto add = [&](const std::vector<KernelCase>& more) { cases.insert(cases.end(), more.begin(), more.end()); };
  const OptimizerOptions adamw = bench_options(OptimizerKind::adamw, MomentType::fp32);
  const OptimizerOptions all_of_8_bits = bench_options(OptimizerKind::adamw, MomentType::fp8, RemainderType::int8);
  add({{.optimizer = adamw, .gradient = DType::fp32},
       {.optimizer = adamw, .gradient = DType::fp16},
       {.optimizer = adamw, .checksum = true},
       {.optimizer = all_of_8_bits, .checksum = true}});
  add(other_forms(OptimizerKind::adam));
  add(other_forms(OptimizerKind::adagrad));
  add(other_forms(OptimizerKind::lion));
  add(other_forms(OptimizerKind::sgd, 0.9));
  add(other_forms(OptimizerKind::sgd));
  const auto sets = optim::supported_instruction_sets();
  if (std::ranges::find(sets, "AVX2") != sets.end() && sets.front() != "AVX2") {
    add(adamw_forms("AVX2"));
    add({{.optimizer = adamw, .instruction_set = "AVX2", .checksum = true}});
  }
  std::vector<Kernel> all;
  for (const KernelCase& one : cases) all.push_back({one, target_of(one)});
  return all;
}

struct BenchOptimizerReport {
  std::vector<Kernel> kernels;
  std::vector<KernelResult> results;
  std::optional<StreamedStepResult> step;
  double step_target = 1.05;  // target: time of a step over the time of the same bytes mixed
};

void check_range(const std::string& option, std::int64_t value, std::int64_t min, std::int64_t max) {
  if (value < min || value > max) throw UsageError(fmt::format("{} {}: must be {} to {}", option, value, min, max));
}

void check(const BenchOptimizerArguments& arguments) {
  check_range("--pairs", arguments.pairs, 1, 10000);
  check_range("--step-pairs", arguments.step_pairs, 0, 10000);
  check_range("--threads", arguments.threads, 0, 4096);
  const std::uint64_t parameters = parameter_count(arguments.parameters);
  check_range("--parameters", static_cast<std::int64_t>(parameters), 16 * 1024, 1'000'000'000'000);
  check_queue_depth("--queue-depth", arguments.queue_depth);
  check_range("--sub-group", arguments.sub_group, 1, 1'000'000'000);
  check_range("--buffers", arguments.buffers, 3, 1024);
  check_block_bytes("--block-size", parse_size_option("--block-size", arguments.block_size));
  if (!arguments.mixed_block_size.empty())
    check_block_bytes("--mixed-block-size", parse_size_option("--mixed-block-size", arguments.mixed_block_size));
  if (arguments.mixed_queue_depth != 0) check_queue_depth("--mixed-queue-depth", arguments.mixed_queue_depth);
  parse_size_option("--size", arguments.size);
  parse_size_option("--pinned", arguments.pinned);
  const std::vector<Kernel> all = kernels();
  const bool some = std::ranges::any_of(
      all, [&](const Kernel& kernel) { return title(kernel.what).find(arguments.only) != std::string::npos; });
  if (!some && arguments.path.empty()) {
    throw UsageError(
        fmt::format("--only \"{}\": there is no such kernel; leave the option out to measure all", arguments.only));
  }
  // Checked first, because the kernels take minutes.
  if (!arguments.path.empty()) measure::check_streamed_step(arguments.path, parameters);
}

void measure_kernels(const BenchOptimizerArguments& arguments, const measure::StopFlag* stop, ProgressStyle style,
                     BenchOptimizerReport& report) {
  for (const Kernel& kernel : kernels()) {
    if (title(kernel.what).find(arguments.only) == std::string::npos) continue;
    const auto pairs = static_cast<unsigned>(arguments.pairs);
    Progress progress(
        {.what = title(kernel.what) + ", pair", .unit = ProgressOptions::Unit::count, .total = pairs, .style = style});
    report.results.push_back(
        measure::compare_kernel(kernel.what, {.state_bytes = parse_size_option("--size", arguments.size),
                                              .pairs = pairs,
                                              .threads = static_cast<unsigned>(arguments.threads),
                                              .stop = stop,
                                              .progress = [&](unsigned done) { progress.update(done); }}));
    report.kernels.push_back(kernel);
  }
}

std::uint64_t mixed_block_bytes(const BenchOptimizerArguments& arguments) {
  return arguments.mixed_block_size.empty() ? 0 : parse_size_option("--mixed-block-size", arguments.mixed_block_size);
}

void measure_step(const BenchOptimizerArguments& arguments, const measure::StopFlag* stop, ProgressStyle style,
                  BenchOptimizerReport& report) {
  if (arguments.path.empty()) return;
  const auto pairs = static_cast<unsigned>(arguments.step_pairs == 0 ? arguments.pairs : arguments.step_pairs);
  Progress progress({.what = "a step and mixed transfers in turn, pair",
                     .unit = ProgressOptions::Unit::count,
                     .total = pairs,
                     .style = style});
  report.step = measure::compare_streamed_step({.directory = arguments.path,
                                                .optimizer = {.learning_rate = 1e-5},
                                                .parameters = parameter_count(arguments.parameters),
                                                .pinned_bytes = parse_size_option("--pinned", arguments.pinned),
                                                .block_bytes = parse_size_option("--block-size", arguments.block_size),
                                                .queue_depth = static_cast<unsigned>(arguments.queue_depth),
                                                .mixed_block_bytes = mixed_block_bytes(arguments),
                                                .mixed_queue_depth = static_cast<unsigned>(arguments.mixed_queue_depth),
                                                .piece_parameters = static_cast<std::uint64_t>(arguments.sub_group),
                                                .buffer_count = static_cast<unsigned>(arguments.buffers),
                                                .pairs = pairs,
                                                .stop = stop,
                                                .progress = [&](unsigned done) { progress.update(done); }});
}

bool reaches(const KernelResult& result, double target) {
  return measure::is_at_least(target, result.ratios, result.control_ratios);
}

Json kernel_json(const Kernel& kernel, const KernelResult& result) {
  const optim::StateForm state = optim::state_form(kernel.what.optimizer);
  Json json{{"optimizer", optim::optimizer_name(kernel.what.optimizer.kind)},
            {"master", master_name(kernel.what)},
            {"moments", optim::moment_count(state.state) == 0 ? Json(nullptr) : Json(moment_type_name(state.moments))},
            {"gradient", dtype_name(kernel.what.gradient)},
            {"ratio_to_stream", measure::median(result.ratios)},
            {"limit", result.limit()},
            {"interval", interval_json(result.ratios)},
            {"control_interval", interval_json(result.control_ratios)},
            {"in_cache_ratio", result.in_cache_ratio},
            {"division_ratio", result.division_ratio == 0 ? Json(nullptr) : Json(result.division_ratio)},
            {"target", kernel.target == 0 ? Json(nullptr) : Json(kernel.target)},
            {"holds", kernel.target == 0 ? Json(nullptr) : Json(reaches(result, kernel.target))}};
  json["momentum"] = kernel.what.optimizer.momentum;
  json["checksum"] = kernel.what.checksum;
  json["instruction_set"] = result.instruction_set;
  json["parameters"] = result.parameters;
  json["threads"] = result.threads;
  json["pairs"] = result.ratios.size();
  json["bytes_per_parameter"] = result.traffic_bytes;
  json["gb_per_s"] = result.gigabytes_per_second();
  json["stream"] = result.stream_prefetches ? "prefetching" : "plain";
  return json;
}

Json step_json(const StreamedStepResult& step, double target) {
  return {{"ratio_to_mixed_io", measure::median(step.ratios)},
          {"interval", interval_json(step.ratios)},
          {"bytes_read_per_parameter", step.bytes_read_per_parameter()},
          {"bytes_written_per_parameter", step.bytes_written_per_parameter()},
          {"control_interval", interval_json(step.control_ratios)},
          {"target", target},
          {"holds", measure::is_at_most(target, step.ratios, step.control_ratios)},
          {"parameters", step.parameters},
          {"mixed", {{"block_size", step.mixed_block_bytes}, {"queue_depth", step.mixed_queue_depth}}},
          {"pairs", step.ratios.size()},
          {"seconds", measure::median(step.step_seconds)},
          {"update_seconds", measure::median(step.update_seconds)},
          {"engine", step.description}};
}

// For people: how fast the usual update is, why not faster, and when a GPU does not wait for it.
struct UpdateSpeed {
  double parameters_per_second = 0;
  std::string limit;
  unsigned threads = 0;
  // A step of t tokens computes 6 t FLOP a parameter (forward and backward), while the update takes its time once.
  double hidden_from_tokens() const { return kFlopPerSecond / (6 * parameters_per_second); }
  static constexpr double kFlopPerSecond = 400e12;  // an H100 on 16-bit products, as trainings reach it
};

std::optional<UpdateSpeed> speed_of(const BenchOptimizerReport& report) {
  for (std::size_t i = 0; i < report.kernels.size(); ++i) {
    const KernelResult& result = report.results[i];
    if (!is_usual(report.kernels[i].what)) continue;
    return UpdateSpeed{
        .parameters_per_second = static_cast<double>(result.parameters) / measure::median(result.update_seconds),
        .limit = result.limit(),
        .threads = result.threads};
  }
  return std::nullopt;
}

Json speed_json(const std::optional<UpdateSpeed>& speed) {
  if (!speed) return nullptr;
  return {{"parameters_per_second", speed->parameters_per_second},
          {"limit", speed->limit},
          {"threads", speed->threads},
          {"hidden_from_tokens", speed->hidden_from_tokens()},
          {"gpu_flop_per_second", UpdateSpeed::kFlopPerSecond}};
}

std::string speed_text(const UpdateSpeed& speed) {
  const std::string why = speed.limit == "memory"
                              ? "memory: more cores would change little"
                              : fmt::format("the cores ({}): this memory could feed more of them", speed.limit);
  return fmt::format(
      "\nAdamW with 16-bit weights and checksums, as trainings on NVMe run it:\n"
      "  {:.0f} million parameters a second with {}\n"
      "  limited by {}\n"
      "  a GPU that computes {:.0f} TFLOP/s does not wait for it in steps of {:.0f} tokens or more\n",
      speed.parameters_per_second / 1e6, counted(speed.threads, "thread"), why, UpdateSpeed::kFlopPerSecond / 1e12,
      speed.hidden_from_tokens());
}

Json to_json(const BenchOptimizerReport& report) {
  Json json{{"kernels", Json::array()}};
  for (std::size_t i = 0; i < report.kernels.size(); ++i)
    json["kernels"].push_back(kernel_json(report.kernels[i], report.results[i]));
  json["streamed_step"] = report.step ? step_json(*report.step, report.step_target) : Json(nullptr);
  json["verdict"] = speed_json(speed_of(report));
  json["machine"] = machine_json();
  return json;
}

std::string to_text(const BenchOptimizerReport& report) {
  std::string text;
  if (!report.kernels.empty()) {
    std::vector<std::vector<std::string>> rows{
        {"", "of the stream [95 %]", "control", "in cache", "division", "limit", "GB/s", "wanted"}};
    for (std::size_t i = 0; i < report.kernels.size(); ++i) {
      const KernelResult& result = report.results[i];
      const double target = report.kernels[i].target;
      const Interval control = measure::median_interval(result.control_ratios);
      rows.push_back({title(report.kernels[i].what), median_text(result.ratios),
                      fmt::format("[{:.3f}, {:.3f}]", control.low, control.high),
                      fmt::format("{:.2f}", result.in_cache_ratio),
                      result.division_ratio == 0 ? "" : fmt::format("{:.2f}", result.division_ratio), result.limit(),
                      fmt::format("{:.1f}", result.gigabytes_per_second()),
                      target == 0 ? "" : fmt::format("{:.2f}{}", target, reaches(result, target) ? "" : ", missed")});
    }
    const KernelResult& first = report.results.front();
    text += fmt::format("updates against a stream kernel of the same traffic: {} parameters, {} pairs, {}, {}\n\n",
                        first.parameters, first.ratios.size(), counted(first.threads, "thread"), first.instruction_set);
    text += columns(rows);
    if (const auto verdict = speed_of(report)) text += speed_text(*verdict);
  }
  if (report.step) {
    const StreamedStepResult& step = *report.step;
    text += fmt::format("{}a step of {} parameters against as many bytes mixed ({} x {}), {} pairs\n\n",
                        text.empty() ? "" : "\n", step.parameters, format_bytes(step.mixed_block_bytes),
                        step.mixed_queue_depth, step.ratios.size());
    text += columns(
        {{"time of a step / of the bytes", median_text(step.ratios)},
         {"control, bytes / bytes", median_text(step.control_ratios)},
         {"bytes a parameter", fmt::format("{:.3f} read, {:.3f} written", step.bytes_read_per_parameter(),
                                           step.bytes_written_per_parameter())},
         {"seconds of a step", fmt::format("{:.3f}, {:.3f} of them updating", measure::median(step.step_seconds),
                                           measure::median(step.update_seconds))}});
    for (const std::string& line : step.description) text += "  " + line + "\n";
  }
  return text;
}

int bench_optimizer(const BenchOptimizerArguments& arguments) {
  try {
    check(arguments);
    check_json(arguments.json);
    const InterruptGuard interrupt;
    const ProgressStyle style = arguments.quiet ? ProgressStyle::quiet : ProgressStyle::automatic;
    BenchOptimizerReport report;
    measure_kernels(arguments, interrupt.flag(), style, report);
    measure_step(arguments, interrupt.flag(), style, report);
    say("{}", to_text(report));
    write_json(arguments.json, to_json(report));
    return kOk;
  } catch (const BudgetError& error) {
    complain("hoist bench optimizer: {}; raise --pinned, or lower --parameters or --size\n", error.what());
    return kBadInput;
  }
}

}  // namespace

Command add_bench_optimizer(CLI::App& bench) {
  CLI::App* command =
      bench.add_subcommand("optimizer", "Compare updates with memory bandwidth, and a whole step with a drive");
  auto arguments = std::make_shared<BenchOptimizerArguments>();
  command->add_option("--path", arguments->path, "A directory on the drive for the whole step [kernels only]");
  command->add_option("--size", arguments->size, "Bytes of the arrays that kernels go through [1050MiB]");
  command->add_option("--only", arguments->only, "Kernels whose title contains this text, for example \"AdamW\" [all]");
  command->add_option("--pairs", arguments->pairs, "Alternating pairs of legs [31]");
  command->add_option("--step-pairs", arguments->step_pairs,
                      "Alternating pairs of legs of the whole step [as --pairs]");
  command->add_option("--threads", arguments->threads, "Threads of the kernels [one a processor]");
  command->add_option("--parameters", arguments->parameters,
                      "Parameters of the model whose step is measured (1e9, 350M) [200000000]");
  command->add_option("--pinned", arguments->pinned, "Pinned memory of that model, gradients included [512MiB]");
  command->add_option("--block-size", arguments->block_size, "Bytes of one transfer [1MiB]");
  command->add_option("--queue-depth", arguments->queue_depth, "Transfers in flight [16]");
  command->add_option("--mixed-block-size", arguments->mixed_block_size,
                      "Bytes of one transfer when the same bytes are moved without a step [as --block-size]");
  command->add_option("--mixed-queue-depth", arguments->mixed_queue_depth,
                      "Transfers in flight when the same bytes are moved without a step [as --queue-depth]");
  command->add_option("--sub-group", arguments->sub_group, "Parameters that are updated as one piece [262144]");
  command->add_option("--buffers", arguments->buffers, "Pieces in memory at a time [8]");
  command->add_option("--json", arguments->json, "Write the results as JSON to this file");
  command->add_flag("--quiet", arguments->quiet, "No progress");
  command->footer("Example: hoist bench optimizer --path /local_nvme --json optimizer.json");
  return {command, [arguments] { return bench_optimizer(*arguments); }};
}

}  // namespace hoist::cli
