// SPDX-License-Identifier: Apache-2.0
// aio/stripe_weights.hpp - determines each drive's share of a striped file by a short measurement.
//
// Done once, when a striped file is created: its layout keeps the weights permanently. All drives are measured at the
// same time, as they will be used, so that shared resources (a bus, or the drive itself) count.
//
// Threading  One thread for each drive, for the time of the call.
// Errors     IoError of the first drive, in their order, that failed or that its queue gave up.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <hoist/aio/drive_queue.hpp>

namespace hoist::aio {

struct MeasuredDrive {
  DriveQueue* queue = nullptr;
  std::string directory;
};

struct MeasureOptions {
  Nanoseconds time_limit = std::chrono::seconds(1);  // for everything; after it, waits only for the transfers in flight
  std::uint64_t file_bytes = 64 * kMiB;              // space used on each drive meanwhile; a multiple of 1 MiB
};

struct StripeMeasurement {
  std::vector<double> bytes_per_second;  // of each drive: the harmonic mean of writing and reading
  std::vector<std::uint32_t> weights;    // stripe_weights() of these
};

// Writes a file on each drive, then rewrites and reads what was written: both are slower, or faster, on space that was
// never written. The files have no name while they are used, so they disappear with the process.
StripeMeasurement measure_weights(std::span<const MeasuredDrive> drives, const MeasureOptions& options = {});

// The smallest whole numbers up to StripeLayout::kWeightMax that are within 10 % of the rates' ratios: two measurements
// differ by that much anyway, and short patterns spread best. A drive too slow for that, even one that moved nothing,
// gets 1.
std::vector<std::uint32_t> stripe_weights(std::span<const double> bytes_per_second);

}  // namespace hoist::aio
