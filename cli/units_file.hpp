// SPDX-License-Identifier: Apache-2.0
// cli/units_file.hpp - the units of a model from a JSON file.
#pragma once

#include <string>

#include <hoist/zero/predict/prediction.hpp>

namespace hoist::cli {

struct NamedModel {
  Model model;
  ProgramMemory program{};
  std::string name;  // the source of the model
};

// {"units": [{"name": "layer.0", "parameters": 7077888}, ...], "program_device_bytes": 0, "program_pinned_bytes": 0,
// "dtype": "bf16"}; the last three are optional, and a file without a type has `dtype`. Exactly, as programs describe
// themselves, `parameters` is a list of {"name", "shape", "dtype", "trainable", "group", "counts_in_norm"}, of which
// name and shape are needed, `tied` names parameters of other units, and a unit has the members of UnitOptions, with
// earlier units by their index.
// Errors: IoError; ConfigError naming the member ("units[3].parameters") and what it should be.
NamedModel read_units(const std::string& path, DType dtype);

// A count of parameters is at most this.
inline constexpr double kCountMax = 1e13;

}  // namespace hoist::cli
