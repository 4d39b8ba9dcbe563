// SPDX-License-Identifier: Apache-2.0
// The rule of numa_placement.hpp on machines that nobody here has.
#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include <hoist/platform/numa_placement.hpp>

namespace hoist::platform::numa_placement_test {
namespace {

using Gpus = std::vector<std::optional<int>>;
using Ints = std::vector<int>;

std::vector<Topology::Node> machine(const std::string& description) { return Topology::synthetic(description).nodes(); }

// Nodes of `cores` cores of one processor each; nodes without cores have memory only.
std::vector<Topology::Node> nodes_with(const std::vector<int>& cores) {
  std::vector<Topology::Node> nodes;
  int cpu = 0;
  for (const int count : cores) {
    Topology::Node& node = nodes.emplace_back();
    node.os_index = static_cast<int>(nodes.size()) - 1;
    for (int i = 0; i < count; ++i, ++cpu) {
      node.cpus.push_back(cpu);
      node.cores.push_back({cpu});
    }
  }
  return nodes;
}

TEST(NumaPlacement, OneProcessOnOneNodeIsLeftAlone) {
  EXPECT_EQ(place_processes(machine("numa:1 core:4 pu:2"), {}, 1), std::vector<NumaPlace>{{}});
}

TEST(NumaPlacement, OneProcessOnTwoNodesHasBothMemoriesItsGpusFirst) {
  EXPECT_EQ(place_processes(machine("numa:2 core:4 pu:2"), {}, 1)[0], (NumaPlace{.memory_nodes = {0, 1}, .cpus = {}}));
  EXPECT_EQ(place_processes(machine("numa:2 core:4 pu:2"), Gpus{1}, 1)[0],
            (NumaPlace{.memory_nodes = {1, 0}, .cpus = {}}));
}

TEST(NumaPlacement, ProcessesOfOneNodeDivideItsCoresWhole) {
  const auto places = place_processes(machine("numa:1 core:4 pu:2"), {}, 2);
  EXPECT_EQ(places[0], (NumaPlace{.memory_nodes = {}, .cpus = {0, 1, 2, 3}}));
  EXPECT_EQ(places[1], (NumaPlace{.memory_nodes = {}, .cpus = {4, 5, 6, 7}}));
}

// The usual server: two sockets, four GPUs on each, eight processes.
TEST(NumaPlacement, EightProcessesLiveBesideTheirGpus) {
  const auto nodes = machine("numa:2 core:32 pu:2");
  const auto places = place_processes(nodes, Gpus{0, 0, 0, 0, 1, 1, 1, 1}, 8);
  std::set<int> all;
  for (int p = 0; p < 8; ++p) {
    const NumaPlace& place = places[static_cast<std::size_t>(p)];
    EXPECT_EQ(place.memory_nodes, Ints{p / 4});
    EXPECT_EQ(place.cpus.size(), 16u);
    for (const int cpu : place.cpus) {
      EXPECT_EQ(cpu / 64, p / 4) << "process " << p;
      EXPECT_TRUE(all.insert(cpu).second) << "processor " << cpu << " has two processes";
    }
  }
  EXPECT_EQ(all.size(), 128u);
}

TEST(NumaPlacement, TwoGpusOnOneNodeLeaveTheOtherNodeToTheFirst) {
  const auto places = place_processes(machine("numa:2 core:2 pu:1"), Gpus{1, 1}, 2);
  EXPECT_EQ(places[0], (NumaPlace{.memory_nodes = {1, 0}, .cpus = {0, 1, 2}}));
  EXPECT_EQ(places[1], (NumaPlace{.memory_nodes = {1}, .cpus = {3}}));
}

TEST(NumaPlacement, FourNodesForTwoProcessesAreTwoEach) {
  const auto places = place_processes(machine("numa:4 core:2 pu:1"), {}, 2);
  EXPECT_EQ(places[0], (NumaPlace{.memory_nodes = {0, 1}, .cpus = {0, 1, 2, 3}}));
  EXPECT_EQ(places[1], (NumaPlace{.memory_nodes = {2, 3}, .cpus = {4, 5, 6, 7}}));
}

TEST(NumaPlacement, UnknownNodesOfGpusAreAsIfThereWereNone) {
  EXPECT_EQ(place_processes(machine("numa:2 core:2 pu:1"), Gpus{std::nullopt, 7}, 2),
            place_processes(machine("numa:2 core:2 pu:1"), {}, 2));
}

TEST(NumaPlacement, MoreProcessesThanCoresShareThem) {
  const auto places = place_processes(machine("numa:1 core:2 pu:1"), {}, 5);
  for (const NumaPlace& place : places) EXPECT_EQ(place.cpus.size(), 1u);
}

std::vector<IoPlace> io_of(const std::vector<Topology::Node>& nodes, const Gpus& gpus, int processes, int process) {
  return place_io_threads(nodes, place_processes(nodes, gpus, processes), static_cast<std::size_t>(process));
}

TEST(NumaPlacement, TheIoThreadOfOneProcessHasTheDrivesNode) {
  const auto nodes = machine("numa:2 core:2 pu:2");
  EXPECT_EQ(io_of(nodes, {}, 1, 0), (std::vector<IoPlace>{{0, {0, 1, 2, 3}}, {1, {4, 5, 6, 7}}}));
  EXPECT_EQ(io_of(machine("numa:1 core:2 pu:1"), {}, 1, 0), (std::vector<IoPlace>{{0, {0, 1}}}));
}

// Two sockets, two GPUs on each, four processes; a drive on either socket.
TEST(NumaPlacement, IoThreadsAreOnOwnCoresOrDivideTheNode) {
  const auto nodes = machine("numa:2 core:4 pu:1");
  const Gpus gpus{0, 0, 1, 1};
  EXPECT_EQ(io_of(nodes, gpus, 4, 0), (std::vector<IoPlace>{{0, {0, 1}}, {1, {4, 5}}}));
  EXPECT_EQ(io_of(nodes, gpus, 4, 1), (std::vector<IoPlace>{{0, {2, 3}}, {1, {6, 7}}}));
  EXPECT_EQ(io_of(nodes, gpus, 4, 2), (std::vector<IoPlace>{{0, {0, 1}}, {1, {4, 5}}}));
  EXPECT_EQ(io_of(nodes, gpus, 4, 3), (std::vector<IoPlace>{{0, {2, 3}}, {1, {6, 7}}}));
}

TEST(NumaPlacement, IoThreadsOfMoreProcessesThanCoresShareThem) {
  const auto nodes = machine("numa:2 core:1 pu:1");
  for (int process = 0; process < 6; ++process)
    EXPECT_EQ(io_of(nodes, Gpus{0}, 6, process), (std::vector<IoPlace>{{0, {0}}, {1, {1}}})) << process;
}

TEST(NumaPlacement, NoIoThreadIsWhereThereAreNoProcessors) {
  const auto nodes = nodes_with({2, 0});
  EXPECT_EQ(io_of(nodes, {}, 2, 1), (std::vector<IoPlace>{{0, {1}}}));
}

// Holds on every machine: each process's I/O threads have a place on every node, on that node's processors, and as few
// of them as possible share a processor.
TEST(NumaPlacement, EveryIoThreadHasCoresOnEveryNode) {
  for (const int node_count : {1, 2, 4}) {
    for (const int cores : {1, 3, 8}) {
      const auto nodes = nodes_with(Ints(static_cast<std::size_t>(node_count), cores));
      for (int processes = 1; processes <= 9; ++processes) {
        for (const Gpus& gpus : {Gpus{}, Gpus{0}, Gpus{node_count - 1, 0}}) {
          std::vector<int> users(static_cast<std::size_t>(node_count * cores));
          for (int process = 0; process < processes; ++process) {
            const auto places = io_of(nodes, gpus, processes, process);
            ASSERT_EQ(places.size(), static_cast<std::size_t>(node_count));
            for (const IoPlace& place : places) {
              EXPECT_FALSE(place.cpus.empty());
              EXPECT_TRUE(std::ranges::is_sorted(place.cpus));
              for (const int cpu : place.cpus) {
                EXPECT_EQ(cpu / cores, place.node);
                ++users[static_cast<std::size_t>(cpu)];
              }
            }
          }
          // At most one of the node's own processes and one of the others, where there are cores for all.
          if (processes > cores) continue;
          for (const int count : users) EXPECT_LE(count, 2) << node_count << " x " << cores << ", " << processes;
        }
      }
    }
  }
}

TEST(NumaPlacement, StagingBuffersAreOnTheDrivesNode) {
  using Drives = std::vector<std::optional<int>>;
  EXPECT_EQ(staging_node(Ints{0}, Drives{1}), 1);
  EXPECT_EQ(staging_node(Ints{0}, Drives{1, 1}), 1);
  EXPECT_EQ(staging_node(Ints{0, 1}, Drives{1}), 1) << "not on both in turn";
  EXPECT_EQ(staging_node(Ints{1}, Drives{1}), std::nullopt) << "it is there already";
  EXPECT_EQ(staging_node(Ints{0}, Drives{0, 1}), std::nullopt) << "each buffer is read into by both";
  EXPECT_EQ(staging_node(Ints{0}, Drives{std::nullopt}), std::nullopt);
  EXPECT_EQ(staging_node(Ints{0}, Drives{1, std::nullopt}), std::nullopt);
  EXPECT_EQ(staging_node(Ints{}, Drives{1}), std::nullopt) << "the machine has one node, or nothing is to be placed";
}

// GPU memory that the CPU sees (GH200), or an expander: memory that nobody computes beside.
TEST(NumaPlacement, MemoryWithoutProcessorsIsNotPinnedMemory) {
  const auto nodes = nodes_with({4, 0, 0});
  EXPECT_EQ(place_processes(nodes, Gpus{1}, 1)[0], (NumaPlace{.memory_nodes = {0}, .cpus = {}}));
  EXPECT_EQ(place_bound_process(nodes).memory_nodes, Ints{0});
}

TEST(NumaPlacement, ABoundProcessKeepsItsProcessorsAndTheirMemory) {
  EXPECT_EQ(place_bound_process(nodes_with({0, 3})), (NumaPlace{.memory_nodes = {1}, .cpus = {}}));
  EXPECT_EQ(place_bound_process(nodes_with({2, 2})), (NumaPlace{.memory_nodes = {0, 1}, .cpus = {}}));
  EXPECT_EQ(place_bound_process(nodes_with({2})), NumaPlace{});
}

// Whatever the machine: every process has memory where there is a choice, every core serves somebody, and no two
// processes share one as long as there are enough.
TEST(NumaPlacement, NoCoreIsIdleAndNoneIsShared) {
  for (const int node_count : {1, 2, 3, 4}) {
    for (const int cores : {1, 2, 5, 8}) {
      const auto nodes = nodes_with(Ints(static_cast<std::size_t>(node_count), cores));
      for (int processes = 2; processes <= 9; ++processes) {
        for (const Gpus& gpus : {Gpus{}, Gpus{0}, Gpus{node_count - 1, 0}, Gpus{std::nullopt, 1}}) {
          const auto places = place_processes(nodes, gpus, processes);
          std::vector<int> users(static_cast<std::size_t>(node_count * cores));
          std::vector<int> homes(static_cast<std::size_t>(node_count));
          for (const NumaPlace& place : places) {
            EXPECT_EQ(place.memory_nodes.empty(), node_count == 1);
            EXPECT_TRUE(std::ranges::is_sorted(place.cpus));
            EXPECT_FALSE(place.cpus.empty());
            for (const int cpu : place.cpus) ++users[static_cast<std::size_t>(cpu)];
            if (node_count > 1) ++homes[static_cast<std::size_t>(place.memory_nodes.front())];
          }
          const int crowd = node_count == 1 ? processes : std::ranges::max(homes);
          if (crowd > cores) continue;
          for (const int count : users)
            EXPECT_EQ(count, 1) << node_count << " nodes, " << cores << " cores, " << processes << " processes";
        }
      }
    }
  }
}

}  // namespace
}  // namespace hoist::platform::numa_placement_test
