// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/predict/step_graph.hpp>
#include <hoist/zero/predict/step_time.hpp>

namespace hoist {

namespace {

using detail::time_of;
using Seconds = std::array<double, kResourceCount>;

// Steps that are simulated: the first ones fill the buffers, and the last ones are timed.
constexpr unsigned kSteps = 5, kTimedSteps = 2;

double& at(Seconds& seconds, Resource resource) { return seconds[static_cast<std::size_t>(resource)]; }

Seconds busy(const Prediction& p, const StepSpeeds& speeds) {
  Seconds seconds{};
  at(seconds, Resource::compute) = speeds.compute_seconds;
  at(seconds, Resource::nvme) =
      least_nvme_seconds(static_cast<double>(p.step.nvme_read), static_cast<double>(p.step.nvme_write), speeds);
  at(seconds, Resource::host_to_device) = time_of(p.step.host_to_device, speeds.host_to_device);
  at(seconds, Resource::device_to_host) = time_of(p.step.device_to_host, speeds.device_to_host);
  at(seconds, Resource::wire) = time_of(p.step.wire, speeds.wire);
  at(seconds, Resource::host_memory) = time_of(p.update_memory_bytes, speeds.host_memory);
  at(seconds, Resource::device_memory) = time_of(p.device_update_bytes, speeds.device_memory);
  return seconds;
}

// A unit's part of the critical path.
struct UnitSeconds {
  double update = 0, device_update = 0;
  double up = 0, gathered = 0, up_latency = 0;  // after the update, in one pass
  double forward = 0, backward = 0;
  double reduced = 0, down = 0, down_latency = 0;
  double read_bytes = 0, written_bytes = 0;  // of NVMe, by the update
};

std::vector<UnitSeconds> unit_seconds(const Prediction& p, const StepSpeeds& speeds) {
  double parameters = 0;
  for (const UnitWork& unit : p.units) parameters += static_cast<double>(unit.parameters);
  std::vector<UnitSeconds> all;
  for (const UnitWork& unit : p.units) {
    UnitSeconds one;
    const double compute = speeds.compute_seconds / p.passes * static_cast<double>(unit.parameters) / parameters;
    one.forward = compute * speeds.forward_share;
    one.backward = compute - one.forward;
    if (unit.trainable) {
      one.update = time_of(unit.update_memory_bytes, speeds.host_memory);
      one.device_update = time_of(unit.device_update_bytes, speeds.device_memory);
      one.up = time_of(unit.bytes.forward_fetch.host_to_device / p.passes, speeds.host_to_device);
      one.gathered = time_of(unit.bytes.forward_fetch.wire / p.passes, speeds.wire);
      one.reduced = time_of(unit.bytes.gradient.wire / p.passes, speeds.wire);
      one.down = time_of(unit.bytes.gradient.device_to_host / p.passes, speeds.device_to_host);
      const auto latencies = [&](double copied, double gathered) {
        return (copied > 0 ? speeds.copy_latency : 0) + (gathered > 0 ? speeds.wire_latency : 0);
      };
      one.up_latency = latencies(one.up, one.gathered);
      one.down_latency = latencies(one.down, one.reduced);
      one.read_bytes = static_cast<double>(unit.bytes.update.nvme_read);
      // State in memory is also written, but at any time before its next update.
      one.written_bytes = static_cast<double>(unit.bytes.update.nvme_write - unit.bytes.resident_write_bytes);
    }
    all.push_back(one);
  }
  return all;
}

// Pinned memory for state on its way from and to NVMe: the buffers, and what the budget has left.
double transit_bytes(const Prediction& p) {
  std::uint64_t unused = left_of(p.pinned.budget_bytes, p.pinned.bytes);
  if (p.host_budget_bytes > 0) unused = std::min(unused, left_of(p.host_budget_bytes, p.device.bytes + p.pinned.bytes));
  return static_cast<double>(p.update_buffers * p.update_buffer_bytes + p.staging_buffers * p.staging_buffer_bytes +
                             unused);
}

// Every unit is updated between two instants at which all gradients are known. Whatever the order, a unit computes only
// when it and all before it have been updated, have gone up and are gathered, and all gradients from it on come after.
// Their state has then been read and written, except what the pinned memory for state in transit holds: it may have
// been read before, and may be written later.
double path_from_norm_to_norm(const std::vector<UnitSeconds>& units, const Prediction& p, const StepSpeeds& speeds) {
  const double transit = transit_bytes(p);
  double updates = 0, device_updates = 0, up = 0, gathered = 0, computed = 0, read = -transit, written = -transit;
  for (const UnitSeconds& unit : units) {
    updates += unit.update;
    device_updates += unit.device_update;
    up += unit.up;
    gathered += unit.gathered;
    read += unit.read_bytes;
    written += unit.written_bytes;
    // Each byte takes its share of the step's time, as in the schedule: it may move while any other byte of the step
    // does.
    const double drives = detail::nvme_seconds(std::max(read, 0.0), speeds.nvme_read, p.step, speeds) +
                          detail::nvme_seconds(std::max(written, 0.0), speeds.nvme_write, p.step, speeds);
    const double own = unit.update + unit.device_update + unit.up + unit.gathered + unit.up_latency;
    computed = std::max({computed, updates, device_updates, up, gathered, own, drives}) + unit.forward;
  }
  for (const UnitSeconds& unit : units) computed += (p.passes - 1) * (unit.forward + unit.backward);
  double reduced = 0, down = 0, end = 0;  // of the gradients still to come
  for (const UnitSeconds& unit : units) reduced += unit.reduced, down += unit.down;
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
    computed += unit->backward;
    end = std::max(
        {end, computed + reduced, computed + down, computed + unit->reduced + unit->down + unit->down_latency});
    reduced -= unit->reduced;
    down -= unit->down;
  }
  return end;
}

// The longest path through one unit: its gradient, its update, and the passes from its forward to its backward.
double path_through_a_unit(const std::vector<UnitSeconds>& units, unsigned passes) {
  double most = 0, after = 0, all = 0;
  for (const UnitSeconds& unit : units) all += unit.forward + unit.backward;
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
    after += unit->forward + unit->backward;
    most = std::max(most, after + (passes - 1) * all + unit->reduced + unit->down + unit->down_latency + unit->update +
                              unit->device_update + unit->up + unit->gathered + unit->up_latency);
  }
  return most;
}

