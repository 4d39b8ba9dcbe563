// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/config/detail/rules.hpp>
#include <hoist/core/named_file.hpp>
#include <hoist/core/open_file.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kParamDevice = "zero_optimization.offload_param.device";
constexpr std::string_view kParamPath = "zero_optimization.offload_param.nvme_path";
constexpr std::string_view kOptimizerDevice = "zero_optimization.offload_optimizer.device";
constexpr std::string_view kOptimizerPath = "zero_optimization.offload_optimizer.nvme_path";
constexpr std::string_view kRatio = "zero_optimization.offload_optimizer.ratio";

// "/data/" and "/data/." are the same place.
std::vector<std::string> plain_paths(const std::vector<std::string>& paths) {
  std::vector<std::string> plain;
  for (const std::string& path : paths) plain.push_back(plain_path(path));
  return plain;
}

// As written in the file: one path, or a list.
std::string quoted(const std::vector<std::string>& paths) {
  const std::string inside = fmt::format("\"{}\"", fmt::join(paths, "\", \""));
  return paths.size() == 1 ? inside : "[" + inside + "]";
}

class Rules {
 public:
  Rules(Draft& draft, ReadResult& read) : draft_(draft), read_(read) {}

  RuleNotes apply(RunLength run_length) {
    std::ranges::move(read_.warnings, std::back_inserter(notes_.warnings));
    drop_problems_of_parameters("optimizer.type", "optimizer.params.");
    drop_problems_of_parameters("scheduler.type", "scheduler.params.");
    if (!is_wrong("optimizer.type")) apply_optimizer(draft_, read_, notes_);
    old_offload(draft_.old_parameter_offload, "zero_optimization.cpu_offload_param", kParamDevice,
                draft_.engine.parameters);
    old_offload(draft_.old_optimizer_offload, "zero_optimization.cpu_offload", kOptimizerDevice,
                draft_.engine.optimizer);
    placements();
    pinned_fractions();
    gradient_spill();
    offload_ratio();
    buffers();
    store();
    durability();
    mirror();
    host_device_only();
    batch();
    formats();
    engine_rules();
    reports();
    apply_schedule(draft_, read_, run_length, notes_);
    remarks();
    return std::move(notes_);
  }

 private:
  bool says_true(std::string_view path) {
    const ConfigSetting* found = read_.setting(path);
    return found != nullptr && found->value == config::Value(true);
  }

  // A refused optimizer or schedule has other parameters; do not report those as well.
  void drop_problems_of_parameters(std::string_view type_key, std::string_view section) {
    if (!is_wrong(type_key)) return;
    std::erase_if(read_.problems, [&](const ConfigProblem& p) {
      return p.key.starts_with(section) && p.problem.starts_with(kUnknownKey);
    });
  }

  // cpu_offload: true is the section that replaced it, with device "cpu".
  void old_offload(bool asked_for, std::string_view old_key, std::string_view device_key, Placement& placement) {
    if (!asked_for) return;
    const std::string_view section = section_of(device_key);
    const bool both = std::ranges::any_of(read_.settings, [&](const ConfigSetting& s) {
      return s.row->path.starts_with(section) && s.source != ConfigSetting::Source::standard;
    });
    if (both) {
      read_.refuse(old_key, fmt::format("must not be combined with {}, which replaces it; keep the section",
                                        last_part(section)));
      return;
    }
    placement = Placement::pinned;
    const ConfigSetting* old_setting = read_.setting(old_key);
    if (ConfigSetting* device = read_.setting(device_key); device != nullptr && old_setting != nullptr) {
      *device = ConfigSetting{.row = device->row,
                              .value = std::string("cpu"),
                              .source = ConfigSetting::Source::file,
                              .line = old_setting->line,
                              .column = old_setting->column};
    }
    notes_.warnings.push_back(
        fmt::format("{} is deprecated; hoist reads it as {} with \"device\": \"cpu\"", old_key, last_part(section)));
  }

  void placements() {
    whole_weights();
    placement(draft_.engine.parameters, draft_.parameter_paths, kParamDevice, kParamPath);
    placement(draft_.engine.optimizer, draft_.optimizer_paths, kOptimizerDevice, kOptimizerPath);
    one_store();
    states_beside_weights();
  }

  // Shows a value that follows from other keys instead of the file's own. Where the file has none, offload_param is the
  // cause.
  void derive(std::string_view path, config::Value value) {
    ConfigSetting* found = read_.setting(path);
    const ConfigSetting* cause = read_.setting(kParamDevice);
    if (found == nullptr || cause == nullptr) return;
    found->value = std::move(value);
    if (found->source == ConfigSetting::Source::file) return;
    found->source = cause->source;
    found->line = cause->line;
    found->column = cause->column;
  }

