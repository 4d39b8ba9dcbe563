// SPDX-License-Identifier: Apache-2.0
// cli/check_report.hpp - the report of `hoist check`, as text and as JSON.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include <hoist/config/config.hpp>
#include <hoist/zero/machine.hpp>
#include <hoist/zero/predict/machine_fit.hpp>
#include <hoist/zero/predict/prediction.hpp>

namespace hoist::cli {

// An accepted configuration, and its consequences for this many ranks and this model.
struct CheckReport {
  const Config& config;
  TrainingOptions training;
  int world_size = 0;        // 0: not given
  RuntimeOptions runtime{};  // what this machine makes of the configuration's
  std::vector<MachineChoice> choices{};
  std::string machine = "this machine";    // its name in sentences
  std::optional<Prediction> prediction{};  // of one rank; empty: no model given
  MachineFit fit{};                        // if there is a prediction
  // The largest hoist.optimizer_pinned_fraction, if optimizer state is on NVMe, and the largest
  // hoist.parameters_pinned_fraction, if weights are, that the pinned budget allows while the other one stays as it is.
  std::optional<double> pinned_fraction_max{}, parameters_pinned_fraction_max{};
  // The pinned memory that the engine would hold with the default of sub_group_size, if a larger one is set and takes
  // more.
  std::optional<std::uint64_t> pinned_bytes_by_default{};
  std::string model;  // the source of its shape
  std::uint64_t program_pinned_bytes = 0;
  bool all_settings = false;
};

// Whether a prediction counts pinned memory of the program's own.
std::string program_pinned_text(std::uint64_t bytes);
// A device as hoist.device says it. Pre: it is chosen.
std::string device_key(const RuntimeOptions& runtime);
// The keys of section "hoist" that fix the budgets. If one budget limits both memories, each gets what the prediction
// takes, rounded up to whole blocks, and half of the rest.
nlohmann::ordered_json budgets_section(const Prediction& prediction, const RuntimeOptions& runtime);
nlohmann::ordered_json tier_json(const Prediction::Tier& tier);
nlohmann::ordered_json step_json(const StepBytes& step);
nlohmann::ordered_json device_state_json(const Prediction& prediction);
nlohmann::ordered_json spilled_gradients_json(const Prediction& prediction);
std::string accepted_text(const CheckReport& report);
nlohmann::ordered_json accepted_json(const CheckReport& report);
nlohmann::ordered_json refused_json(const std::string& origin, const ConfigProblems& error);

// "pinned": as a report in JSON and a narrow table say it.
const char* placement_id(Placement placement);

}  // namespace hoist::cli
