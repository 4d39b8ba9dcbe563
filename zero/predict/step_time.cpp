// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/zero/predict/step_time.hpp>

namespace hoist {

namespace {

using Seconds = std::array<double, kResourceCount>;

double& at(Seconds& seconds, Resource resource) { return seconds[static_cast<std::size_t>(resource)]; }

double time_of(double bytes, double bytes_per_second) { return bytes_per_second > 0 ? bytes / bytes_per_second : 0; }

// As much as goes both ways at once does; what is left of one direction goes alone.
double nvme_seconds(double read, double write, const StepSpeeds& speeds) {
  const double both = speeds.nvme_mixed > 0 ? std::min(read, write) : 0;
  return time_of(2 * both, speeds.nvme_mixed) + time_of(read - both, speeds.nvme_read) +
         time_of(write - both, speeds.nvme_write);
}

// Of one phase: what must be over before the next one begins.
Seconds busy(const StepBytes& bytes, const StepSpeeds& speeds) {
  Seconds seconds{};
  at(seconds, Resource::nvme) =
      nvme_seconds(static_cast<double>(bytes.nvme_read), static_cast<double>(bytes.nvme_write), speeds);
  at(seconds, Resource::host_to_device) = time_of(static_cast<double>(bytes.host_to_device), speeds.host_to_device);
  at(seconds, Resource::device_to_host) = time_of(static_cast<double>(bytes.device_to_host), speeds.device_to_host);
  at(seconds, Resource::wire) = time_of(static_cast<double>(bytes.wire), speeds.wire);
  return seconds;
}

double longest(const Seconds& seconds) { return *std::max_element(seconds.begin(), seconds.end()); }

}  // namespace

const char* resource_name(Resource resource) {
  static constexpr std::array<const char*, kResourceCount> kNames{
      "compute", "nvme", "host_to_device", "device_to_host", "wire", "host_memory", "device_memory"};
  return kNames[static_cast<std::size_t>(resource)];
}

StepTime predict_time(const Prediction& prediction, const StepSpeeds& speeds) {
  const StepPhases& phases = prediction.phases;
  const double read = static_cast<double>(prediction.step.nvme_read);
  const double written = static_cast<double>(prediction.step.nvme_write);
  const double update = time_of(static_cast<double>(prediction.update_memory_bytes), speeds.host_memory);
  const double device_update = time_of(static_cast<double>(prediction.device_update_bytes), speeds.device_memory);

  StepTime time;
  time.busy_seconds = busy(prediction.step, speeds);
  at(time.busy_seconds, Resource::compute) = speeds.compute_seconds;
  at(time.busy_seconds, Resource::nvme) = nvme_seconds(read, written, speeds);
  at(time.busy_seconds, Resource::host_memory) = update;
  at(time.busy_seconds, Resource::device_memory) = device_update;
  time.least_seconds = longest(time.busy_seconds);
  const auto most = std::max_element(time.busy_seconds.begin(), time.busy_seconds.end());
  time.limit = static_cast<Resource>(most - time.busy_seconds.begin());

  // A pass that updates reads on only as buffers are written out: what they do not hold is written before it ends, the
  // rest under what comes next. What they hold at its beginning was read under the backward pass before.
  const bool in_forward = prediction.update_mode == UpdateMode::forward;
  const bool in_backward = prediction.update_mode == UpdateMode::backward;
  const std::uint64_t trailing = std::min(phases.update.nvme_write, prediction.trailing_bytes);
  StepBytes update_in_pass = phases.update;
  update_in_pass.nvme_write -= trailing;
  update_in_pass.nvme_read -= prediction.read_ahead_bytes;
  StepBytes forward = phases.forward / prediction.passes, backward = phases.backward / prediction.passes;
  if (in_forward) backward.nvme_write += trailing / prediction.passes;
  if (in_backward) forward.nvme_write += trailing / prediction.passes;
  StepBytes first_forward = forward, last_backward = backward;
  if (in_forward) first_forward += update_in_pass;
  if (in_backward) last_backward += update_in_pass;
  last_backward.nvme_read += prediction.read_ahead_bytes;

  const double compute = speeds.compute_seconds / prediction.passes;
  const auto pass_seconds = [&](const StepBytes& bytes, double share, bool updates) {
    Seconds seconds = busy(bytes, speeds);
    at(seconds, Resource::compute) = compute * share;
    if (updates) at(seconds, Resource::host_memory) = update;
    return longest(seconds);
  };
  const double forward_share = speeds.forward_share, backward_share = 1 - speeds.forward_share;
  double expected = pass_seconds(first_forward, forward_share, in_forward) +
                    pass_seconds(last_backward, backward_share, in_backward) +
                    (prediction.passes - 1) * (pass_seconds(forward, forward_share, /*updates=*/false) +
                                               pass_seconds(backward, backward_share, /*updates=*/false));
  if (prediction.update_mode == UpdateMode::step) {  // which is over when all is read, computed and written
    expected += std::max(nvme_seconds(static_cast<double>(update_in_pass.nvme_read), written, speeds), update);
  }
  expected += device_update;
  time.expected_seconds = std::max(expected, time.least_seconds);
  return time;
}

}  // namespace hoist