  // As in DeepSpeed, below stage 3 keys about partitioned weights have no effect.
  void whole_weights() {
    EngineOptions& engine = draft_.engine;
    if (engine.stage == 3 || is_wrong("zero_optimization.stage")) return;
    if (engine.secondary_shard_ranks > 1) {
      notes_.warnings.push_back(fmt::format(
          "zero_optimization.zero_hpz_partition_size is not used: stage {} keeps all weights gathered, as in "
          "DeepSpeed",
          engine.stage));
      engine.secondary_shard_ranks = 1;
      derive("zero_optimization.zero_hpz_partition_size", std::int64_t{1});
    }
    if (engine.parameters == Placement::device) return;
    notes_.warnings.push_back(
        fmt::format("zero_optimization.offload_param is not used: stage {} keeps all weights on the device, as in "
                    "DeepSpeed; use stage 3 to offload them",
                    engine.stage));
    engine.parameters = Placement::device;
    draft_.parameter_paths.clear();
    derive(kParamDevice, std::string("none"));
  }

  // A record holds weights and optimizer state. Most of its bytes are state.
  void one_store() {
    const bool both = draft_.engine.parameters == Placement::nvme && draft_.engine.optimizer == Placement::nvme;
    if (!both || draft_.parameter_paths.empty() || draft_.optimizer_paths.empty() ||
        std::ranges::equal(draft_.parameter_paths, draft_.optimizer_paths, is_same_place))
      return;
    notes_.warnings.push_back(
        fmt::format("{} {} is not used: weights and optimizer states are stored together, in {} {}; a list of paths "
                    "spreads them over several drives",
                    kParamPath, quoted(draft_.parameter_paths), last_part(section_of(kOptimizerPath)),
                    quoted(draft_.optimizer_paths)));
    draft_.parameter_paths = draft_.optimizer_paths;
  }

  // A GPU updates the states in its memory, for which the weights must be there, too. States of offloaded weights are
  // therefore offloaded, unless the file chooses the host device, where the CPU updates states wherever they are.
  void states_beside_weights() {
    EngineOptions& engine = draft_.engine;
    if (engine.parameters == Placement::device || draft_.runtime.device == platform::DeviceKind::host) return;
    constexpr std::string_view kWhy =
        "a GPU can update states in its memory only where the weights are in it, too. The result has the same bits";
    const auto* const where = engine.parameters == Placement::nvme ? "nvme" : "cpu";
    if (engine.optimizer == Placement::device && !is_wrong(kOptimizerDevice)) {
      notes_.warnings.push_back(
          fmt::format("optimizer states are offloaded to \"{0}\", as {1} \"{0}\" offloads the weights: {2}", where,
                      kParamDevice, kWhy));
      engine.optimizer = engine.parameters;
      draft_.optimizer_paths = draft_.parameter_paths;
      derive(kOptimizerDevice, std::string(where));
    }
    if (engine.optimizer_offload_ratio == 1 || is_wrong(kRatio)) return;
    notes_.warnings.push_back(fmt::format("{} {} is read as 1, beside {} \"{}\": {}", kRatio,
                                          engine.optimizer_offload_ratio, kParamDevice, where, kWhy));
    engine.optimizer_offload_ratio = 1;
    derive(kRatio, 1.0);
  }

  void pinned_fractions() {
    EngineOptions& engine = draft_.engine;
    const auto is_unused = [&](std::string_view key, std::string_view section) {
      notes_.warnings.push_back(fmt::format("{} is not used: {}.device is not \"nvme\"", key, section));
    };
    if (engine.optimizer_pinned_fraction != 0.0 && engine.optimizer != Placement::nvme)
      is_unused("hoist.optimizer_pinned_fraction", "offload_optimizer");
    const bool has_fraction = read_.in_file("hoist.parameters_pinned_fraction");
    if (engine.parameters != Placement::nvme) {
      if (has_fraction) is_unused("hoist.parameters_pinned_fraction", "offload_param");
      return;
    }
    if (!read_.in_file("zero_optimization.offload_param.max_in_cpu")) return;
    engine.parameters_pinned_elements_max = draft_.max_in_cpu;
    if (!has_fraction) engine.parameters_pinned_fraction.reset();
  }

