// SPDX-License-Identifier: Apache-2.0
// config/detail/draft.hpp - the options under construction: rows of the key table write here, rules.cpp finishes them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <hoist/config/config.hpp>

namespace hoist::config::detail {

// Settings of the section "scheduler" for all types; the type decides which are used.
struct ScheduleDraft {
  std::string type;  // empty: no schedule
  std::optional<std::uint64_t> total_steps;
  WarmupRate warmup;
  WarmupCosineRate cosine;
  OneCycleRate cycle;
  bool cycle_momentum = true;
  OneCycleRate::Momentum momentum;
  RangeTestRate range_test;
};

// The section "fp16".
struct Fp16Draft {
  bool enabled = false;
  double fixed_scale = 0;  // 0: dynamic
  unsigned initial_power = 16;
  std::uint64_t window = 1000;
  unsigned hysteresis = 2;
  bool consecutive_hysteresis = false;
  double scale_min = 1;
};

// Values that need other values to become options.
struct Draft {
  RuntimeOptions runtime;
  EngineOptions engine;
  TrainingOptions training;
  MeasuredBandwidth measured;
  ScheduleDraft schedule;
  Fp16Draft fp16;

  std::vector<std::string> parameter_paths;  // offload_param.nvme_path
  std::vector<std::string> optimizer_paths;  // offload_optimizer.nvme_path
  std::uint64_t max_in_cpu = 0;              // offload_param.max_in_cpu
  bool old_parameter_offload = false;        // cpu_offload_param
  bool old_optimizer_offload = false;        // cpu_offload
  std::string checkpoint_path;
  std::string mirror_path;
  std::optional<tiers::Durability> durability;
  std::string optimizer_type = "AdamW";  // "Adam" leaves the choice of decay to adam_w_mode
  bool adam_w_mode = true;
  bool torch_adam = false;
};

}  // namespace hoist::config::detail
