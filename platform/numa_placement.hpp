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
//
// Every process of a machine computes the places of all, and comes to the same.
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

// The place of a process that its launcher has bound: `nodes` have the processors that it may use.
NumaPlace place_bound_process(std::span<const Topology::Node> nodes);

}  // namespace hoist::platform
