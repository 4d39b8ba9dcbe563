// SPDX-License-Identifier: Apache-2.0
#include "units_file.hpp"

#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <hoist/core/error.hpp>

namespace hoist::cli {

namespace {

using Json = nlohmann::json;

constexpr double kCountMax = 1e15;

[[noreturn]] void refuse(const std::string& key, const Json& value, std::string_view allowed) {
  std::string shown = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (shown.size() > 60) shown = shown.substr(0, 57) + "...";
  throw ConfigError(key, fmt::format("{} is not {}", shown, allowed));
}

std::uint64_t count_of(const std::string& key, const Json& value, double min) {
  const double number = value.is_number() ? value.get<double>() : -1;
  if (!(number >= min && number <= kCountMax) || number != std::floor(number)) {
    refuse(key, value, fmt::format("an integer from {:g} to {:g}", min, kCountMax));
  }
  return static_cast<std::uint64_t>(number);
}

DType dtype_of(const Json& value) {
  if (value == "bf16") return DType::bf16;
  if (value == "fp32") return DType::fp32;
  refuse("dtype", value, "\"bf16\" or \"fp32\"");
}

UnitShape unit_of(const std::string& key, const Json& value, DType dtype) {
  if (!value.is_object()) refuse(key, value, "an object with name and parameters");
  UnitShape unit;
  std::uint64_t parameters = 0;
  for (const auto& [name, member] : value.items()) {
    if (name == "name") {
      if (!member.is_string()) refuse(key + ".name", member, "a string");
      unit.name = member.get<std::string>();
    } else if (name == "parameters") {
      parameters = count_of(key + ".parameters", member, 1);
    } else {
      throw ConfigError(key + "." + name, "unknown key; a unit has name and parameters");
    }
  }
  if (unit.name.empty()) throw ConfigError(key, "has no name");
  if (parameters == 0) throw ConfigError(key, "has no parameters");
  unit.parameters = {{.name = unit.name + ".weight", .shape = {static_cast<std::int64_t>(parameters)}, .dtype = dtype}};
  return unit;
}

Json parse_file(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) throw IoError({.operation = "read", .path = path, .code = errno}, "check the path given to --units");
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    throw ConfigError("", fmt::format("{} is not JSON: {}", path, error.what()));
  }
}

}  // namespace

ModelShape read_units(const std::string& path) {
  const Json root = parse_file(path);
  if (!root.is_object() || !root.contains("units") || !root["units"].is_array() || root["units"].empty()) {
    throw ConfigError("units", R"(is missing: write {"units": [{"name": "layer.0", "parameters": 7077888}]})");
  }
  ModelShape model;
  const DType dtype = root.contains("dtype") ? dtype_of(root["dtype"]) : DType::bf16;
  for (const auto& [name, member] : root.items()) {
    if (name == "program_device_bytes") {
      model.program_device_bytes = count_of(name, member, 0);
    } else if (name != "units" && name != "dtype") {
      throw ConfigError(name, "unknown key; there are units, program_device_bytes and dtype");
    }
  }
  std::size_t index = 0;
  for (const Json& unit : root["units"]) model.units.push_back(unit_of(fmt::format("units[{}]", index++), unit, dtype));
  return model;
}

std::optional<std::uint64_t> parse_count(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{}) return std::nullopt;
  const std::string_view suffix = text.substr(static_cast<std::size_t>(end - text.data()));
  constexpr std::string_view kSuffixes = "KMBT";
  if (suffix.size() > 1) return std::nullopt;
  if (suffix.size() == 1) {
    const std::size_t power = kSuffixes.find(suffix.front());
    if (power == std::string_view::npos) return std::nullopt;
    number *= std::pow(1000.0, static_cast<double>(power) + 1);
  }
  if (!(number >= 1 && number <= kCountMax)) return std::nullopt;
  return static_cast<std::uint64_t>(std::llround(number));
}

}  // namespace hoist::cli
