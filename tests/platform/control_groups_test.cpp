// SPDX-License-Identifier: Apache-2.0
// What control groups allow a process, by files that a test writes in the place of /proc and of the groups.
#include <gtest/gtest.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/control_groups.hpp>
#include <hoist/platform/free_memory.hpp>
#include <hoist/tests/support/machine_of_files.hpp>

namespace hoist::platform::control_groups_test {
namespace {

class ControlGroups : public test::MachineOfFiles {
 protected:
  ControlGroupLimits limits() const { return control_group_limits(directory_ / "proc"); }
};

TEST_F(ControlGroups, NamesOfMountsMayHaveBlanks) {
  put("proc/self/mountinfo", "36 35 98:0 /a\\040b /mnt/my\\040drive\\134x rw - ext4 /dev/the\\011disk rw");
  const std::vector<Mount> found = mounts(directory_ / "proc");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].root, "/a b");
  EXPECT_EQ(found[0].point, "/mnt/my drive\\x");
  EXPECT_EQ(found[0].source, "/dev/the\tdisk");
}

TEST_F(ControlGroups, TheSmallestLimitOnTheWayToTheRootBinds) {
  put("proc/self/cgroup", "0::/jobs/training/rank0");
  put("proc/self/mountinfo", "30 24 0:26 / " + mount_point("cg") + " rw,nosuid shared:4 - cgroup2 cgroup2 rw");
  put("cg/jobs/training/rank0/memory.max", "max");
  put("cg/jobs/training/memory.max", "8589934592");
  put("cg/jobs/training/cpu.max", "350000 100000");
  put("cg/jobs/training/cpuset.cpus.effective", "0-3,8");
  put("cg/jobs/memory.max", "17179869184");
  put("cg/jobs/memory.high", "6442450944");
  put("cg/jobs/cpu.max", "max 100000");
  put("cg/jobs/cpuset.cpus.effective", "0-15");
  const auto found = limits();
  ASSERT_TRUE(found.memory);
  EXPECT_EQ(found.memory->bytes, 6442450944u);
  EXPECT_EQ(found.memory->file, mount_point("cg/jobs/memory.high"));
  ASSERT_TRUE(found.cpu);
  EXPECT_DOUBLE_EQ(found.cpu->count, 3.5);
  EXPECT_EQ(found.processors, 5u);
}

TEST_F(ControlGroups, AGroupWhoseNameOnlyBeginsWithTheMountsRootIsOutsideOfIt) {
  put("proc/self/cgroup", "0::/ab/c");
  put("proc/self/mountinfo", "30 24 0:26 /a " + mount_point("cg") + " rw - cgroup2 cgroup2 rw");
  put("cg/memory.max", "9000");
  put("cg/b/c/memory.max", "5");
  const auto found = limits();
  ASSERT_TRUE(found.memory);
  EXPECT_EQ(found.memory->bytes, 9000u) << "b/c below the mount is the group /a/b/c, not /ab/c";
}

TEST_F(ControlGroups, WhatIsFreeIsTheLeastThatAnyOfThemHasLeft) {
  put("proc/self/cgroup", "0::/job/rank");
  put("proc/self/mountinfo", "30 24 0:26 / " + mount_point("cg") + " rw - cgroup2 cgroup2 rw");
  const auto group = [&](const std::string& path, const char* most, const char* high, const char* used) {
    put(path + "/memory.max", most);
    put(path + "/memory.high", high);
    put(path + "/memory.current", used);
    put(path + "/memory.stat", "anon 1\ninactive_file 100");
  };
  group("cg/job/rank", "max", "max", "500");
  group("cg/job", "max", "max", "600");
  EXPECT_FALSE(limits().free_memory_bytes);
  group("cg/job", "9000", "max", "600");
  EXPECT_EQ(limits().free_memory_bytes, 8500u) << "cache that is dropped first is not used";
  group("cg/job/rank", "max", "5000", "500");
  EXPECT_EQ(limits().free_memory_bytes, 4600u);
  group("cg/job", "9000", "700", "600");
  EXPECT_EQ(limits().free_memory_bytes, 200u);
  group("cg/job", "500", "max", "700");
  EXPECT_EQ(limits().free_memory_bytes, 0u);
}

TEST_F(ControlGroups, AContainerSeesItsOwnGroupAsTheRoot) {
  put("proc/self/cgroup", "0::/docker/4711/init");
  put("proc/self/mountinfo", "30 24 0:26 /docker/4711 " + mount_point("cg") + " ro - cgroup2 cgroup rw");
  put("cg/memory.max", "1073741824");
  put("cg/init/memory.max", "max");
  ASSERT_TRUE(limits().memory);
  EXPECT_EQ(limits().memory->bytes, 1073741824u);
  // A group outside of what is mounted: what the mount's root says is all there is.
  for (const char* outside : {"0::/../other", "0::/.."}) {
    put("proc/self/cgroup", outside);
    ASSERT_TRUE(limits().memory) << outside;
    EXPECT_EQ(limits().memory->bytes, 1073741824u) << outside;
  }
}

