// SPDX-License-Identifier: Apache-2.0
// zero/predict/step_time.hpp - how long a step takes, from what it moves and how fast that goes.
//
// `expected_seconds` is the time between steps of a simulation that follows this engine's own plan, or `least_seconds`
// if that is longer.
// `least_seconds` is a lower bound that no schedule of the same placement can beat, the longer of two:
//
//   the busiest resource   everything overlaps with everything, and one of them never rests
//   the critical path      from the instant at which every gradient is known to the same instant of the next step:
//                          weights are updated, go up and are gathered before they are used, units compute one after
//                          the other, and gradients are reduced and come down. With neither clipping nor loss scaling
//                          an update needs its own gradient alone, and the path goes through one unit.
//                          Between the two instants the drives also read and write the state of all units, but for
//                          what the pinned memory for state in transit holds at each.
//
// Threading  Pure functions.
// Errors     UsageError for a speed, time or disturbance that is negative or not finite.
// Main path  predict -> predict_time, or both as plan_step -> faster_of_ahead_and_on_demand
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include <hoist/zero/predict/prediction.hpp>

namespace hoist {

// The resources that a step keeps busy.
enum class Resource : std::uint8_t {
  compute,  // the program's own kernels
  nvme,     // all drives of the rank
  host_to_device,
  device_to_host,
  wire,           // between ranks
  host_memory,    // the update on the host
  device_memory,  // the update on the device
};
inline constexpr std::size_t kResourceCount = 7;
const char* resource_name(Resource resource);  // "compute", "nvme", ...

// Bytes a second, for one rank. 0: not known, so that its time is not counted.
struct StepSpeeds {
  double nvme_read = 0;
  double nvme_write = 0;
  double nvme_mixed = 0;  // both directions at once, added up; 0: as if one waited for the other
  double host_to_device = 0;
  double device_to_host = 0;
  double wire = 0;           // received
  double host_memory = 0;    // read and written, by the processors that update
  double device_memory = 0;  // likewise by a device that updates
  // Seconds from the end of a transfer's turn on its link until its bytes have arrived.
  double nvme_latency = 0;
  double copy_latency = 0;  // between host and device
  double wire_latency = 0;
  double nvme_flush = 0;       // seconds of a flush of the drives; a commit makes two, one after the other
  double compute_seconds = 0;  // of forward and backward, when nothing is waited for
  // Forward's part of them: a third, a quarter where backward computes forward once more.
  double forward_share = 1.0 / 3;
};

// Departures from the plan.
struct StepDisturbance {
  // One drive takes so many times as long as planned. Every unit is striped over all drives, so each waits for this
  // one.
  double slow_drive = 1;
  // One rank's kernels and updates take so many times as long. The other ranks wait for it in every collective.
  double slow_rank = 1;
  double noise = 0;  // each transfer and kernel takes 1 to 1 + noise times as long, at random
  std::uint64_t seed = 1;

  friend bool operator==(const StepDisturbance&, const StepDisturbance&) = default;
};

struct StepTime {
  std::array<double, kResourceCount> busy_seconds{};  // by Resource
  std::array<double, kResourceCount> wait_seconds{};  // by Resource: for which kernels stood still
  double critical_path_seconds = 0;
  double least_seconds = 0;
  double simulated_seconds = 0;        // between steps of the simulation: less than least_seconds while writes pile up
  double expected_seconds = 0;         // the longer of the two
  Resource limit = Resource::compute;  // the busiest

  double busy(Resource resource) const { return busy_seconds[static_cast<std::size_t>(resource)]; }
  double waited(Resource resource) const { return wait_seconds[static_cast<std::size_t>(resource)]; }
  // Expected over least: 1.1 means that a better schedule could save a tenth at most. 1 where nothing takes time.
  double gap() const { return least_seconds > 0 ? expected_seconds / least_seconds : 1; }
};
StepTime predict_time(const Prediction& prediction, const StepSpeeds& speeds, const StepDisturbance& disturbance = {});

// The inputs of a step's plan.
struct StepQuestion {
  const RuntimeOptions& runtime;
  const Model& model;
  int world_size = 1;
  ProgramMemory program{};
  StepSpeeds speeds{};
};
struct PlannedStep {
  EngineOptions engine;
  Prediction prediction;
  StepTime time;
};
// As the engine carries it out: units are fetched ahead.
PlannedStep plan_step(const StepQuestion& question, EngineOptions engine);
// This step or, if that is faster on these links, the one that fetches each unit when it is needed: `engine` then has
// prefetch_elements 0. So the result is never slower than fetching on demand.
PlannedStep faster_of_ahead_and_on_demand(const StepQuestion& question, PlannedStep ahead);

// Whether the plan of a step ever holds more than the memory plan has: a sentence, empty if it does not.
std::string overrun_of_plan(const Prediction& prediction, const StepSpeeds& speeds);

// Seconds in which the drives read and write so many bytes. As many as can move in both directions at once do so.
double least_nvme_seconds(double read, double written, const StepSpeeds& speeds);

}  // namespace hoist
