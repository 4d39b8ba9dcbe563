// SPDX-License-Identifier: Apache-2.0
// zero/predict/step_time.hpp - how long a step takes, from what it moves and how fast that goes.
//
// Two figures. `least`: everything overlaps with everything, so the busiest resource alone decides; no schedule is
// faster. `expected`: as this engine works, where forward, backward and the update follow each other. Within one of
// them all overlaps; what buffers hold of writes goes on under what comes next, and for an update under forward they
// are filled under the backward pass before it. An update under the forward or the backward pass (update modes
// `forward` and `backward`) is part of it, one in step() comes after backward. What the device updates, it does in
// step() and before all else. Left out: filling the pipeline at the start of a phase, latencies, and processors that
// the update and the program share.
//
// Threading  Pure functions.
#pragma once

#include <array>
#include <cstdint>

#include <hoist/zero/predict/prediction.hpp>

namespace hoist {

// What a step keeps busy.
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
  double wire = 0;             // received
  double host_memory = 0;      // read and written, by the processors that update
  double device_memory = 0;    // likewise by a device that updates
  double compute_seconds = 0;  // of forward and backward, when nothing is waited for
  // Forward's part of them: a third, a quarter where backward computes forward once more.
  double forward_share = 1.0 / 3;
};

struct StepTime {
  std::array<double, kResourceCount> busy_seconds{};  // by Resource
  double least_seconds = 0;
  double expected_seconds = 0;
  Resource limit = Resource::compute;  // the busiest

  double busy(Resource resource) const { return busy_seconds[static_cast<std::size_t>(resource)]; }
};
StepTime predict_time(const Prediction& prediction, const StepSpeeds& speeds);

}  // namespace hoist
