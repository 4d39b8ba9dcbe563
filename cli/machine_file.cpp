// SPDX-License-Identifier: Apache-2.0
#include "machine_file.hpp"

#include <cmath>
#include <map>
#include <set>

#include <fmt/format.h>

#include <hoist/core/error.hpp>

#include "assumed_machine.hpp"  // generated from machines/h100-8x32.json
#include "strict_json.hpp"

namespace hoist::cli {

namespace {

using MachineJson = nlohmann::json;

using platform::GpuMemory;

enum class Need : std::uint8_t { always, of_gpu_memory, never };

// Calls visit(key, value, min, max, need) for every number of the file.
template <typename Spec, typename Visit>
void for_each_number(Spec& spec, const Visit& visit) {
  constexpr double kTiny = 1e-6, kHuge = 1e9, kCountMax = 1e6;
  visit("nodes", spec.nodes, 1, kCountMax, Need::always);
  visit("gpus_per_node", spec.gpus_per_node, 0, 64, Need::always);
  visit("device.memory_gib", spec.device.memory_gib, kTiny, kHuge, Need::of_gpu_memory);
  visit("device.memory_gb_per_s", spec.device.memory_gb_per_s, kTiny, kHuge, Need::always);
  visit("device.host_to_device_gb_per_s", spec.device.host_to_device_gb_per_s, kTiny, kHuge, Need::always);
  visit("device.device_to_host_gb_per_s", spec.device.device_to_host_gb_per_s, kTiny, kHuge, Need::always);
  visit("device.copy_latency_us", spec.device.copy_latency_us, 0, kHuge, Need::never);
  visit("device.compute_tflops", spec.device.compute_tflops, kTiny, kHuge, Need::always);
  visit("device.power_watts", spec.device.power_watts, 0, kHuge, Need::always);
  visit("host.memory_gib", spec.host.memory_gib, kTiny, kHuge, Need::always);
  visit("host.update_gb_per_s", spec.host.update_gb_per_s, kTiny, kHuge, Need::always);
  visit("host.power_watts", spec.host.power_watts, 0, kHuge, Need::always);
  visit("drives.count", spec.drives.count, 1, kCountMax, Need::always);
  visit("drives.capacity_gb", spec.drives.capacity_gb, kTiny, kHuge, Need::always);
  visit("drives.read_gb_per_s", spec.drives.read_gb_per_s, kTiny, kHuge, Need::always);
  visit("drives.write_gb_per_s", spec.drives.write_gb_per_s, kTiny, kHuge, Need::always);
  visit("drives.mixed_gb_per_s", spec.drives.mixed_gb_per_s, kTiny, kHuge, Need::never);
  visit("drives.latency_us", spec.drives.latency_us, 0, kHuge, Need::never);
  visit("drives.flush_us", spec.drives.flush_us, 0, kHuge, Need::never);
  visit("drives.endurance_tb_written", spec.drives.endurance_tb_written, kTiny, kHuge, Need::never);
  visit("network.in_node_gb_per_s", spec.network.in_node_gb_per_s, kTiny, kHuge, Need::never);
  visit("network.between_nodes_gb_per_s", spec.network.between_nodes_gb_per_s, kTiny, kHuge, Need::never);
  visit("network.latency_us", spec.network.latency_us, 0, kHuge, Need::never);
  visit("rates.node_per_hour", spec.rates.node_per_hour, 0, kHuge, Need::never);
  visit("rates.energy_per_kwh", spec.rates.energy_per_kwh, 0, kHuge, Need::never);
}

bool is_count(std::string_view key) { return key == "nodes" || key == "gpus_per_node" || key == "drives.count"; }

// Every leaf of the file by its path; sections are objects, everything else is a leaf.
void flatten(const MachineJson& object, const std::string& prefix, std::map<std::string, MachineJson>& leaves) {
  for (const auto& [name, member] : object.items()) {
    const std::string key = prefix + name;
    if (name.find('.') != std::string::npos) throw ConfigError(key, "unknown key; a section is an object");
    if (member.is_object() && !member.empty()) {
      flatten(member, key + ".", leaves);
    } else {
      leaves[key] = member;
    }
  }
}

GpuMemory memory_of(const MachineJson& value) {
  if (value.is_null()) return GpuMemory::separate;
  for (const GpuMemory memory : {GpuMemory::separate, GpuMemory::coherent, GpuMemory::integrated})
    if (value.is_string() && value.get<std::string>() == platform::gpu_memory_name(memory)) return memory;
  refuse("device.memory", value, "\"separate\", \"coherent\" or \"integrated\"");
}

std::vector<std::string> texts_of(const std::string& key, const MachineJson& value) {
  if (!value.is_array()) refuse(key, value, "a list of texts");
  std::vector<std::string> texts;
  for (const MachineJson& one : value) texts.push_back(text_of(key, one));
  return texts;
}

MachineSpec machine_of(const MachineJson& root) {
  if (!root.is_object()) refuse("", root, "an object that describes a machine");
  std::map<std::string, MachineJson> leaves;
  flatten(root, "", leaves);
  const auto take = [&](const std::string& key) {
    const auto found = leaves.find(key);
    MachineJson value = found == leaves.end() ? MachineJson() : found->second;
    if (found != leaves.end()) leaves.erase(found);
    return value;
  };
  MachineSpec spec;
  spec.device.memory = memory_of(take("device.memory"));
  std::set<std::string> numbers;
  for_each_number(spec, [&](const char* key, double& number, double min, double max, Need need) {
    numbers.insert(key);
    const MachineJson value = take(key);
    const bool has_gpu_memory = spec.gpus_per_node > 0 && spec.device.memory != GpuMemory::integrated;
    if (value.is_null() && (need == Need::never || (need == Need::of_gpu_memory && !has_gpu_memory))) return;
    if (value.is_null()) throw ConfigError(key, "is missing");
    number = value.is_number() ? value.get<double>() : -1;
    const bool whole = !is_count(key) || number == std::floor(number);
    if (!(number >= min && number <= max) || !whole)
      refuse(key, value, fmt::format("{} from {:g} to {:g}", is_count(key) ? "an integer" : "a number", min, max));
  });
  if (spec.device.memory == GpuMemory::integrated && spec.device.memory_gib > 0)
    throw ConfigError("device.memory_gib", "an integrated GPU has no memory of its own: host.memory_gib is for both");
  spec.name = text_of("name", take("name"));
  spec.basis = text_of("basis", take("basis"));
  if (const MachineJson value = take("rates.currency"); !value.is_null())
    spec.rates.currency = text_of("rates.currency", value);
  if (const MachineJson value = take("drives.directories"); !value.is_null())
    spec.drives.directories = texts_of("drives.directories", value);
  if (const MachineJson value = take("assumed"); !value.is_null()) spec.assumed = texts_of("assumed", value);
  if (!leaves.empty()) throw ConfigError(leaves.begin()->first, "unknown key; machines/README.md lists them all");
  for (const std::string& key : spec.assumed)
    if (!numbers.contains(key)) refuse("assumed", key, "a key of a number, such as \"device.compute_tflops\"");
  if (!spec.drives.directories.empty() && static_cast<double>(spec.drives.directories.size()) != spec.drives.count)
    throw ConfigError("drives.directories", fmt::format("has {} directories for {} drives",
                                                        spec.drives.directories.size(), spec.drives.count));
  return spec;
}

}  // namespace

MachineSpec read_machine(const std::string& path) {
  return machine_of(read_strict_json(path, "check the path given to --machine"));
}

MachineSpec assumed_machine() { return machine_of(parse_strict_json(kAssumedMachine)); }

nlohmann::ordered_json machine_file_json(const MachineSpec& spec) {
  nlohmann::ordered_json json{{"name", spec.name}, {"basis", spec.basis}};
  const auto set = [&](const std::string& key, const auto& value) {
    const std::size_t dot = key.find('.');
    (dot == std::string::npos ? json[key] : json[key.substr(0, dot)][key.substr(dot + 1)]) = value;
  };
  for_each_number(spec, [&](const char* key, const double& number, double, double, Need need) {
    if (number != 0 || need == Need::always) set(key, number);
  });
  if (spec.device.memory != GpuMemory::separate) set("device.memory", platform::gpu_memory_name(spec.device.memory));
  if (!spec.drives.directories.empty()) set("drives.directories", spec.drives.directories);
  if (!spec.rates.currency.empty()) set("rates.currency", spec.rates.currency);
  json["assumed"] = spec.assumed;
  return json;
}

}  // namespace hoist::cli
