// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/config/detail/rules.hpp>

namespace hoist::config::detail {

namespace {

constexpr std::string_view kParamDevice = "zero_optimization.offload_param.device";
constexpr std::string_view kParamPath = "zero_optimization.offload_param.nvme_path";
constexpr std::string_view kOptimizerDevice = "zero_optimization.offload_optimizer.device";
constexpr std::string_view kOptimizerPath = "zero_optimization.offload_optimizer.nvme_path";

// "/data/" and "/data/." are the same place.
std::string plain_path(const std::string& path) {
  std::string plain = std::filesystem::path(path).lexically_normal().string();
  while (plain.size() > 1 && plain.ends_with('/')) plain.pop_back();
  return plain;
}

class Rules {
 public:
  Rules(Draft& draft, ReadResult& read) : draft_(draft), read_(read) {}

  RuleNotes apply() {
    optimizer();
    placements();
    store();
    durability();
    host_device_only();
    remarks();
    return std::move(notes_);
  }

 private:
  ConfigSetting* setting(std::string_view path) {
    for (ConfigSetting& candidate : read_.settings) {
      if (candidate.row->path == path) return &candidate;
    }
    return nullptr;
  }

  bool in_file(std::string_view path) {
    const ConfigSetting* found = setting(path);
    return found != nullptr && found->source == ConfigSetting::Source::file;
  }

  void problem(std::string_view path, std::string sentence) {
    const ConfigSetting* found = setting(path);
    read_.problems.push_back({std::string(path), std::move(sentence), found == nullptr ? 0 : found->line,
                              found == nullptr ? 0 : found->column});
  }

  void optimizer() {
    optim::AdamOptions& adam = draft_.engine.optimizer_defaults;
    const bool decoupled = !draft_.optimizer_named_adam || draft_.adam_w_mode;
    adam.variant = decoupled ? optim::AdamVariant::adamw : optim::AdamVariant::adam;
    if (!draft_.optimizer_named_adam && !draft_.adam_w_mode) {
      notes_.warnings.push_back(
          "optimizer.params.adam_w_mode: false has no effect on type AdamW, as in DeepSpeed; say type Adam for L2 "
          "decay");
    }
    constexpr std::string_view kDecay = "optimizer.params.weight_decay";
    if (draft_.torch_adam && decoupled && !in_file(kDecay)) {
      adam.weight_decay = 0.01;
      if (ConfigSetting* decay = setting(kDecay)) decay->value = 0.01;
      notes_.notes.push_back("optimizer.params.weight_decay is 0.01, the default that torch_adam brings in DeepSpeed");
    }
  }

  void placements() {
    placement(draft_.engine.parameters, draft_.parameter_path, kParamDevice, kParamPath);
    placement(draft_.engine.optimizer, draft_.optimizer_path, kOptimizerDevice, kOptimizerPath);
    const bool both = draft_.engine.parameters == Placement::nvme && draft_.engine.optimizer == Placement::nvme;
    if (both && !draft_.parameter_path.empty() && !draft_.optimizer_path.empty() &&
        plain_path(draft_.parameter_path) != plain_path(draft_.optimizer_path)) {
      problem(
          kOptimizerPath,
          fmt::format("\"{}\" differs from offload_param.nvme_path \"{}\"; a record holds weights and optimizer state, "
                      "so use one path",
                      draft_.optimizer_path, draft_.parameter_path));
    }
  }

  // True when the file's own value of a key below `path` was found wrong: what follows from it is not worth saying.
  bool is_wrong(std::string_view path) const {
    return std::ranges::any_of(read_.problems, [&](const ConfigProblem& p) { return p.key.starts_with(path); });
  }

  void placement(Placement where, const std::string& path, std::string_view device_key, std::string_view path_key) {
    if (where == Placement::nvme && path.empty() && !is_wrong(path_key)) {
      problem(device_key, fmt::format("\"nvme\" needs {} beside it", last_part(path_key)));
    }
    if (where != Placement::nvme && !path.empty()) {
      notes_.warnings.push_back(fmt::format("{} is not used: {} is not \"nvme\"", path_key, last_part(device_key)));
    }
  }

  std::string nvme_path() const {
    if (draft_.engine.parameters == Placement::nvme) return draft_.parameter_path;
    if (draft_.engine.optimizer == Placement::nvme) return draft_.optimizer_path;
    return {};
  }

  bool uses_nvme() const {
    return draft_.engine.parameters == Placement::nvme || draft_.engine.optimizer == Placement::nvme;
  }

  void store() {
    const std::string nvme = nvme_path();
    if (!nvme.empty() && !draft_.checkpoint_path.empty() && plain_path(draft_.checkpoint_path) != plain_path(nvme)) {
      problem("hoist.checkpoint_path",
              fmt::format("\"{}\" is not needed: state on NVMe is committed in its own store; leave this key out",
                          draft_.checkpoint_path));
    }
    const std::string& root = uses_nvme() ? nvme : draft_.checkpoint_path;
    if (!root.empty()) draft_.engine.store_directory = (std::filesystem::path(plain_path(root)) / "hoist").string();
  }

  void durability() {
    using tiers::Durability;
    if (!uses_nvme() && draft_.durability == Durability::step && !is_wrong("zero_optimization")) {
      problem(
          "hoist.durability",
          "\"step\" needs optimizer state or weights on NVMe; with both in memory set hoist.checkpoint_path and save "
          "with Engine::save");
    }
    draft_.engine.durability = draft_.durability.value_or(uses_nvme() ? Durability::step : Durability::none);
  }

  void host_device_only() {
    if (draft_.runtime.device == platform::DeviceKind::cuda && draft_.runtime.host_device.chaos_seed != 0) {
      problem("hoist.chaos_seed",
              "delays the streams of the host device only; remove it, or set hoist.device to \"host\"");
    }
  }

  void remarks() {
    if (!in_file("zero_optimization.stage")) {
      notes_.notes.push_back("zero_optimization.stage is 3 (DeepSpeed's default is 0, which comes later)");
    }
    if (!in_file("bf16.enabled")) {
      notes_.notes.push_back("bf16 is not asked for: parameters the program declares bf16 are bf16 all the same");
    }
    if (!read_.automatic.empty()) {
      notes_.notes.push_back(fmt::format("\"auto\" is the default here: {}", fmt::join(read_.automatic, ", ")));
    }
    if (!read_.hints.empty()) {
      notes_.warnings.push_back(
          fmt::format("accepted, but without effect here (none changes results): {}", fmt::join(read_.hints, ", ")));
    }
  }

  Draft& draft_;
  ReadResult& read_;
  RuleNotes notes_;
};

}  // namespace

RuleNotes apply_rules(Draft& draft, ReadResult& read) { return Rules(draft, read).apply(); }

}  // namespace hoist::config::detail
