// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/memory/unit_regions.hpp>
#include <hoist/zero/model.hpp>
#include <hoist/zero/options.hpp>

namespace hoist {

namespace {

void refuse(bool wrong, const char* key, const std::string& problem) {
  if (wrong) throw ConfigError(key, problem);
}

void make_absolute(std::string& path) {
  if (!path.empty()) path = absolute_path(path);
}

// For programs that fill the structs themselves, from other languages for example.
template <typename Enum>
void refuse_beyond(Enum last, Enum value, const char* key) {
  refuse(value > last, key, fmt::format("{} is none of its values", static_cast<unsigned>(value)));
}

// A value that no name stands for, as a caller of another language can make one.
void check_names(const EngineOptions& options) {
  refuse_beyond(Placement::nvme, options.parameters, "zero_optimization.offload_param.device");
  refuse_beyond(Placement::nvme, options.optimizer, "zero_optimization.offload_optimizer.device");
  refuse_beyond(tiers::Durability::none, options.durability, "hoist.durability");
  refuse_beyond(MicroBatchOrder::vertical, options.micro_batch_order, "hoist.micro_batch_order");
  refuse_beyond(UpdateMode::backward, options.update_mode, "hoist.update_mode");
  if (options.weights_dtype) refuse_beyond(DType::fp32, *options.weights_dtype, "bf16.enabled");
}

void check_placement(const EngineOptions& options, const RuntimeOptions& runtime) {
  refuse(options.stage < 0 || options.stage > 3, "zero_optimization.stage",
         fmt::format("there is no stage {}: 0 to 3", options.stage));
  refuse(options.stage < 3 && options.parameters != Placement::device, "zero_optimization.offload_param.device",
         fmt::format("stage {} keeps all weights on the device; use stage 3 to offload them", options.stage));
  refuse(options.uses_nvme() && options.store_directory.empty(), "zero_optimization.offload_optimizer.nvme_path",
         "state is placed on NVMe, but no path is given; name a directory on the drive");
  refuse(!options.stripe_directories.empty() && options.store_directory.empty(),
         "zero_optimization.offload_optimizer.nvme_path", "further drives are given, but no first one");
  const double ratio = options.optimizer_offload_ratio;
  refuse(!(ratio >= 0 && ratio <= 1), "zero_optimization.offload_optimizer.ratio", "a share is from 0 to 1");
  for (const auto& [key, share] : {std::pair("hoist.optimizer_pinned_fraction", options.optimizer_pinned_fraction),
                                   std::pair("hoist.parameters_pinned_fraction", options.parameters_pinned_fraction)})
    refuse(share && !(*share >= 0 && *share <= 1), key, "a fraction is from 0 to 1");
  const bool without_weights =
      detail::asks_for_device_only(runtime, options) && options.parameters != Placement::device;
  refuse(without_weights && options.optimizer == Placement::device, "zero_optimization.offload_optimizer.device",
         "optimizer states on a GPU are updated there, which needs the weights there too; use \"cpu\" or \"nvme\", or "
         "leave offload_param out");
  refuse(without_weights, "zero_optimization.offload_optimizer.ratio",
         fmt::format("with {} some optimizer states are on the GPU and updated there, which needs the weights there "
                     "too; use 1, or leave offload_param out",
                     ratio));
}

void check_gathering_groups(const EngineOptions& options, int world_size) {
  const int ranks = options.secondary_shard_ranks;
  refuse(ranks < 1 || (ranks < world_size && world_size % ranks != 0), "zero_optimization.zero_hpz_partition_size",
         fmt::format("{} ranks cannot be cut into groups of {}; use a number that divides them, usually the ranks of a "
                     "machine, or 1",
                     world_size, ranks));
  refuse(ranks > 1 && options.stage < 3, "zero_optimization.zero_hpz_partition_size",
         fmt::format("stage {} keeps all weights gathered; use stage 3, or leave this key out", options.stage));
}

void check_commits(const EngineOptions& options) {
  refuse(options.commit_every < 1, "hoist.durability", "steps are committed every 1 or more");
  refuse(options.caller_state_bytes_max > kGiB, "hoist.caller_state_max", "must be at most 1 GiB");
  refuse(options.keep_steps > tiers::kCheckpointsMax, "hoist.keep_steps",
         fmt::format("at most {} checkpoints can be kept", tiers::kCheckpointsMax));
  refuse(!options.mirror.directory.empty() && options.keep_steps >= tiers::kCheckpointsMax, "hoist.keep_steps",
         fmt::format("with hoist.mirror at most {} checkpoints can be kept", tiers::kCheckpointsMax - 1));
}

void check_counts(const EngineOptions& options) {
  refuse(options.update_buffer_count < 3, "zero_optimization.offload_optimizer.buffer_count",
         fmt::format("{} buffers cannot read, update and write at once; use at least 3", options.update_buffer_count));
  refuse(options.staging_buffer_count < 1, "zero_optimization.offload_param.buffer_count",
         "at least 1 buffer is needed");
  refuse(options.sub_group_elements < 1, "zero_optimization.sub_group_size", "at least 1 element is needed");
  refuse(options.micro_batches_max < 1, "gradient_accumulation_steps", "at least 1");
}

}  // namespace

// A device that carries out steps itself has kernels for state of 16 and 32 bits.
void check(const optim::OptimizerOptions& group, const EngineOptions& options, const RuntimeOptions& runtime) {
  optim::check(group);
  // The update stores an accumulator below the smallest normal float as 0.
  const bool begins_at_0 = group.kind == optim::OptimizerKind::adagrad &&
                           static_cast<float>(group.initial_accumulator) < std::numeric_limits<float>::min();
  const bool divides = begins_at_0 || optim::state_of(group) == optim::OptimizerState::adam;
  refuse(divides && static_cast<float>(group.epsilon) == 0, "optimizer.params.eps",
         "with 0, a parameter whose gradients were all 0 would become 0/0; use 1e-8 or another positive number");
  const bool on_device = detail::asks_for_device_only(runtime, options);
  constexpr std::string_view kProblem =
      "optimizer states on a GPU are updated there, and there is no kernel for state of 8 bits yet; offload them, "
      "all of them (offload_optimizer.ratio 1), to \"cpu\" or \"nvme\"";
  refuse(on_device && group.moments == MomentType::fp8, "hoist.moments_dtype", std::string(kProblem));
  refuse(on_device && group.remainder == RemainderType::int8, "hoist.remainder_dtype", std::string(kProblem));
}

void check(const Model& model, const EngineOptions& options) {
  if (model.units().empty()) throw UsageError("the engine has no units");
  if (!options.weights_dtype) return;
  const DType wanted = *options.weights_dtype;
  for (const ParameterSpec& spec : model.parameters()) {
    if (!spec.trainable || spec.dtype == DType::fp32 || spec.dtype == wanted) continue;
    const std::string key =
        wanted == DType::fp32 ? "bf16.enabled is false" : fmt::format("{}.enabled", dtype_name(wanted));
    throw UsageError(fmt::format(
        "parameter '{}' is {}, but the configuration asks for {} weights ({}); declare it so, or change the "
        "configuration",
        spec.name, dtype_name(spec.dtype), dtype_name(wanted), key));
  }
  // A loss scale that the program does not know of would shrink its gradients without a word.
  const auto scales_gradient = [](const ParameterSpec& spec) { return spec.trainable && spec.dtype == DType::fp16; };
  refuse(
      wanted == DType::fp16 && std::ranges::none_of(model.parameters(), scales_gradient), "fp16.enabled",
      "no trainable parameter of the program is fp16: declare its matrices so (ParameterSpec::dtype) and multiply its "
      "loss by Engine::loss_scale(), or remove the section fp16");
}

void check(const RuntimeOptions& options) {
  if (options.device) refuse_beyond(platform::DeviceKind::cuda, *options.device, "hoist.device");
  refuse_beyond(aio::BackendKind::null, options.aio_backend, "hoist.io_engine");
  refuse_beyond(CommunicatorKind::mpi, options.communicator, "hoist.communicator");
  refuse(options.comm_timeout.count() <= 0, "hoist.comm_timeout_seconds", "must be positive");
  refuse(options.aio_answer_timeout.count() <= 0, "hoist.io_answer_timeout_seconds", "must be positive");
}

void check(const EngineOptions& options, const RuntimeOptions& runtime, int world_size) {
  check_names(options);
  check_placement(options, runtime);
  for (const OptionProblem& found : problems_between(options)) throw ConfigError(found.key, found.problem);
  check_gathering_groups(options, world_size);
  check_commits(options);
  check_counts(options);
  check(options.learning_rate_schedule);
  check(options.loss_scale);
  check(options.optimizer_defaults, options, runtime);
  refuse(!(options.gradient_clipping >= 0), "gradient_clipping", "must be 0 (none) or positive");
}

std::vector<OptionProblem> problems_between(const EngineOptions& options) {
  std::vector<OptionProblem> problems;
  const auto refuse = [&](bool wrong, const char* key, const char* other_key, std::string problem) {
    if (wrong) problems.push_back({key, std::move(problem), other_key});
  };
  constexpr auto kSpill = "hoist.gradient_spill", kMode = "hoist.update_mode", kKeep = "hoist.keep_steps",
                 kMirror = "hoist.mirror.path", kDurability = "hoist.durability", kZero = "zero_optimization",
                 kOptimizer = "zero_optimization.offload_optimizer.device";
  const bool spills = options.gradient_spill_units != 0u, backward = detail::hands_gradients_on(options);
  refuse(spills && !options.uses_nvme(), kSpill, kOptimizer,
         fmt::format("gradients go to NVMe only beside optimizer state or weights that are there; set {} to \"nvme\", "
                     "which frees more pinned memory",
                     kOptimizer));
  refuse(spills && backward, kSpill, kMode,
         "update mode \"backward\" keeps no gradients that could go to NVMe; leave this key out, or use \"forward\"");

  const bool stores_nothing = options.uses_nvme() && options.durability == tiers::Durability::none;
  const bool has_no_store = options.store_directory.empty();
  refuse(options.keep_steps > 0 && has_no_store, kKeep, kZero,
         "there is no store for named checkpoints; set nvme_path or hoist.checkpoint_path");
  refuse(options.keep_steps > 0 && stores_nothing, kKeep, kDurability,
         "durability \"none\" keeps no checkpoints; use \"step\" or {\"every\": N}");
  const bool mirrors = !options.mirror.directory.empty();
  refuse(mirrors && has_no_store, kMirror, kZero, "there is no store to copy; set nvme_path or hoist.checkpoint_path");
  refuse(mirrors && stores_nothing, kMirror, kDurability,
         "with durability \"none\" there are no commits to copy; use \"step\"");

  refuse((backward || detail::updates_under_forward(options)) && options.optimizer == Placement::device, kMode,
         kOptimizer,
         fmt::format("\"{}\" needs offloaded optimizer states; set {} to \"cpu\" or \"nvme\"",
                     update_mode_name(options.resolved_update_mode()), kOptimizer));
  refuse(backward && options.gradient_clipping > 0, kMode, "gradient_clipping",
         "\"backward\" updates units before it knows the norm that clipping needs; set gradient_clipping to 0, or use "
         "\"forward\"");
  refuse(backward && (options.loss_scale.dynamic || options.loss_scale.scale != 1), kMode, "fp16",
         "\"backward\" cannot skip a step, which loss scaling requires; use \"forward\", or bf16.enabled instead of "
         "fp16.enabled");
  return problems;
}

const char* placement_name(Placement placement) {
  static constexpr std::array kNames{"device", "pinned memory", "NVMe"};
  return kNames.at(static_cast<std::size_t>(placement));
}

const char* placement_key(Placement placement) {
  static constexpr std::array kKeys{"none", "cpu", "nvme"};
  return kKeys.at(static_cast<std::size_t>(placement));
}

const char* update_mode_name(UpdateMode mode) {
  static constexpr std::array kNames{"auto", "step", "forward", "backward"};
  return kNames.at(static_cast<std::size_t>(mode));
}

UpdateMode EngineOptions::resolved_update_mode() const {
  if (update_mode != UpdateMode::automatic) return update_mode;
  return optimizer == Placement::device ? UpdateMode::step : UpdateMode::forward;
}

std::vector<std::string> EngineOptions::drive_directories() const {
  std::vector<std::string> directories{store_directory};
  directories.insert(directories.end(), stripe_directories.begin(), stripe_directories.end());
  return directories;
}

void make_paths_absolute(RuntimeOptions& options) { make_absolute(options.trace_path); }

void make_paths_absolute(EngineOptions& options) {
  make_absolute(options.store_directory);
  for (std::string& directory : options.stripe_directories) make_absolute(directory);
  make_absolute(options.mirror.directory);
  make_absolute(options.metrics_path);
}

std::string describe_commits(const EngineOptions& options) {
  if (options.store_directory.empty()) return "none: there is no store, so nothing can be saved or resumed";
  const bool nvme = options.uses_nvme();
  if (nvme && options.durability == tiers::Durability::none) return "none: the store cannot be resumed";
  const std::string every =
      options.commit_every == 1 ? "every step" : fmt::format("every {} steps", options.commit_every);
  return (nvme ? every : "when the program saves") +
         (options.keep_steps == 0 ? "" : fmt::format("; named checkpoints that stay: {}", options.keep_steps));
}

}  // namespace hoist