TEST_F(ControlGroups, VersionOneIsUnderstood) {
  put("proc/self/cgroup", "5:cpuset:/s/deep\n4:memory:/m\n3:cpu,cpuacct:/c\n0::/");
  const auto mount = [&](const std::string& name, const std::string& controllers) {
    return "35 31 0:32 / " + mount_point(name) + " rw - cgroup cgroup rw," + controllers + "\n";
  };
  put("proc/self/mountinfo", mount("memory", "memory") + mount("cpu", "cpu,cpuacct") + mount("cpuset", "cpuset"));
  put("memory/memory.limit_in_bytes", "9223372036854771712");
  put("memory/m/memory.limit_in_bytes", "2147483648");
  put("memory/m/memory.usage_in_bytes", "1073741824");
  put("cpu/cpu.cfs_quota_us", "-1");
  put("cpu/cpu.cfs_period_us", "100000");
  put("cpu/c/cpu.cfs_quota_us", "150000");
  put("cpu/c/cpu.cfs_period_us", "100000");
  put("cpuset/s/cpuset.effective_cpus", "2-3");
  std::filesystem::create_directories(directory_ / "cpuset/s/deep");
  const auto found = limits();
  ASSERT_TRUE(found.memory);
  EXPECT_EQ(found.memory->bytes, 2147483648u);
  EXPECT_EQ(found.free_memory_bytes, 1073741824u);
  ASSERT_TRUE(found.cpu);
  EXPECT_DOUBLE_EQ(found.cpu->count, 1.5);
  EXPECT_EQ(found.processors, 2u);
}

TEST_F(ControlGroups, ProcessesThatDivideAMemoryNameItAlike) {
  put("proc/sys/kernel/random/boot_id", "b007");
  put("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 16777216 kB");
  const auto id_in = [&](const std::string& group, const char* limit) {
    put("proc/self/cgroup", "0::/");
    put("proc/self/mountinfo", "30 24 0:26 /" + group + " " + mount_point(group) + " ro - cgroup2 cgroup rw");
    put(group + "/memory.max", limit);
    return memory_id(limits(), directory_ / "proc");
  };
  EXPECT_EQ(id_in("container0", "max"), "b007");
  EXPECT_EQ(id_in("container1", "max"), "b007") << "both may take all of the machine";
  EXPECT_EQ(id_in("container1", "17179869185"), "b007") << "no limit on a machine of 16 GiB";
  const std::string limited = id_in("container0", "8589934592");
  EXPECT_EQ(limited.substr(0, 5), "b007:");
  EXPECT_EQ(id_in("container0", "8589934592"), limited);
  EXPECT_NE(id_in("container1", "8589934592"), limited) << "each has 8 GiB of its own";
  put("proc/sys/kernel/random/boot_id", "b008");
  EXPECT_NE(id_in("container0", "8589934592"), limited);
}

TEST_F(ControlGroups, WithoutReadableFilesThereIsNoLimit) {
  const auto found = limits();
  EXPECT_FALSE(found.memory || found.free_memory_bytes || found.cpu || found.processors);
}

// As on GH200: the machine counts 96 GiB that are its GPU's. A limit is for the memory of the processors.
TEST_F(ControlGroups, ALimitBindsAfterTheMemoryOfGpusIsTakenAway) {
  put("proc/meminfo", "MemTotal: 603979776 kB\nMemAvailable: 524288000 kB");
  put("sys/devices/system/node/node0/cpulist", "0-71");
  put("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 503316480 kB\nNode 0 MemFree: 419430400 kB");
  put("sys/devices/system/node/node1/cpulist", "");
  put("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 100663296 kB\nNode 1 MemFree: 94371840 kB");
  const auto memory = [&](std::optional<std::uint64_t> gib) {
    ControlGroupLimits limits;
    if (gib)
      limits = {.memory = ControlGroupLimits::Memory{*gib * kGiB, "memory.max"}, .free_memory_bytes = *gib * kGiB};
    return host_memory_beside_gpus(limits, mount_point("proc"), mount_point("sys"));
  };
  EXPECT_EQ(memory({}).total_bytes, 480 * kGiB);
  EXPECT_EQ(memory({}).free_bytes, 410 * kGiB);
  EXPECT_EQ(memory(256).total_bytes, 256 * kGiB);
  EXPECT_EQ(memory(256).free_bytes, 256 * kGiB);
  EXPECT_EQ(memory(64).total_bytes, 64 * kGiB);
}

}  // namespace
}  // namespace hoist::platform::control_groups_test
