// SPDX-License-Identifier: Apache-2.0
// platform/topology.hpp - the NUMA nodes and cores, and the node of each drive and GPU.
//
// Read once through hwloc. Tests use hwloc's synthetic descriptions ("numa:2 core:4 pu:2").
//
// Threading  Constant after construction.
// Errors     DeviceError if hwloc cannot read the machine or the description.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hoist::platform {

class Topology {
 public:
  static Topology detect();                                   // this machine, within the process's cpuset
  static Topology synthetic(const std::string& description);  // without drives and GPUs
  // This machine's nodes, but drives and GPUs from another root than /sys.
  static Topology detect_with_sysfs(std::string root);

  struct Node {
    int os_index = 0;
    std::uint64_t memory_bytes = 0;
    std::vector<int> cpus;                // logical processors, OS numbering
    std::vector<std::vector<int>> cores;  // the same, by physical core
  };
  const std::vector<Node>& nodes() const { return nodes_; }
  unsigned core_count() const { return core_count_; }  // physical cores
  unsigned cpu_count() const { return cpu_count_; }    // logical processors

  // The node of the drive that holds `path`, which need not exist yet; nullopt if it is unknown (virtual disks, drives
  // on several nodes, network file systems).
  std::optional<int> node_of_path(const std::string& path) const;
  // The node of a PCI device ("0000:17:00.0"); nullopt likewise.
  std::optional<int> node_of_pci(const std::string& bus_id) const;
  // The processors of the node with that OS number; empty if there is none.
  std::vector<int> cpus_of(int node) const;
  // The node of a block device by its number; a volume over several drives has one if they agree.
  std::optional<int> node_of_block_device(unsigned major, unsigned minor) const;

 private:
  Topology() = default;
  static Topology read(const std::string* description);  // null: this machine
  std::vector<Node> nodes_;
  unsigned core_count_ = 0;
  unsigned cpu_count_ = 0;
  std::string sysfs_;  // empty: a synthetic machine
};

// Whether this machine's memory may be on several nodes, for code that needs a Topology only then. True if unknown.
// Cost: one small file of sysfs, while detect() takes milliseconds.
bool may_have_several_nodes();

}  // namespace hoist::platform
