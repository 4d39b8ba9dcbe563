// SPDX-License-Identifier: Apache-2.0
// cli/machine_file.hpp - reads and writes the description of a machine that `hoist plan` predicts for.
//
// machines/README.md documents the format. Every value is needed unless it says otherwise; an unknown key is an error.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include <hoist/zero/predict/machine_spec.hpp>

namespace hoist::cli {

// Errors: IoError; ConfigError naming the key ("drives.read_gb_per_s") and what it should be.
MachineSpec read_machine(const std::string& path);
// The machine that is assumed if none is given: machines/h100-8x32.json.
MachineSpec assumed_machine();
nlohmann::ordered_json machine_file_json(const MachineSpec& spec);

}  // namespace hoist::cli
