// SPDX-License-Identifier: Apache-2.0
// zero/predict/prediction.hpp - what an engine will hold and move, computed without taking anything.
//
// The same arithmetic lays out the engine itself, so predicted and real bytes are equal for the same model, but for
// transfers of less than 4 KiB, which move 4 KiB; the fetches of a step are those of a plain pass (every unit once
// forward, once backward), planned like a recorded one.
//
// Threading  Pure functions, but for what runtime options leave to this machine.
// Errors     UsageError for a model without units. Options are not checked: those that Engine::create() refuses have
//            numbers without a meaning. Too small a budget is not an error here: see fits().
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <hoist/zero/model.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/types.hpp>

namespace hoist {

// The part of the budgets that the program itself takes.
struct ProgramMemory {
  std::uint64_t device_bytes = 0;  // activations and workspaces, as require_device_memory() takes them
  std::uint64_t pinned_bytes = 0;  // activation offload, and whatever else it takes of that budget
};

// A step's work on one unit, and who does it.
struct UnitWork {
  UnitStep bytes;
  std::uint64_t parameters = 0;  // of all ranks: its part of the computation
  // The bytes of gradients, weights and state that the update reads and writes: in memory that the host reaches, and in
  // device memory that it does not reach, where the device updates.
  std::uint64_t update_memory_bytes = 0;
  std::uint64_t device_update_bytes = 0;
  std::uint64_t shard_elements = 0;  // that the host updates
  bool trainable = false;
};

// A pass computes every unit forward, in order, then backward, in reverse: twice as many slots as units.
struct PlannedFetch {
  std::uint32_t unit = 0;
  std::uint32_t issued_at = 0;  // in which slot; its place is free when the slots before are done
  std::uint32_t first_use = 0;  // slots that use it
  std::uint32_t last_use = 0;
  std::uint64_t bytes = 0;  // of the gather memory; 0: the unit has memory of its own
};

// For one rank; all ranks are alike.
struct Prediction {
  struct Tier {
    std::uint64_t budget_bytes = 0;  // configured
    std::uint64_t least_bytes = 0;   // below this the engine refuses to start
    std::uint64_t bytes = 0;         // what will be held under the budget; the least where that does not fit
    bool fits() const { return least_bytes <= budget_bytes; }
  };
  Tier device;
  Tier pinned;
  ProgramMemory program;                // what of both is the program's own
  std::uint64_t host_budget_bytes = 0;  // of both together, on the host device; 0: there is none
  bool fits() const {
    const bool together = host_budget_bytes == 0 || device.least_bytes + pinned.least_bytes <= host_budget_bytes;
    return together && device.fits() && pinned.fits();
  }
  std::uint64_t nvme_bytes = 0;       // reserved in the store's directories, scratch included
  std::uint64_t mirror_bytes = 0;     // reserved in the mirror's directory
  StepBytes step;                     // per training step
  std::vector<UnitWork> units;        // the same by unit, in the order of forward
  std::vector<PlannedFetch> fetches;  // of a pass
  unsigned passes = 1;                // that a step is made of: of several micro-batches in horizontal order
  // When units are updated: under the next step's forward, under backward as soon as their gradient is there, or, where
  // both are false, inside step().
  bool updates_under_forward = false;
  bool updates_under_backward = false;
  double commits = 0;        // that a step makes: less than 1 where a commit has several steps
  bool awaits_norm = false;  // whether an update needs every gradient: clipping, loss scaling
  // Whether a unit's update begins only when a staging buffer is free: weights are on NVMe, the update under forward.
  bool updates_on_request = false;
  std::uint64_t update_memory_bytes = 0;  // of all units
  std::uint64_t device_update_bytes = 0;
  std::uint64_t parameter_count = 0;
  double pinned_fraction = 0;             // EngineOptions::optimizer_pinned_fraction, found where it is empty
  double parameters_pinned_fraction = 0;  // likewise
  double pinned_weight_share = 0;         // of weights on NVMe: what whole tiles, and the limit in elements, make of it
  // Optimizer states in device memory, and the share of the trainable parameters that they are of: what whole units
  // make of 1 - EngineOptions::optimizer_offload_ratio.
  std::uint64_t device_state_bytes = 0;
  double device_state_share = 0;
  // The smallest larger one, in hundredths, that fits the device's budget; empty where this one does, or none does.
  std::optional<double> fitting_offload_ratio{};

  std::uint64_t gather_bytes = 0;  // device memory that gathered units share
  std::uint64_t gradient_buffers = 0;
  std::uint64_t gradient_buffer_bytes = 0;  // of one, as of the following
  unsigned staging_buffers = 0;
  std::uint64_t staging_buffer_bytes = 0;
  unsigned update_buffers = 0;
  std::uint64_t update_buffer_bytes = 0;
  std::uint64_t update_buffer_parameters = 0;
  // The ring of gradients that wait for their unit's update (update mode `backward`), or are on their way to NVMe. 0:
  // each has a region of its own.
  std::uint64_t gradient_ring_bytes = 0;
  // Units whose gradients are on NVMe between backward and update (EngineOptions::gradient_spill_units, found where it
  // is empty), and the scratch space that they have there.
  std::uint32_t spilled_units = 0;
  std::uint64_t scratch_bytes = 0;
};
Prediction predict(const RuntimeOptions& runtime, const EngineOptions& engine, const Model& model, int world_size,
                   const ProgramMemory& program = {});

// The largest share of what is on NVMe, in hundredths, that fits the pinned budget beside the buffers that `engine`
// gets; at least the one it asks for. `share`: EngineOptions::optimizer_pinned_fraction, or that of parameters. A
// ring of gradients, which otherwise takes the rest, keeps room for two of the largest.
double largest_pinned_fraction(const RuntimeOptions& runtime, EngineOptions engine, const Model& model, int world_size,
                               const ProgramMemory& program = {},
                               std::optional<double> EngineOptions::*share = &EngineOptions::optimizer_pinned_fraction);

}  // namespace hoist
