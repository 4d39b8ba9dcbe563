// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>

#include <fmt/format.h>
#include <hwloc.h>

#include <hoist/core/error.hpp>
#include <hoist/core/kernel_files.hpp>
#include <hoist/platform/detail/sysfs.hpp>
#include <hoist/platform/topology.hpp>

namespace hoist::platform {

namespace {

struct HwlocDeleter {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Hwloc = std::unique_ptr<hwloc_topology, HwlocDeleter>;

void expect(int result, const std::string& call) {
  if (result >= 0) return;
  throw DeviceError(call, errno, errno_text(errno),
                    "check that /sys is readable, or the description's syntax (\"numa:2 core:4 pu:2\")");
}

Hwloc load(const std::string* description) {
  hwloc_topology_t handle = nullptr;
  expect(hwloc_topology_init(&handle), "hwloc_topology_init");
  Hwloc topology(handle);
  if (description != nullptr) {
    expect(hwloc_topology_set_synthetic(handle, description->c_str()),
           fmt::format("hwloc_topology_set_synthetic(\"{}\")", *description));
  } else {
    expect(hwloc_topology_set_flags(handle,
                                    HWLOC_TOPOLOGY_FLAG_IS_THISSYSTEM | HWLOC_TOPOLOGY_FLAG_RESTRICT_TO_CPUBINDING),
           "hwloc_topology_set_flags");
  }
  expect(hwloc_topology_load(handle), "hwloc_topology_load");
  return topology;
}

std::vector<Topology::Node> read_nodes(hwloc_topology_t topology) {
  std::vector<Topology::Node> nodes;
  for (hwloc_obj_t object = nullptr;
       (object = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, object)) != nullptr;) {
    Topology::Node node{.os_index = static_cast<int>(object->os_index),
                        .memory_bytes = object->attr->numanode.local_memory,
                        .cpus = {},
                        .cores = {}};
    for (hwloc_obj_t core = nullptr; (core = hwloc_get_next_obj_inside_cpuset_by_type(
                                          topology, object->cpuset, HWLOC_OBJ_CORE, core)) != nullptr;) {
      auto& cpus = node.cores.emplace_back();
      for (int cpu = hwloc_bitmap_first(core->cpuset); cpu >= 0; cpu = hwloc_bitmap_next(core->cpuset, cpu))
        cpus.push_back(cpu);
    }
    for (int cpu = hwloc_bitmap_first(object->cpuset); cpu >= 0; cpu = hwloc_bitmap_next(object->cpuset, cpu)) {
      node.cpus.push_back(cpu);
      // Some virtual machines describe no cores, and a made-up node (numa=fake) may divide one.
      const auto has = [cpu](const std::vector<int>& core) { return std::ranges::find(core, cpu) != core.end(); };
      if (std::ranges::none_of(node.cores, has)) node.cores.push_back({cpu});
    }
    nodes.push_back(std::move(node));
  }
  return nodes;
}

unsigned count(hwloc_topology_t topology, hwloc_obj_type_t type) {
  return static_cast<unsigned>(std::max(hwloc_get_nbobjs_by_type(topology, type), 0));
}

}  // namespace

Topology Topology::read(const std::string* description) {
  const Hwloc topology = load(description);
  Topology result;
  result.nodes_ = read_nodes(topology.get());
  result.cpu_count_ = count(topology.get(), HWLOC_OBJ_PU);
  result.core_count_ = count(topology.get(), HWLOC_OBJ_CORE);
  if (result.core_count_ == 0) result.core_count_ = result.cpu_count_;  // some virtual machines describe no cores
  return result;
}

Topology Topology::detect() { return detect_with_sysfs("/sys"); }

Topology Topology::detect_with_sysfs(std::string root) {
  Topology result = read(nullptr);
  // For a node of memory only (CXL, high-bandwidth memory), hwloc names the processors that are nearest to it.
  for (Node& node : result.nodes_) {
    const auto own = first_line(fmt::format("{}/devices/system/node/node{}/cpulist", root, node.os_index));
    if (!own || !own->empty()) continue;
    node.cpus.clear();
    node.cores.clear();
  }
  result.sysfs_ = std::move(root);
  return result;
}

Topology Topology::synthetic(const std::string& description) { return read(&description); }

std::optional<int> Topology::node_of_path(const std::string& path) const {
  if (sysfs_.empty()) return std::nullopt;
  const auto device = detail::block_device_of_path(path);
  return device ? node_of_block_device(device->major, device->minor) : std::nullopt;
}

std::optional<int> Topology::node_of_block_device(unsigned major, unsigned minor) const {
  if (sysfs_.empty()) return std::nullopt;
  return detail::numa_node_of_block_device(sysfs_, {major, minor});
}

std::optional<int> Topology::node_of_pci(const std::string& bus_id) const {
  if (sysfs_.empty()) return std::nullopt;
  std::string name = bus_id;  // sysfs has addresses in lower case
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return detail::numa_node_file(std::filesystem::path(sysfs_) / "bus/pci/devices" / name / "numa_node");
}

bool may_have_several_nodes() {
  std::ifstream online("/sys/devices/system/node/online");  // "0", "0-3" or "0,2"
  std::string nodes;
  return !(online >> nodes) || nodes.find_first_of("-,") != std::string::npos;
}

std::vector<int> Topology::cpus_of(int node) const {
  const auto found = std::ranges::find(nodes_, node, &Node::os_index);
  return found == nodes_.end() ? std::vector<int>{} : found->cpus;
}

}  // namespace hoist::platform