  void gradient_spill() {
    constexpr std::string_view kSpill = "hoist.gradient_spill";
    const EngineOptions& engine = draft_.engine;
    if (engine.gradient_spill_units == 0u || is_wrong(kSpill)) return;
    if (engine.optimizer == Placement::device && engine.uses_nvme())
      notes_.warnings.push_back(
          fmt::format("{} is not used: gradients are on the device, as optimizer state is", kSpill));
  }

  // DeepSpeed takes any number.
  void buffers() {
    constexpr std::string_view kBuffers = "zero_optimization.offload_optimizer.buffer_count";
    if (draft_.engine.update_buffer_count >= 3) return;
    notes_.notes.push_back(fmt::format("{} {} is read as 3: one piece is read, one updated and one written at a time",
                                       kBuffers, draft_.engine.update_buffer_count));
    draft_.engine.update_buffer_count = 3;
    derive(kBuffers, std::int64_t{3});
  }

  void offload_ratio() {
    if (draft_.engine.optimizer_offload_ratio != 1 && draft_.engine.optimizer == Placement::device)
      notes_.warnings.push_back(fmt::format("{} is not used: its device is \"none\", which offloads nothing", kRatio));
  }

  // The engine refuses these too; here the message names the line. It alone refuses "forward" for states on the device:
  // hoist plan takes such a file for other placements.
  void engine_rules() {
    std::vector<OptionProblem> problems = problems_between(draft_.engine);
    std::erase_if(problems, [&](const OptionProblem& p) {
      const bool is_forward = p.key == "hoist.update_mode" && draft_.engine.update_mode == UpdateMode::forward;
      return is_forward || is_wrong(p.key) || is_wrong(p.other_key);
    });
    for (OptionProblem& p : problems) read_.refuse(p.key, std::move(p.problem));
  }

  // Whether there is a problem with `path` or a key below it; its consequences are then not reported.
  bool is_wrong(std::string_view path) const {
    return std::ranges::any_of(read_.problems, [&](const ConfigProblem& p) {
      return p.key.starts_with(path) && (p.key.size() == path.size() || p.key[path.size()] == '.');
    });
  }

  void placement(Placement where, const std::vector<std::string>& paths, std::string_view device_key,
                 std::string_view path_key) {
    if (where == Placement::nvme && paths.empty() && !is_wrong(path_key)) {
      read_.refuse(device_key, fmt::format("\"nvme\" needs {} beside it", last_part(path_key)));
    }
    if (where != Placement::nvme && !paths.empty()) {
      notes_.warnings.push_back(fmt::format("{} is not used: {} is not \"nvme\"", path_key, last_part(device_key)));
    }
    const std::vector<std::string> plain = plain_paths(paths);
    const auto is_named_twice = [&](const std::string& path) {
      return std::ranges::count_if(plain, [&](const std::string& other) { return is_same_place(path, other); }) > 1;
    };
    if (std::ranges::any_of(plain, is_named_twice))
      read_.refuse(path_key, fmt::format("{} names a directory twice; name each drive once", quoted(paths)));
  }

  const std::vector<std::string>& nvme_paths() const {
    if (draft_.engine.parameters == Placement::nvme) return draft_.parameter_paths;
    return draft_.optimizer_paths;
  }

  void store() {
    std::vector<std::string> roots;
    if (draft_.engine.uses_nvme()) {
      roots = plain_paths(nvme_paths());
      if (!roots.empty() && !draft_.checkpoint_path.empty() && !is_same_place(draft_.checkpoint_path, roots.front())) {
        read_.refuse(
            "hoist.checkpoint_path",
            fmt::format("\"{}\" is not needed: state on NVMe is committed in its own store; leave this key out",
                        draft_.checkpoint_path));
      }
    } else if (!draft_.checkpoint_path.empty()) {
      roots = {plain_path(draft_.checkpoint_path)};
    }
    for (std::string& root : roots) root = (std::filesystem::path(root) / "hoist").string();
    if (roots.empty()) return;
    draft_.engine.store_directory = roots.front();
    draft_.engine.stripe_directories.assign(roots.begin() + 1, roots.end());
  }

  void mirror() {
    if (draft_.mirror_path.empty()) return;
    const std::string root = plain_path(draft_.mirror_path);
    draft_.engine.mirror.directory = (std::filesystem::path(root) / "hoist").string();
    std::vector<std::string> drives = draft_.engine.stripe_directories;
    drives.push_back(draft_.engine.store_directory);
    if (std::ranges::any_of(drives, [&](const auto& d) { return is_same_place(d, draft_.engine.mirror.directory); }))
      read_.refuse(
          "hoist.mirror.path",
          fmt::format("\"{}\" is where the store itself is; name a directory on another drive", draft_.mirror_path));
  }