StepSpeeds slowed(StepSpeeds speeds, const StepDisturbance& disturbance) {
  for (double* const speed : {&speeds.nvme_read, &speeds.nvme_write, &speeds.nvme_mixed})
    *speed /= disturbance.slow_drive;
  speeds.nvme_flush *= disturbance.slow_drive;
  for (double* const speed : {&speeds.host_memory, &speeds.device_memory}) *speed /= disturbance.slow_rank;
  speeds.compute_seconds *= disturbance.slow_rank;
  return speeds;
}

// A simulation would not end.
void check(const StepSpeeds& s, double noise) {
  for (const double value : {s.nvme_read, s.nvme_write, s.nvme_mixed, s.host_to_device, s.device_to_host, s.wire,
                             s.host_memory, s.device_memory, s.nvme_latency, s.copy_latency, s.wire_latency,
                             s.nvme_flush, s.compute_seconds, s.forward_share, noise}) {
    if (!std::isfinite(value) || value < 0)
      throw UsageError(fmt::format("a step cannot be predicted from the speed, time or disturbance {}", value));
  }
}

}  // namespace

const char* resource_name(Resource resource) {
  static constexpr std::array<const char*, kResourceCount> kNames{
      "compute", "nvme", "host_to_device", "device_to_host", "wire", "host_memory", "device_memory"};
  return kNames[static_cast<std::size_t>(resource)];
}

