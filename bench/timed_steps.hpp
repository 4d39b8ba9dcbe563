// SPDX-License-Identifier: Apache-2.0
// bench/timed_steps.hpp - real steps on a drive and with kernels of known speed, beside what predict_time() expects of
// them. bench_step_time judges the times; tests judge only what holds at every speed of the machine.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>

#include <hoist/core/clock.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/predict/step_time.hpp>

namespace hoist::bench {

enum class PinnedMemory : std::uint8_t { plenty, least };

struct TimedCell {
  const char* name;
  int compute_ms;  // what the kernels of a step take together, a third of it forward
  UpdateMode mode;
  Placement parameters;
  PinnedMemory pinned = PinnedMemory::plenty;
};

inline constexpr std::array kTimedCells{
    TimedCell{"drive_forward", 15, UpdateMode::forward, Placement::nvme},
    TimedCell{"drive_step", 15, UpdateMode::step, Placement::nvme},
    TimedCell{"compute_forward", 400, UpdateMode::forward, Placement::nvme},
    TimedCell{"compute_step", 400, UpdateMode::step, Placement::nvme},
    TimedCell{"even_step", 120, UpdateMode::step, Placement::pinned},
    TimedCell{"even_forward", 120, UpdateMode::forward, Placement::pinned},
    TimedCell{"even_backward", 120, UpdateMode::backward, Placement::pinned},
    TimedCell{"compute_backward", 400, UpdateMode::backward, Placement::nvme},
    TimedCell{"drive_backward", 15, UpdateMode::backward, Placement::nvme},
    TimedCell{"pinned_drive", 15, UpdateMode::forward, Placement::pinned},
    TimedCell{"pinned_compute", 400, UpdateMode::forward, Placement::pinned},
    // Gradients wait for room until the drive has done with the ones before them: in the pass, and still in step().
    TimedCell{"gradient_ring", 15, UpdateMode::backward, Placement::pinned, PinnedMemory::least},
};

struct TimedSteps {
  double seconds = 0;  // of a step, in the quickest window
  // At most so much of a step's drive time may fall outside the window that is timed: reads ahead before it, writes
  // after it.
  double outside_seconds = 0;
  StepTime predicted;
  // `explained`: the share of a window's time that was a kernel's or a wait with a cause. Of all windows, the largest.
  // `explained_or_running` also counts time in which a thread of this process ran or waited for a processor.
  double explained = 0;
  double explained_or_running = 0;
};

// Trains `windows` times a few steps in `directory`, which is empty. `flush_seconds`: of its drive, for the prediction.
TimedSteps time_steps(const TimedCell& cell, const std::filesystem::path& directory, int windows,
                      double flush_seconds = 0);

}  // namespace hoist::bench
