// SPDX-License-Identifier: Apache-2.0
// platform/topology.hpp - which NUMA nodes and cores there are, and which node each drive and card hangs off.
//
// Read once through hwloc. Tests use hwloc's synthetic descriptions ("numa:2 core:4 pu:2").
//
// Threading  Constant after construction.
// Errors     DeviceError when hwloc cannot read the machine or the description.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hoist::platform {

class Topology {
 public:
  static Topology detect();                                     // this machine, within the process's cpuset
  static Topology synthetic(const std::string& description);

  struct Node {
    int os_index = 0;
    std::uint64_t memory_bytes = 0;
    std::vector<int> cpus;  // logical processors, OS numbering
  };
  const std::vector<Node>& nodes() const { return nodes_; }
  unsigned core_count() const { return core_count_; }  // physical cores
  unsigned cpu_count() const { return cpu_count_; }    // logical processors

  // The node of the drive that holds `path`; nullopt when the system does not say (virtual disks, several drives).
  std::optional<int> node_of_path(const std::string& path) const;
  // The node of a PCI device ("0000:17:00.0"); nullopt likewise.
  std::optional<int> node_of_pci(const std::string& bus_id) const;

 private:
  std::vector<Node> nodes_;
  unsigned core_count_ = 0;
  unsigned cpu_count_ = 0;
};

// Binds the calling thread to the cpus of a node. False, and nothing changed, when the system refuses.
bool bind_thread_to_node(const Topology& topology, int node);

}  // namespace hoist::platform
