// SPDX-License-Identifier: Apache-2.0
// platform/numa_placement.hpp - which NUMA nodes and processors each of a machine's processes uses.
//
// Home     Each process has a home node: that of its GPU. Without GPUs, or where their nodes are unknown, the processes
//          are spread over the nodes in order. A node without processors, such as a GPU's own memory, is never a home
//          node.
// Memory   From the home node. Each remaining node goes to the process with the fewest nodes; among several such
//          processes, to the one with the nearest home node. A process with several nodes takes its pages from them in
//          turn, to have the bandwidth of all.
// CPUs     Whole cores. Processes with the same home node divide its cores evenly. Two share a core only where there
//          are fewer cores than processes.
// I/O      A drive's I/O thread is on the drive's node: on the process's own cores there, if it has some. Processes
//          without cores there divide the node's cores evenly.
// Staging  Buffers that weights arrive in from NVMe are on the drives' node, if it is the same for all of a store.
//
// Each process computes the places of all processes of its machine, and all get the same result.
//
// Threading  Pure functions.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include <hoist/platform/topology.hpp>

namespace hoist::platform {

struct NumaPlace {
  std::vector<int> memory_nodes;  // OS numbers, the home node first. Empty: there is only one node
  std::vector<int> cpus;          // OS numbers, ascending. Empty: all that the process may use

  friend bool operator==(const NumaPlace&, const NumaPlace&) = default;
};

// The places of `processes` processes, each of which uses GPU (its number modulo the GPUs). `gpu_nodes`: the OS number
// of each GPU's node. Pre: processes >= 1.
std::vector<NumaPlace> place_processes(std::span<const Topology::Node> nodes,
                                       std::span<const std::optional<int>> gpu_nodes, int processes);

// The processors of a process's I/O threads for the drives of a node.
struct IoPlace {
  int node = 0;  // OS number
  std::vector<int> cpus;

  friend bool operator==(const IoPlace&, const IoPlace&) = default;
};
// Those of process `process` of `places`, for each node with processors.
std::vector<IoPlace> place_io_threads(std::span<const Topology::Node> nodes, std::span<const NumaPlace> places,
                                      std::size_t process);
// The node of a store's staging buffers, OS number; empty: where the rest of pinned memory is.
std::optional<int> staging_node(std::span<const int> memory_nodes, std::span<const std::optional<int>> drive_nodes);

// The place of a process that its launcher has bound: `nodes` have the processors that it may use.
NumaPlace place_bound_process(std::span<const Topology::Node> nodes);

}  // namespace hoist::platform
