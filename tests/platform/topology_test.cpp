// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <numeric>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/platform/topology.hpp>
#include <hoist/tests/support/machine_of_files.hpp>

namespace hoist::platform::topology_test {
namespace {

namespace fs = std::filesystem;

TEST(Topology, ThisMachine) {
  const Topology topology = Topology::detect();
  ASSERT_FALSE(topology.nodes().empty());
  EXPECT_GE(topology.core_count(), 1u);
  EXPECT_GE(topology.cpu_count(), topology.core_count());
  std::size_t cpus = 0;
  for (const auto& node : topology.nodes()) cpus += node.cpus.size();
  EXPECT_EQ(cpus, topology.cpu_count());
  const auto node = topology.node_of_path("/tmp/does/not/exist/yet");
  EXPECT_GE(node.value_or(0), 0);
}

TEST(Topology, Synthetic) {
  const Topology topology = Topology::synthetic("numa:2(memory=1073741824) core:4 pu:2");
  ASSERT_EQ(topology.nodes().size(), 2u);
  EXPECT_EQ(topology.core_count(), 8u);
  EXPECT_EQ(topology.cpu_count(), 16u);
  EXPECT_EQ(topology.nodes()[1].os_index, 1);
  EXPECT_EQ(topology.nodes()[1].memory_bytes, 1073741824u);
  std::vector<int> second(8);
  std::iota(second.begin(), second.end(), 8);
  EXPECT_EQ(topology.nodes()[1].cpus, second);
  EXPECT_EQ(topology.nodes()[1].cores, (std::vector<std::vector<int>>{{8, 9}, {10, 11}, {12, 13}, {14, 15}}));
  EXPECT_EQ(topology.node_of_path("/"), std::nullopt);
  EXPECT_EQ(topology.node_of_pci("0000:00:00.0"), std::nullopt);
}

// As made-up nodes (numa=fake) do.
TEST(Topology, ANodeWithAPartOfACoreHasItsProcessorsAsCores) {
  const Topology topology = Topology::synthetic("core:1 numa:2 pu:2");
  ASSERT_EQ(topology.nodes().size(), 2u);
  for (const Topology::Node& node : topology.nodes()) {
    ASSERT_EQ(node.cpus.size(), 2u);
    EXPECT_EQ(node.cores, (std::vector<std::vector<int>>{{node.cpus[0]}, {node.cpus[1]}}));
  }
}

TEST(Topology, RefusesADescriptionItCannotRead) {
  EXPECT_THROW(static_cast<void>(Topology::synthetic("seven dwarfs")), DeviceError);
}

// --- drives and GPUs, in a device tree of our own --------------------------------------------------------------------

class FakeSysfs : public test::MachineOfFiles {
 protected:
  FakeSysfs() { fs::create_directories(root_ / "dev/block"); }

  void link_block(const std::string& number, const fs::path& folder) {
    fs::create_directories(root_ / folder);
    fs::create_directory_symlink(root_ / folder, root_ / "dev/block" / number);
  }
  void drive(const std::string& number, const std::string& address, const std::string& name, int node) {
    const fs::path controller = fs::path("devices/pci0000:00") / address;
    put(controller / "numa_node", std::to_string(node));
    link_block(number, controller / "nvme" / name / (name + "n1"));
  }
  void volume(const std::string& number, const std::string& name, const std::vector<std::string>& parts) {
    const fs::path folder = fs::path("devices/virtual/block") / name;
    link_block(number, folder);
    for (const std::string& part : parts) {
      fs::create_directories(root_ / folder / "slaves");
      fs::create_directory_symlink(fs::canonical(root_ / "dev/block" / part), root_ / folder / "slaves" / ("s" + part));
    }
  }
  std::optional<int> node(unsigned major, unsigned minor) {
    return Topology::detect_with_sysfs(root_).node_of_block_device(major, minor);
  }

