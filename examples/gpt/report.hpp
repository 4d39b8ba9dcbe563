// SPDX-License-Identifier: Apache-2.0
// examples/gpt/report.hpp - what a run did, as JSON and as a closing table.
//
// All byte counts, peaks and times are this rank's.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <hoist/zero/engine.hpp>

namespace hoist::gpt {

struct StepRecord {
  std::uint64_t step = 0;  // counted from 1
  double loss = 0;         // mean over ranks, before the update
  double seconds = 0;
  double gradient_norm = 0;
  std::optional<double> loss_scale{};  // where there is one
  bool applied = true;                 // false: a gradient was not finite, and the step was skipped
};

struct TierUse {
  std::uint64_t budget_bytes = 0;
  std::uint64_t held_bytes = 0;
  std::uint64_t peak_bytes = 0;
};

struct Tiers {
  TierUse device;
  TierUse pinned;
  TierUse nvme;
};
// The store's space is reserved when it is made: what its files occupy is budget and peak at once, over all its drives.
// Ranks share the directories, so this one is the job's.
Tiers tier_use(Engine& engine, const EngineOptions& options);

struct Digests {
  std::string master, moment1, moment2;
};

struct RunRecord {
  std::string device;
  std::uint64_t parameters = 0;
  int world_size = 1;
  std::vector<StepRecord> steps;  // of this process; a resumed run reports those after the resume
  Digests digests;
  Tiers tiers;
  std::array<Ledger::LinkTotals, kLinkCount> links{};        // steps
  std::array<Ledger::LinkTotals, kLinkCount> links_apart{};  // start-up and everything else outside steps
  std::uint64_t offloaded_bytes = 0;  // of offloaded activations, down and up again; not in the formula
  std::uint64_t tokens_per_step = 0;  // of all ranks
  std::uint64_t wire_in_group = 0;    // of the wire's bytes (zero_hpz_partition_size)
  std::array<Nanoseconds, kWaitCauseCount> waits{};
  Nanoseconds compute{0};
  std::optional<StepBytes> formula;  // of one step
  std::optional<std::uint64_t> committed_step;
};

// Copies the links and waits of the steps from the ledger.
void take_step_totals(RunRecord& record, const Ledger& ledger);
// Copies what the links moved outside steps.
void take_totals_apart(RunRecord& record, const Ledger& ledger);

// Seconds that the model stood still for collectives (weights it waited for, reductions that were under way when the
// backward pass had ended), for each second its kernels ran. Transfers during kernels are not in it.
double communication_to_computation(const RunRecord& record);

// The fields of the report format, in its order.
std::string report_json(const RunRecord& record);

// Bytes per link against the formula, where time went, peaks against budgets, the device.
std::string closing_table(const RunRecord& record);

}  // namespace hoist::gpt
