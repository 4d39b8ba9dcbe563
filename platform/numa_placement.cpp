// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>

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
    if (node != nodes.end()) homes[p] = static_cast<std::size_t>(node - nodes.begin());
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

std::vector<IoPlace> place_io_threads(std::span<const Topology::Node> all, std::span<const NumaPlace> places,
                                      std::size_t process) {
  HOIST_ASSERT(process < places.size(), "process {} of {}", process, places.size());
  std::vector<IoPlace> result;
  for (const Topology::Node* node : with_processors(all)) {
    const auto own = [&](const NumaPlace& place) {
      std::vector<int> cpus;
      std::ranges::copy_if(place.cpus, std::back_inserter(cpus),
                           [&](int cpu) { return std::ranges::find(node->cpus, cpu) != node->cpus.end(); });
      return cpus;
    };
    std::vector<int> cpus = own(places[process]);
    if (cpus.empty()) {
      const auto has_no_core_here = [&](const NumaPlace& place) { return own(place).empty(); };
      const auto before = std::ranges::count_if(places.first(process), has_no_core_here);
      add_cores(*node, static_cast<std::size_t>(before),
                static_cast<std::size_t>(std::ranges::count_if(places, has_no_core_here)), cpus);
      std::ranges::sort(cpus);
    }
    result.push_back({node->os_index, std::move(cpus)});
  }
  return result;
}

std::optional<int> staging_node(std::span<const int> memory_nodes, std::span<const std::optional<int>> drive_nodes) {
  if (memory_nodes.empty() || drive_nodes.empty()) return std::nullopt;
  const std::optional<int> first = drive_nodes.front();
  if (std::ranges::any_of(drive_nodes, [&](const auto& node) { return node != first; })) return std::nullopt;
  const bool is_there = memory_nodes.size() == 1 && memory_nodes.front() == first;
  return is_there ? std::nullopt : first;
}

NumaPlace place_bound_process(std::span<const Topology::Node> all) {
  NumaPlace place;
  if (all.size() == 1) return place;
  for (const Topology::Node* node : with_processors(all)) place.memory_nodes.push_back(node->os_index);
  return place;
}

}  // namespace hoist::platform