StepTime predict_time(const Prediction& prediction, const StepSpeeds& planned, const StepDisturbance& disturbance) {
  const StepSpeeds speeds = slowed(planned, disturbance);
  check(speeds, disturbance.noise);
  StepTime time{.busy_seconds = busy(prediction, speeds)};
  const auto most = std::ranges::max_element(time.busy_seconds);
  time.limit = static_cast<Resource>(most - time.busy_seconds.begin());
  const std::vector<UnitSeconds> units = unit_seconds(prediction, speeds);
  time.critical_path_seconds = prediction.awaits_norm ? path_from_norm_to_norm(units, prediction, speeds)
                                                      : path_through_a_unit(units, prediction.passes);
  time.least_seconds = std::max(*most, time.critical_path_seconds);

  const detail::StepGraph graph = detail::step_graph(prediction, speeds, kSteps);
  const auto times =
      scheduler::simulate(graph.tasks, kResourceCount, {.noise = disturbance.noise, .seed = disturbance.seed});
  const scheduler::TaskIndex from = graph.decided[kSteps - 1 - kTimedSteps], to = graph.decided[kSteps - 1];
  // While writes still pile up behind the steps that are simulated, these are shorter than all later ones.
  time.simulated_seconds = (times[to].end - times[from].end) / kTimedSteps;
  time.expected_seconds = std::max(time.simulated_seconds, time.least_seconds);
  const auto waits = scheduler::waits_of_lane(graph.tasks, times, static_cast<std::uint32_t>(Resource::compute),
                                              kResourceCount, from, to);
  for (std::size_t r = 0; r < kResourceCount; ++r) time.wait_seconds[r] = waits[r] / kTimedSteps;
  return time;
}

PlannedStep plan_step(const StepQuestion& question, EngineOptions engine) {
  Prediction prediction = predict(question.runtime, engine, question.model, question.world_size, question.program);
  const StepTime time = predict_time(prediction, question.speeds);
  return {std::move(engine), std::move(prediction), time};
}

PlannedStep faster_of_ahead_and_on_demand(const StepQuestion& question, PlannedStep ahead) {
  // Fetching on demand moves no fewer bytes, so that no schedule of it takes less than this bound.
  if (ahead.engine.prefetch_elements == 0 || ahead.time.expected_seconds <= ahead.time.least_seconds) return ahead;
  EngineOptions engine = ahead.engine;
  engine.prefetch_elements = 0;
  PlannedStep on_demand = plan_step(question, std::move(engine));
  constexpr double kRounding = 1 - 1e-9;  // of sums: such times are equal
  return on_demand.time.expected_seconds < kRounding * ahead.time.expected_seconds ? on_demand : ahead;
}

std::string overrun_of_plan(const Prediction& prediction, const StepSpeeds& speeds) {
  check(speeds, /*noise=*/0);
  static constexpr std::array<const char*, detail::kHeldInCount> kNames{"gather memory", "gradient buffers",
                                                                        "staging buffers", "update buffers"};
  const detail::StepGraph graph = detail::step_graph(prediction, speeds, kSteps);
  const auto reserved = detail::reserved_bytes(prediction);
  const auto overrun = scheduler::find_overrun(graph.tasks, scheduler::simulate(graph.tasks, kResourceCount), reserved);
  if (!overrun) return "";
  return fmt::format("after {:.6g} s the {} hold {} bytes, and have {}", overrun->seconds, kNames[overrun->tier],
                     overrun->bytes, reserved[overrun->tier]);
}

double least_nvme_seconds(double read, double written, const StepSpeeds& speeds) {
  const bool mixes = speeds.nvme_mixed > 0 && speeds.nvme_read > 0 && speeds.nvme_write > 0;
  const double both = mixes ? std::min(read, written) : 0;
  return time_of(2 * both, speeds.nvme_mixed) + time_of(read - both, speeds.nvme_read) +
         time_of(written - both, speeds.nvme_write);
}

}  // namespace hoist
