// SPDX-License-Identifier: Apache-2.0
#include "units_file.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <hoist/core/error.hpp>

#include "strict_json.hpp"

namespace hoist::cli {

namespace {

using UnitsJson = nlohmann::json;

std::uint64_t count_of(const std::string& key, const UnitsJson& value, double min) {
  const double number = value.is_number() ? value.get<double>() : -1;
  if (!(number >= min && number <= kCountMax) || number != std::floor(number)) {
    refuse(key, value, fmt::format("an integer from {:g} to {:g}", min, kCountMax));
  }
  return static_cast<std::uint64_t>(number);
}

DType dtype_of(const std::string& key, const UnitsJson& value) {
  const auto dtype = value.is_string() ? parse_dtype(value.get_ref<const std::string&>()) : std::nullopt;
  if (!dtype) refuse(key, value, "\"bf16\", \"fp16\" or \"fp32\"");
  return *dtype;
}

bool flag_of(const std::string& key, const UnitsJson& value) {
  if (!value.is_boolean()) refuse(key, value, "true or false");
  return value.get<bool>();
}

const UnitsJson& list_of(const std::string& key, const UnitsJson& value, const char* what) {
  if (!value.is_array()) refuse(key, value, what);
  return value;
}

std::vector<std::int64_t> shape_of(const std::string& key, const UnitsJson& value) {
  std::vector<std::int64_t> shape;
  for (const UnitsJson& extent : list_of(key, value, "a list of extents"))
    shape.push_back(static_cast<std::int64_t>(count_of(key, extent, 1)));
  return shape;
}

ParameterSpec parameter_of(const std::string& key, const UnitsJson& value, DType dtype) {
  if (!value.is_object()) refuse(key, value, "an object with name and shape");
  constexpr double kGroupMax = 1e4;
  ParameterSpec spec{.dtype = dtype};
  for (const auto& [name, member] : value.items()) {
    const std::string path = key + "." + name;
    if (name == "name") {
      spec.name = text_of(path, member);
    } else if (name == "shape") {
      spec.shape = shape_of(path, member);
    } else if (name == "dtype") {
      spec.dtype = dtype_of(path, member);
    } else if (name == "trainable") {
      spec.trainable = flag_of(path, member);
    } else if (name == "counts_in_norm") {
      spec.counts_in_norm = flag_of(path, member);
    } else if (name == "group") {
      const std::uint64_t group = count_of(path, member, 0);
      if (static_cast<double>(group) > kGroupMax) refuse(path, member, "an integer from 0 to 10000");
      spec.group.index = static_cast<std::uint32_t>(group);
    } else {
      throw ConfigError(path, "unknown key; the keys are name, shape, dtype, trainable, group and counts_in_norm");
    }
  }
  if (spec.name.empty()) throw ConfigError(key, "has no name");
  if (!value.contains("shape")) throw ConfigError(key, "has no shape");
  return spec;
}

// A unit as the file describes it.
struct DeclaredUnit {
  std::string name;
  std::vector<ParameterSpec> parameters;
  std::vector<std::string> tied;  // names of parameters of other units
  UnitOptions options;
};

DeclaredUnit unit_of(const std::string& key, const UnitsJson& value, DType dtype) {
  if (!value.is_object()) refuse(key, value, "an object with name and parameters");
  DeclaredUnit unit;
  std::uint64_t parameters = 0;  // if only their number is given
  for (const auto& [name, member] : value.items()) {
    if (name == "name") {
      unit.name = text_of(key + ".name", member);
    } else if (name == "parameters" && member.is_array()) {
      for (std::size_t i = 0; i < member.size(); ++i)
        unit.parameters.push_back(parameter_of(fmt::format("{}.parameters[{}]", key, i), member[i], dtype));
    } else if (name == "parameters") {
      parameters = count_of(key + ".parameters", member, 1);
    } else if (name == "tied") {
      for (const UnitsJson& tied : list_of(key + ".tied", member, "a list of names"))
        unit.tied.push_back(text_of(key + ".tied", tied));
    } else if (name == "gathered_with") {
      for (const UnitsJson& other : list_of(key + "." + name, member, "a list of indices")) {
        const std::uint64_t index = std::min<std::uint64_t>(count_of(key + "." + name, other, 0), UINT32_MAX);
        unit.options.gathered_with.push_back(UnitId{static_cast<std::uint32_t>(index)});
      }
    } else if (name == "stable_address") {
      unit.options.stable_address = flag_of(key + "." + name, member);
    } else if (name == "stable_in_pass") {
      unit.options.stable_in_pass = flag_of(key + "." + name, member);
    } else if (name == "own_gradient_memory") {
      unit.options.own_gradient_memory = flag_of(key + "." + name, member);
    } else {
      throw ConfigError(key + "." + name,
                        "unknown key; a unit has name, parameters, tied, gathered_with, stable_address, "
                        "stable_in_pass and own_gradient_memory");
    }
  }
  if (unit.name.empty()) throw ConfigError(key, "has no name");
  if (!unit.parameters.empty()) return unit;
  if (parameters == 0) throw ConfigError(key, "has no parameters");
  unit.parameters = {{.name = unit.name + ".weight", .shape = {static_cast<std::int64_t>(parameters)}, .dtype = dtype}};
  return unit;
}

// A plan's memory for a unit grows with the unit, and its time with the model.
void check_counts(const Model& model) {
  constexpr double kUnitMax = 1e12;
  double total = 0;
  for (const ModelUnit& unit : model.units()) {
    double count = 0;
    for (const ParameterId parameter : unit.parameters)
      count += static_cast<double>(element_count(model.parameters()[parameter.index]));
    if (count > kUnitMax)
      throw UsageError(fmt::format("unit '{}' has {:g} parameters; a unit may have {:g}, so declare its parts as units",
                                   unit.name, count, kUnitMax));
    total += count;
  }
  if (total > kCountMax)
    throw UsageError(fmt::format("the units have {:g} parameters together; a model may have {:g}", total, kCountMax));
}

}  // namespace

NamedModel read_units(const std::string& path, DType dtype) {
  const UnitsJson root = read_strict_json(path, "check the path given to --units");
  if (!root.is_object() || !root.contains("units") || !root["units"].is_array() || root["units"].empty()) {
    throw ConfigError("units",
                      R"(needs a list of units: write {"units": [{"name": "layer.0", "parameters": 7077888}]})");
  }
  NamedModel named;
  if (root.contains("dtype")) dtype = dtype_of("dtype", root["dtype"]);
  for (const auto& [name, member] : root.items()) {
    if (name == "program_device_bytes") {
      named.program.device_bytes = count_of(name, member, 0);
    } else if (name == "program_pinned_bytes") {
      named.program.pinned_bytes = count_of(name, member, 0);
    } else if (name != "units" && name != "dtype") {
      throw ConfigError(name, "unknown key; the keys are units, program_device_bytes, program_pinned_bytes and dtype");
    }
  }
  Model& model = named.model;
  std::vector<std::vector<std::string>> tied;  // by unit
  for (const UnitsJson& member : root["units"]) {
    DeclaredUnit unit = unit_of(fmt::format("units[{}]", tied.size()), member, dtype);
    for (const ParameterSpec& spec : unit.parameters)
      while (model.added_groups().size() < spec.group.index) model.add_group();
    model.add_unit(unit.name, unit.parameters, unit.options);
    tied.push_back(std::move(unit.tied));
  }
  for (std::uint32_t u = 0; u < tied.size(); ++u) {
    for (const std::string& name : tied[u]) {
      const auto owner = model.find(name);
      if (!owner)
        throw UsageError(fmt::format("unit '{}' is tied to '{}', which no unit has", model.units()[u].name, name));
      model.tie(UnitId{u}, *owner);
    }
  }
  check_counts(model);
  named.name = fmt::format("{} units of {}", model.units().size(), path);
  return named;
}

}  // namespace hoist::cli