  void durability() {
    using tiers::Durability;
    if (!draft_.engine.uses_nvme() && draft_.durability == Durability::step && !is_wrong("zero_optimization")) {
      const ConfigSetting* const cadence = read_.setting("hoist.durability");
      const auto* const every = cadence == nullptr ? nullptr : std::get_if<std::int64_t>(&cadence->value);
      read_.refuse(
          "hoist.durability",
          fmt::format("{} needs optimizer state or weights on NVMe; with both in memory, {} and save with "
                      "Engine::save",
                      every != nullptr ? fmt::format("{{\"every\": {}}}", *every) : "\"step\"",
                      draft_.checkpoint_path.empty() ? "set hoist.checkpoint_path instead" : "leave this key out"));
    }
    draft_.engine.durability =
        draft_.durability.value_or(draft_.engine.uses_nvme() ? Durability::step : Durability::none);
  }

  void host_device_only() {
    if (draft_.runtime.device != platform::DeviceKind::cuda) return;
    const auto only_there = [this](std::string_view key, bool given) {
      if (!given) return;
      read_.refuse(key, "affects only the streams of the host device; remove it, or set hoist.device to \"host\"");
    };
    only_there("hoist.chaos_seed", draft_.runtime.host_device.chaos_seed != 0);
    only_there("hoist.host_link_bytes_per_second", draft_.runtime.host_device.link_bytes_per_second != 0);
  }

  // Checks that hold for every world size; Config::check_world_size does the rest.
  void batch() {
    const TrainingOptions& training = draft_.training;
    const auto &all = training.train_batch_size, &one = training.train_micro_batch_size_per_gpu;
    const auto& accumulation = training.gradient_accumulation_steps;
    const std::uint64_t micro_batch = one.value_or(1), steps = accumulation.value_or(1);
    if (!all || (*all % micro_batch == 0 && *all / micro_batch % steps == 0)) return;
    std::vector<std::string> factors;
    if (one) factors.push_back(fmt::format("train_micro_batch_size_per_gpu {}", *one));
    if (accumulation) factors.push_back(fmt::format("gradient_accumulation_steps {}", *accumulation));
    read_.refuse("train_batch_size", fmt::format("{} is not a multiple of {}, so no number of ranks fits", *all,
                                                 fmt::join(factors, " times ")));
  }

  void formats() {
    if (!draft_.fp16.enabled) {
      if (read_.in_file("bf16.enabled"))
        draft_.engine.weights_dtype = says_true("bf16.enabled") ? DType::bf16 : DType::fp32;
      if (draft_.engine.weights_dtype == DType::fp32) own_type_only("fp32");
      return without_fp16();
    }
    if (read_.in_file("bf16.enabled") && says_true("bf16.enabled")) {
      read_.refuse("bf16.enabled", "fp16 and bf16 cannot both be enabled; remove one of the two sections");
    }
    if (ConfigSetting* bf16 = read_.setting("bf16.enabled"); bf16 != nullptr && !read_.in_file("bf16.enabled"))
      bf16->value = false;
    draft_.engine.weights_dtype = DType::fp16;
    own_type_only("fp16");
    loss_scale();
  }

  // Gradients travel in the type of the weights. The table's neutral value is bf16; here it is `own`.
  void own_type_only(std::string_view own) {
    const config::Value own_value{std::string(own)};
    for (const auto& [key, what] :
         {std::pair("communication_data_type", "gradients travel in their own type, which is"),
          std::pair("data_types.param_dtype", "parameters are")}) {
      const bool is_own = std::ranges::any_of(read_.refused, [&, key = key](const ConfigSetting& setting) {
        return setting.row->path == key && setting.value == own_value;  // however it is written: "FP32", too
      });
      if (is_own) std::erase_if(read_.problems, [key = key](const ConfigProblem& p) { return p.key == key; });
      if (read_.in_file(key))
        read_.refuse(key,
                     fmt::format("\"bf16\" is refused: {} {} in this configuration; leave this key out", what, own));
    }
  }

  void loss_scale() {
    const Fp16Draft& fp16 = draft_.fp16;
    if (fp16.fixed_scale > 0) {
      draft_.engine.loss_scale = {.scale = fp16.fixed_scale};
      note_unused(dynamic_keys(), "fp16.loss_scale is a fixed one");
      return;
    }
    const double first = std::ldexp(1.0, static_cast<int>(fp16.initial_power));
    draft_.engine.loss_scale = {.dynamic = true,
                                .scale = first,
                                .window = fp16.window,
                                .hysteresis = fp16.hysteresis,
                                .consecutive_hysteresis = fp16.consecutive_hysteresis,
                                .scale_min = fp16.scale_min};
    if (first < fp16.scale_min && !is_wrong("fp16")) {
      read_.refuse("fp16.initial_scale_power",
                   fmt::format("2^{} is below min_loss_scale {}", fp16.initial_power, fp16.scale_min));
    }
  }