  const fs::path root_ = directory_.path();
};

TEST_F(FakeSysfs, DriveAndPartition) {
  drive("259:0", "0000:17:00.0", "nvme0", 1);
  const fs::path partition = "devices/pci0000:00/0000:17:00.0/nvme/nvme0/nvme0n1/nvme0n1p1";
  put(partition / "partition", "1");
  link_block("259:1", partition);
  EXPECT_EQ(node(259, 0), 1);
  EXPECT_EQ(node(259, 1), 1);
  EXPECT_EQ(node(259, 7), std::nullopt);
}

TEST_F(FakeSysfs, UnknownNodeIsNoNode) {
  drive("259:0", "0000:17:00.0", "nvme0", -1);
  link_block("254:0", "devices/virtual/block/zram0");
  EXPECT_EQ(node(259, 0), std::nullopt);
  EXPECT_EQ(node(254, 0), std::nullopt);
}

TEST_F(FakeSysfs, AVolumeHasANodeWhenItsDrivesAgree) {
  drive("259:0", "0000:17:00.0", "nvme0", 1);
  drive("259:1", "0000:18:00.0", "nvme1", 1);
  drive("259:2", "0000:99:00.0", "nvme2", 0);
  volume("9:0", "md0", {"259:0", "259:1"});
  volume("9:1", "md1", {"259:1", "259:2"});
  volume("253:0", "dm-0", {"9:0"});  // a volume upon a volume
  EXPECT_EQ(node(9, 0), 1);
  EXPECT_EQ(node(9, 1), std::nullopt);
  EXPECT_EQ(node(253, 0), 1);
}

TEST_F(FakeSysfs, NvmeMultipathNamesItsControllers) {
  drive("259:0", "0000:17:00.0", "nvme0", 1);
  const fs::path subsystem = "devices/virtual/nvme-subsystem/nvme-subsys0";
  link_block("259:5", subsystem / "nvme0n1");
  const fs::path controller = "devices/pci0000:00/0000:17:00.0/nvme/nvme0";
  put(controller / "numa_node", "1");
  fs::create_directory_symlink(root_ / controller, root_ / subsystem / "nvme0");
  EXPECT_EQ(node(259, 5), 1);
}

// hwloc names the nearest processors for such a node, which are another node's.
TEST_F(FakeSysfs, ANodeOfMemoryOnlyHasNoProcessors) {
  EXPECT_FALSE(Topology::detect_with_sysfs(root_).nodes().front().cpus.empty()) << "nothing is known";
  const std::string list =
      "devices/system/node/node" + std::to_string(Topology::detect().nodes()[0].os_index) + "/cpulist";
  put(list, "0-3");
  EXPECT_FALSE(Topology::detect_with_sysfs(root_).nodes().front().cpus.empty());
  put(list, "");
  EXPECT_TRUE(Topology::detect_with_sysfs(root_).nodes().front().cpus.empty());
  EXPECT_TRUE(Topology::detect_with_sysfs(root_).nodes().front().cores.empty());
}

TEST_F(FakeSysfs, Gpus) {
  put("bus/pci/devices/0000:ab:00.0/numa_node", "3");
  put("bus/pci/devices/0000:ac:00.0/numa_node", "-1");
  const Topology topology = Topology::detect_with_sysfs(root_);
  EXPECT_EQ(topology.node_of_pci("0000:AB:00.0"), 3);
  EXPECT_EQ(topology.node_of_pci("0000:ac:00.0"), std::nullopt);
  EXPECT_EQ(topology.node_of_pci("0000:ad:00.0"), std::nullopt);
}

TEST(Topology, ANodesProcessors) {
  const Topology topology = Topology::synthetic("numa:2 core:2 pu:1");
  EXPECT_EQ(topology.cpus_of(1), (std::vector<int>{2, 3}));
  EXPECT_EQ(topology.cpus_of(4711), std::vector<int>{});
}

}  // namespace
}  // namespace hoist::platform::topology_test
