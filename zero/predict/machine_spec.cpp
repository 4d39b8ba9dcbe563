// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/predict/machine_spec.hpp>

namespace hoist {

namespace {

constexpr double kGigabyte = 1e9;
constexpr double kMicrosecond = 1e-6;
constexpr double kGibibyte = 1024.0 * 1024 * 1024;
constexpr double kSecondsAnHour = 3600;

platform::MemorySize all_free(double gib) {
  const auto bytes = static_cast<std::uint64_t>(gib * kGibibyte);
  return {bytes, bytes};
}

// A rank receives from its own node and from others at the same time; the later part counts.
double wire_speed(const MachineSpec::NetworkSpec& network, const RankLayout& layout) {
  const int others = layout.nodes * layout.ranks_per_node - 1;
  if (others == 0) return 0;
  const double inside = (layout.ranks_per_node - 1.0) / others;
  double seconds = inside > 0 ? inside / (network.in_node_gb_per_s * kGigabyte) : 0;  // alone in its node
  if (layout.nodes > 1) seconds = std::max(seconds, (1 - inside) / (network.between_nodes_gb_per_s * kGigabyte));
  return 1 / seconds;
}

}  // namespace

int largest_world(const MachineSpec& spec) { return static_cast<int>(spec.nodes * std::max(spec.gpus_per_node, 1.0)); }

RankLayout rank_layout(const MachineSpec& spec, int world_size) {
  const int nodes = static_cast<int>(spec.nodes);
  const auto divided_up = [](int a, int b) { return (a + b - 1) / b; };
  const int per_node = spec.gpus_per_node > 0 ? static_cast<int>(spec.gpus_per_node) : divided_up(world_size, nodes);
  if (world_size > nodes * per_node)
    throw UsageError(fmt::format("{} ranks need as many GPUs, and {} has {}", world_size, spec.name, nodes * per_node));
  const int used_nodes = divided_up(world_size, per_node);
  const RankLayout layout{used_nodes, divided_up(world_size, used_nodes)};
  if (layout.ranks_per_node > 1 && spec.network.in_node_gb_per_s == 0)
    throw UsageError(fmt::format("{} has no network.in_node_gb_per_s, which {} ranks of a node need", spec.name,
                                 layout.ranks_per_node));
  if (layout.nodes > 1 && spec.network.between_nodes_gb_per_s == 0)
    throw UsageError(
        fmt::format("{} has no network.between_nodes_gb_per_s, which {} nodes need", spec.name, layout.nodes));
  return layout;
}

Machine node_of(const MachineSpec& spec, const RankLayout& layout) {
  const bool is_integrated = spec.gpus_per_node > 0 && spec.device.memory == platform::GpuMemory::integrated;
  return {.gpu_count = static_cast<int>(spec.gpus_per_node),
          .gpu = all_free(is_integrated ? spec.host.memory_gib : spec.device.memory_gib),
          .gpu_memory = spec.device.memory,
          .host = all_free(spec.host.memory_gib),
          .processes = layout.ranks_per_node};
}

ChosenOptions choose_on(const MachineSpec& spec, const RankLayout& layout, RuntimeOptions options) {
  options.local_ranks = layout.ranks_per_node;
  if (!options.device)
    options.device = spec.gpus_per_node > 0 ? platform::DeviceKind::cuda : platform::DeviceKind::host;
  if (options.update_threads == 0) options.update_threads = 1;  // the file does not say how many processors there are
  return choose(options, node_of(spec, layout));
}

StepSpeeds speeds_of(const MachineSpec& spec, const RankLayout& layout) {
  const double share = kGigabyte / layout.ranks_per_node;
  return {.nvme_read = spec.drives.count * spec.drives.read_gb_per_s * share,
          .nvme_write = spec.drives.count * spec.drives.write_gb_per_s * share,
          .nvme_mixed = spec.drives.count * spec.drives.mixed_gb_per_s * share,
          .host_to_device = spec.device.host_to_device_gb_per_s * kGigabyte,
          .device_to_host = spec.device.device_to_host_gb_per_s * kGigabyte,
          .wire = wire_speed(spec.network, layout),
          .host_memory = spec.host.update_gb_per_s * share,
          .device_memory = spec.device.memory_gb_per_s * kGigabyte,
          .nvme_latency = spec.drives.latency_us * kMicrosecond,
          .copy_latency = spec.device.copy_latency_us * kMicrosecond,
          .wire_latency = spec.network.latency_us * kMicrosecond,
          .nvme_flush = spec.drives.flush_us * kMicrosecond};
}

double drive_bytes(const MachineSpec& spec, const RankLayout& layout) {
  return spec.drives.count * spec.drives.capacity_gb * kGigabyte / layout.ranks_per_node;
}

double endurance_bytes(const MachineSpec& spec, const RankLayout& layout) {
  return spec.drives.count * spec.drives.endurance_tb_written * 1e12 / layout.ranks_per_node;
}

double joules(const MachineSpec& spec, const RankLayout& layout, double seconds) {
  const double node = spec.host.power_watts + layout.ranks_per_node * spec.device.power_watts;
  return node * layout.nodes * seconds;
}

StepCost cost(const MachineSpec& spec, const RankLayout& layout, double seconds) {
  constexpr double kJoulesAKilowattHour = 3.6e6;
  return {.rent = spec.rates.node_per_hour * layout.nodes * seconds / kSecondsAnHour,
          .energy = joules(spec, layout, seconds) / kJoulesAKilowattHour * spec.rates.energy_per_kwh};
}

}  // namespace hoist
