// SPDX-License-Identifier: Apache-2.0
// cli/plan_report.hpp - the needs of a model and the time of its steps, for each placement of its state.
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
  std::string refusal;      // why an engine would refuse these options with any budget; empty: it would not

  bool fits() const { return refusal.empty() && prediction.fits(); }
};

// Device memory that a ZeRO stage needs at least, on one of the ranks.
struct ZeroRow {
  int stage = 0;
  const char* offload = "none";  // "none", "optimizer" (to host memory or NVMe), "all"
  std::uint64_t bytes_per_gpu = 0;
  // "textbook": fp32 weights, gradients and two moments, 16 bytes a parameter, without buffers; with the optimizer
  // offloaded 16-bit weights alone. "hoist": predicted, with the smallest buffers.
  const char* scheme = "hoist";
};

struct PlanReport {
  std::string model;  // the source of its shape
  std::uint64_t program_pinned_bytes = 0;
  int world_size = 1;
  StepSpeeds speeds;
  bool has_device_budget = false;
  bool has_pinned_budget = false;
  double endurance_bytes = 0;  // bytes that may be written to a rank's drives in their life; 0: not given
  std::vector<PlanRow> rows;
  std::vector<ZeroRow> zero_table;

  // The row with the shortest expected step among those that fit; among equal ones, that with the fewest bytes on NVMe.
  const PlanRow* best() const;
  // Bytes written to the rank's drives in a day at the expected speed; nullopt if no time is known.
  static std::optional<double> written_a_day(const PlanRow& row);
};

std::string plan_text(const PlanReport& report);
nlohmann::ordered_json plan_json(const PlanReport& report);

}  // namespace hoist::cli