  static std::vector<std::string_view> dynamic_keys() {
    return {"fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis", "fp16.consecutive_hysteresis",
            "fp16.min_loss_scale"};
  }

  // A section that says it is off may keep its other keys.
  void without_fp16() {
    if (read_.in_file("fp16.enabled")) {
      std::erase_if(read_.problems, [&](const ConfigProblem& p) {
        return p.key.starts_with("fp16.") &&
               std::ranges::any_of(read_.refused, [&](const ConfigSetting& s) { return s.row->path == p.key; });
      });
      return;
    }
    if (const ConfigSetting* enabled = read_.setting("fp16.enabled");
        enabled != nullptr && enabled->source == ConfigSetting::Source::automatic)
      return;
    std::vector<std::string_view> keys = dynamic_keys();
    keys.insert(keys.begin(), "fp16.loss_scale");
    if (says_true("fp16.auto_cast")) keys.push_back("fp16.auto_cast");
    note_unused(keys, "fp16.enabled is not true");
  }

  void note_unused(const std::vector<std::string_view>& keys, std::string_view why) {
    std::vector<std::string_view> given;
    std::ranges::copy_if(keys, std::back_inserter(given), [&](std::string_view key) { return read_.in_file(key); });
    if (!given.empty()) notes_.notes.push_back(fmt::format("not used, as {}: {}", why, fmt::join(given, ", ")));
  }

  // Two writers of one file would destroy each other's lines.
  void reports() {
    const std::string &metrics = draft_.engine.metrics_path, &trace = draft_.runtime.trace_path;
    if (is_file_of_a_store(metrics)) refuse_file_of_a_store("hoist.metrics", metrics);
    if (is_file_of_a_store(trace)) refuse_file_of_a_store("hoist.trace", trace);
    if (!metrics.empty() && is_same_place(metrics, trace)) {
      read_.refuse("hoist.trace", fmt::format("\"{}\" is also the file of hoist.metrics; name another file", metrics));
    }
  }

  void refuse_file_of_a_store(std::string_view key, const std::string& path) {
    read_.refuse(key, fmt::format("\"{}\" is a file of a store, and would be overwritten; name another file", path));
  }

  void remarks() {
    if (!read_.in_file("zero_optimization.stage")) {
      notes_.notes.push_back("zero_optimization.stage is 3 (DeepSpeed's default is 0)");
    }
    if (const ConfigSetting* clipping = read_.setting("gradient_clipping");
        clipping != nullptr && clipping->source == ConfigSetting::Source::standard) {
      notes_.notes.push_back("gradient_clipping is 1.0 (0 in DeepSpeed before June 2026); set 0 for none");
    }
    if (const ConfigSetting* bf16 = read_.setting("bf16.enabled");
        bf16 != nullptr && bf16->source == ConfigSetting::Source::standard && !draft_.fp16.enabled) {
      notes_.notes.push_back(
          "bf16 is not enabled in the file; parameters that the program declares bf16 are bf16 anyway");
    }
    if (!read_.automatic.empty()) {
      notes_.notes.push_back(fmt::format(
          "\"auto\" selects the default (in hoist's Trainer: the value of the argument, if there is one) for: {}",
          fmt::join(read_.automatic, ", ")));
    }
    if (!read_.hints.empty()) {
      notes_.warnings.push_back(
          fmt::format("accepted without effect (none of these changes results): {}", fmt::join(read_.hints, ", ")));
    }
  }

  Draft& draft_;
  ReadResult& read_;
  RuleNotes notes_;
};

}  // namespace

void refuse_other_parameters(ReadResult& read, std::string_view section, std::string_view type,
                             const std::vector<std::string_view>& names) {
  for (const ConfigSetting& s : read.settings) {
    const std::string_view path = s.row->path;
    if (!path.starts_with(section) || s.row->status != KeyStatus::implemented ||
        s.source == ConfigSetting::Source::standard || std::ranges::find(names, last_part(path)) != names.end())
      continue;
    read.refuse(path, fmt::format("is not a parameter of {}, which has {}", type, fmt::join(names, ", ")));
  }
}

RuleNotes apply_rules(Draft& draft, ReadResult& read, RunLength run_length) {
  return Rules(draft, read).apply(run_length);
}

}  // namespace hoist::config::detail
