// SPDX-License-Identifier: Apache-2.0
// cli/planner.hpp - lays a model out in every placement of its state on a machine, and ranks the placements by the time
// of a step. Pure: everything it needs is in the question.
#pragma once

#include <string>
#include <vector>

#include <hoist/config/config.hpp>
#include <hoist/zero/predict/machine_spec.hpp>

#include "model_question.hpp"
#include "plan_report.hpp"

namespace hoist::cli {

struct PlanQuestion {
  Config config;
  bool has_config = false;
  NamedModel model;
  MachineSpec machine;
  RankLayout layout{};
  Machine node{};            // a node of `machine`; of this machine, with the memory that is free now
  RuntimeOptions runtime{};  // with budgets
  int world_size = 1;
  bool is_here = false;  // the machine is the one that this runs on
  double tokens = 0;     // for each rank and step
  StepDisturbance disturbance{};
};

PlanReport plan_of(const PlanQuestion& question);

struct PlannedConfig {
  std::string text;
  std::vector<std::string> replaced;  // for each given key that was changed: its new value, and why
};

// The question's configuration, changed so that a run uses this row's placement and budgets. `text` is the
// configuration's own, or "{}". Errors: JsonEditError.
PlannedConfig planned_config(const PlanQuestion& question, const PlanRow& row, std::string text);

// Checks that a run with what planned_config() has made is predicted to hold and move as many bytes as one with the
// row's options and its budgets, and that it fits these.
// Errors: ConfigError if no engine would take it; UsageError if it would be another plan.
void check_written(const PlanQuestion& question, const PlanRow& row, const Config& written);

}  // namespace hoist::cli
