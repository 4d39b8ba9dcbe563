// SPDX-License-Identifier: Apache-2.0
// cli/plan_report.hpp - what a model needs and how long its steps take, for each place its state can be.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <hoist/zero/predict/step_time.hpp>

namespace hoist::cli {

struct PlanRow {
  EngineOptions engine;
  Prediction prediction;
  StepTime time;
  bool configured = false;  // the configuration's own placement
  std::string refusal;      // why no engine would take these options, whatever the budgets; empty: it would

  bool fits() const { return refusal.empty() && prediction.device.fits() && prediction.pinned.fits(); }
};

struct PlanReport {
  std::string model;  // where its shape came from
  std::uint64_t program_pinned_bytes = 0;
  int world_size = 1;
  StepSpeeds speeds;
  bool has_device_budget = false;
  bool has_pinned_budget = false;
  double endurance_bytes = 0;  // what the drives of a rank may be written in their life; 0: not given
  std::vector<PlanRow> rows;

  // The row with the shortest expected step of those that fit; of equal ones that with the fewest bytes on NVMe.
  const PlanRow* best() const;
  // Bytes a day that go to the rank's drives at the expected speed; nullopt when no time is known.
  static std::optional<double> written_a_day(const PlanRow& row);
};

std::string plan_text(const PlanReport& report);
nlohmann::ordered_json plan_json(const PlanReport& report);

}  // namespace hoist::cli
