// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>

#include <hoist/core/assert.hpp>
#include <hoist/platform/numa_placement.hpp>

namespace hoist::platform {

namespace {

using Nodes = std::vector<const Topology::Node*>;

Nodes with_processors(std::span<const Topology::Node> nodes) {
  Nodes found;
  for (const Topology::Node& node : nodes)
    if (!node.cpus.empty()) found.push_back(&node);
  return found;
}

// The position in `nodes` of each process's home.
std::vector<std::size_t> homes_of(const Nodes& nodes, std::span<const std::optional<int>> gpu_nodes,
                                  std::size_t processes) {
  std::vector<std::size_t> homes(processes);
  for (std::size_t p = 0; p < processes; ++p) {
    homes[p] = p * nodes.size() / processes;
    if (gpu_nodes.empty()) continue;
    const std::optional<int> wanted = gpu_nodes[p % gpu_nodes.size()];
    const auto node = std::ranges::find_if(nodes, [&](const auto* one) { return one->os_index == wanted; });
    if (wanted && node != nodes.end()) homes[p] = static_cast<std::size_t>(node - nodes.begin());
  }
  return homes;
}

std::size_t distance(std::size_t a, std::size_t b) { return a > b ? a - b : b - a; }

// The positions of each process's nodes, its home first.
std::vector<std::vector<std::size_t>> shares_of(const Nodes& nodes, const std::vector<std::size_t>& homes) {
  std::vector<std::vector<std::size_t>> shares;
  for (const std::size_t home : homes) shares.push_back({home});
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    if (std::ranges::find(homes, node) != homes.end()) continue;
    const auto nearest = std::ranges::min_element(shares, [&](const auto& a, const auto& b) {
      return std::pair(a.size(), distance(a.front(), node)) < std::pair(b.size(), distance(b.front(), node));
    });
    nearest->push_back(node);
  }
  return shares;
}

// The `part`-th of `parts` even parts of the node's cores; one core where there are fewer than parts.
void add_cores(const Topology::Node& node, std::size_t part, std::size_t parts, std::vector<int>& cpus) {
  const std::size_t count = node.cores.size();
  std::size_t begin = part * count / parts, end = (part + 1) * count / parts;
  if (begin == end) begin = part % count, end = begin + 1;
  for (std::size_t core = begin; core < end; ++core)
    cpus.insert(cpus.end(), node.cores[core].begin(), node.cores[core].end());
}

}  // namespace

std::vector<NumaPlace> place_processes(std::span<const Topology::Node> all,
                                       std::span<const std::optional<int>> gpu_nodes, int processes) {
  HOIST_ASSERT(processes >= 1, "{} processes", processes);
  std::vector<NumaPlace> places(static_cast<std::size_t>(processes));
  const Nodes nodes = with_processors(all);
  if (nodes.empty()) return places;
  const auto shares = shares_of(nodes, homes_of(nodes, gpu_nodes, places.size()));
  for (std::size_t p = 0; p < places.size(); ++p) {
    if (all.size() > 1)
      for (const std::size_t node : shares[p]) places[p].memory_nodes.push_back(nodes[node]->os_index);
    if (processes == 1) continue;
    for (const std::size_t node : shares[p]) {
      const auto has = [&](const auto& share) { return std::ranges::find(share, node) != share.end(); };
      const auto before =
          static_cast<std::size_t>(std::count_if(shares.begin(), shares.begin() + static_cast<std::ptrdiff_t>(p), has));
      add_cores(*nodes[node], before, static_cast<std::size_t>(std::ranges::count_if(shares, has)), places[p].cpus);
    }
    std::ranges::sort(places[p].cpus);
  }
  return places;
}

NumaPlace place_bound_process(std::span<const Topology::Node> all) {
  NumaPlace place;
  if (all.size() == 1) return place;
  for (const Topology::Node* node : with_processors(all)) place.memory_nodes.push_back(node->os_index);
  return place;
}

}  // namespace hoist::platform
