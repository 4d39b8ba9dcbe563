// SPDX-License-Identifier: Apache-2.0
// cli/plan_report.hpp - the needs of a model and the time of its steps, for each placement of its state.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <hoist/zero/predict/machine_fit.hpp>
#include <hoist/zero/predict/machine_spec.hpp>
#include <hoist/zero/predict/step_time.hpp>

namespace hoist::cli {

struct PlanRow {
  EngineOptions engine;
  ProgramMemory program{};
  Prediction prediction{};
  StepTime time{};
  std::optional<StepTime> disturbed{};  // if the question has a disturbance
  std::uint64_t drive_bytes = 0;        // the rank's part of the drives
  MachineFit fit{};                     // of all ranks of a node
  bool configured = false;              // the configuration's own placement
  std::string refusal{};                // why these options are refused whatever the budgets are; empty: they are not

  bool fits_drives() const { return prediction.nvme_bytes <= drive_bytes; }
  bool fits_budgets() const { return prediction.fits() && fits_drives(); }
  bool fits() const { return refusal.empty() && fit.fits(); }
};

// Device memory that a ZeRO stage needs at least, on one of the ranks.
struct ZeroRow {
  int stage = 0;
  const char* offload = "none";  // "none", "optimizer" (to host memory or NVMe), "all"
  std::uint64_t bytes_per_gpu = 0;
  // "textbook": the figures for fp32 training (weights, gradients and two moments, 16 bytes a parameter), without
  // buffers; with the optimizer offloaded, 16-bit weights alone. "hoist": predicted, with the smallest buffers.
  const char* scheme = "hoist";
};

// The fastest placement with more hardware.
struct WhatIf {
  const char* name;
  Placement parameters, optimizer;
  double seconds = 0;
};

struct PlanReport {
  std::string model;  // the source of its shape
  std::uint64_t program_pinned_bytes = 0;
  bool has_program_bytes = false;  // whether the units file says what the program takes of the device
  int world_size = 1;
  double tokens = 0;  // of a rank and step
  MachineSpec machine{};
  RankLayout layout{};
  StepDisturbance disturbance{};
  std::vector<PlanRow> rows{};  // ranked: the fastest that fits first
  std::vector<ZeroRow> zero_table{};
  std::vector<WhatIf> what_ifs{};
  std::string overrun{};                // of the best row's plan: empty if it never exceeds a budget
  std::optional<double> free_tokens{};  // of a rank and step, from which on offloading costs no time

  const PlanRow* best() const { return rows.front().fits() ? &rows.front() : nullptr; }
  // Bytes written to the rank's drives in a day at the expected speed.
  static double written_a_day(const PlanRow& row);
  // How long the drives last at this rate of writing; nullopt if nothing is written or their endurance is not known.
  std::optional<double> drive_life_days(const PlanRow& row) const;
};

std::string plan_text(const PlanReport& report);
nlohmann::ordered_json plan_json(const PlanReport& report);

}  // namespace hoist::cli
