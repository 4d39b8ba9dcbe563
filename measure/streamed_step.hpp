// SPDX-License-Identifier: Apache-2.0
// measure/streamed_step.hpp - compares a whole optimizer step from and to a drive with the drive.
//
// An engine whose weights and optimizer states are on the drive trains a model without computation. Its steps alternate
// with legs of mixed transfers that move as many bytes in the same directory, with the same block size and queue depth
// unless others are given. The result is the ratio of times of each round; a second mixed leg against the first is the
// control.
//
// A step reads whole records and writes them: as many bytes one way as the other. It is timed from the call until it is
// committed: read, verified, updated, checksummed, written to the extents that no commit uses, flushed, and its
// manifest written. The first two are not counted: they write extents for the first time.
//
// Threading  Blocks its caller.
// Errors     UsageError if the directory cannot be used; those of the engine; Interrupted. Its files in the directory
//            are always removed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <hoist/core/units.hpp>
#include <hoist/measure/interruption.hpp>
#include <hoist/optim_cpu/optimizer.hpp>

namespace hoist::measure {

struct StreamedStepOptions {
  std::string directory;
  optim::OptimizerOptions optimizer{};
  std::uint64_t parameters = 200'000'000;
  std::uint64_t pinned_bytes = 512 * kMiB;
  std::uint64_t block_bytes = kMiB;
  unsigned queue_depth = 16;
  // For the mixed legs, to show the drive at its best; 0: those of the steps.
  std::uint64_t mixed_block_bytes = 0;
  unsigned mixed_queue_depth = 0;
  // Read, updated and written as one piece. Eight buffers of 3 MiB for AdamW: the footprint of the mixed legs is 16
  // MiB.
  std::uint64_t piece_parameters = 256 * 1024;
  unsigned buffer_count = 8;
  unsigned pairs = 31;
  const StopFlag* stop = nullptr;
  std::function<void(unsigned pairs_done)> progress{};
};

struct StreamedStepResult {
  std::uint64_t parameters = 0;
  std::vector<double> ratios;          // seconds of a step / of the same bytes mixed
  std::vector<double> control_ratios;  // mixed / mixed
  std::vector<double> step_seconds;
  std::vector<double> update_seconds;  // of processors, within a step
  std::uint64_t bytes_read = 0;        // of one step
  std::uint64_t bytes_written = 0;
  std::uint64_t mixed_block_bytes = 0;
  unsigned mixed_queue_depth = 0;
  std::vector<std::string> description;  // the engine's choices

  double bytes_read_per_parameter() const;
  double bytes_written_per_parameter() const;
};

// Refuses a directory that could not hold what the comparison writes. Errors: UsageError.
void check_streamed_step(const std::string& directory, std::uint64_t parameters);
StreamedStepResult compare_streamed_step(const StreamedStepOptions& options);

}  // namespace hoist::measure
