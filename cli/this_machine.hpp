// SPDX-License-Identifier: Apache-2.0
// cli/this_machine.hpp - this machine as hoist plan sees it: measured once, then read from the user's cache directory.
#pragma once

#include <string>
#include <vector>

#include <hoist/measure/interruption.hpp>
#include <hoist/zero/predict/machine_spec.hpp>

namespace hoist::cli {

struct ThisMachine {
  MachineSpec spec;
  std::string cache_path;  // empty: the measurement could not be kept
  bool measured_now = false;
};

// Each of `directories` stands for a drive. Takes about ten seconds if the cache has no measurement of them; the file
// is in the format of any machine file. Errors: UsageError for an unusable directory; IoError; Interrupted.
ThisMachine this_machine_spec(const std::vector<std::string>& directories, const measure::StopFlag* stop);

}  // namespace hoist::cli
