// SPDX-License-Identifier: Apache-2.0
// Where a training's memory and its update threads really are, by the kernel's records. On a machine with one node this
// shows that the settings arrive; scripts/emulated-numa.sh runs it on one with two.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <hoist/platform/topology.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_model.hpp"

namespace hoist::test::numa_test {
namespace {

using platform::Topology;

// Bytes of the mappings with this policy, by the node that they are on.
std::map<int, std::uint64_t> bytes_with_policy(const std::string& policy) {
  std::map<int, std::uint64_t> bytes;
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string address, found, word;
    if (!(words >> address >> found) || found != policy) continue;
    std::map<int, std::uint64_t> pages;
    std::uint64_t page_bytes = 4096;
    while (words >> word) {
      int node = 0;
      std::uint64_t count = 0;
      if (std::sscanf(word.c_str(), "N%d=%lu", &node, &count) == 2) pages[node] += count;
      if (std::sscanf(word.c_str(), "kernelpagesize_kB=%lu", &count) == 1) page_bytes = count * 1024;
    }
    for (const auto& [node, count] : pages) bytes[node] += count * page_bytes;
  }
  return bytes;
}

// The processors that this process's threads of this name may use, as the kernel writes the list.
std::vector<std::string> processors_of_threads(const std::string& name) {
  std::vector<std::string> lists;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream comm(task.path() / "comm");
    std::string text;
    std::getline(comm, text);
    if (text != name) continue;
    std::ifstream status(task.path() / "status");
    constexpr std::string_view kField = "Cpus_allowed_list:\t";
    while (std::getline(status, text))
      if (text.starts_with(kField)) lists.push_back(text.substr(kField.size()));
  }
  return lists;
}

TEST(NumaTraining, MemoryAndUpdateThreadsAreWhereTheOptionsSay) {
  if (!std::filesystem::exists("/proc/self/numa_maps")) GTEST_SKIP() << "the kernel knows no NUMA nodes";
  const std::vector<Topology::Node> nodes = Topology::detect().nodes();
  std::optional<Digests> digests;
  for (const Topology::Node& node : nodes) {
    if (node.cpus.empty()) continue;
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.engine.update_mode = UpdateMode::forward;
    setup.runtime.memory_nodes = {node.os_index};
    setup.runtime.update_cpus = {node.cpus.back()};
    ToyProgram toy(setup);
    toy.train(1, 2);
    const auto bytes = bytes_with_policy(fmt::format("prefer:{}", node.os_index));
    ASSERT_EQ(bytes.size(), 1u) << "on the other nodes, too";
    EXPECT_EQ(bytes.begin()->first, node.os_index);
    EXPECT_GE(bytes.begin()->second, toy.runtime().device_budget().held_bytes());
    EXPECT_EQ(processors_of_threads("hoist-update"), std::vector<std::string>{fmt::to_string(node.cpus.back())});
    const Digests found = digests_of(toy);
    EXPECT_EQ(found, digests.value_or(found)) << "where memory is never changes the result";
    digests = found;
  }
}

// The I/O thread and the staging buffers, apart from the rest; on a machine with two nodes on the other one.
TEST(NumaTraining, StagingBuffersAndIoThreadsAreWhereTheOptionsSay) {
  if (!std::filesystem::exists("/proc/self/numa_maps")) GTEST_SKIP() << "the kernel knows no NUMA nodes";
  const std::vector<Topology::Node> nodes = Topology::detect().nodes();
  std::optional<Digests> digests;
  for (const Topology::Node& node : nodes) {
    if (node.cpus.empty()) continue;
    const bool is_alone = nodes.size() == 1;
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    if (!is_alone) setup.runtime.memory_nodes = {(node.os_index == nodes[0].os_index ? nodes[1] : nodes[0]).os_index};
    setup.runtime.staging_nodes = {node.os_index};
    setup.runtime.io_places = {{node.os_index, {node.cpus.back()}}};
    ToyModel toy(setup);
    const Prediction plan = predict(setup.runtime, setup.engine, toy.model(), 1);
    const std::uint64_t staging = plan.staging_buffers * round_up(plan.staging_buffer_bytes, kBlockAlignment);
    ASSERT_GT(staging, 0u);
    toy.initialize();
    toy.train(1, 2);
    const auto bytes = bytes_with_policy(fmt::format("prefer:{}", node.os_index));
    ASSERT_EQ(bytes.size(), 1u) << "on the other nodes, too";
    EXPECT_EQ(bytes.begin()->first, node.os_index);
    EXPECT_GE(bytes.begin()->second + 2 * 4096, staging);
    EXPECT_LE(bytes.begin()->second, staging) << "more than the staging buffers";
    const std::vector<std::string> io = processors_of_threads("hoist-aio");
    EXPECT_EQ(io, std::vector<std::string>(io.size(), fmt::to_string(node.cpus.back())));
    EXPECT_FALSE(io.empty());
    const Digests found = digests_of(toy);
    EXPECT_EQ(found, digests.value_or(found)) << "where memory is never changes the result";
    digests = found;
  }
}

}  // namespace
}  // namespace hoist::test::numa_test
