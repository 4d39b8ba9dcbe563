// SPDX-License-Identifier: Apache-2.0
// hoist doctor: right about this machine, about machines made of files, and where io_uring is forbidden.
#include <map>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <hoist/cli/doctor/finding.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/drive.hpp>
#include <hoist/tests/support/machine_of_files.hpp>
#include <hoist/tests/support/refused_system_call.hpp>
#include <hoist/tests/support/temp_directory.hpp>

#include "program.hpp"

namespace hoist::doctor_test {
namespace {

namespace fs = std::filesystem;
using cli::MachineSources;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// --- the command -----------------------------------------------------------------------------------------------------

class Doctor : public test::ProgramTest {
 protected:
  nlohmann::json finding(const nlohmann::json& report, const std::string& subject) const {
    for (const auto& finding : report["findings"]) {
      if (finding["subject"] == subject) return finding;
    }
    ADD_FAILURE() << "nothing is said about " << subject;
    return {};
  }
};

TEST_F(Doctor, LooksAtEverything) {
  const auto result = run("doctor --path . --json report.json");
  const auto report = json_of("report.json");
  EXPECT_EQ(result.exit_code, report["missing"] == 0 ? 0 : 1) << result.errors;
  for (const char* subject : {"NVIDIA driver", "CUDA devices", "CUDA toolkit", "NCCL", "MPI", "CPUs", "NUMA nodes",
                              "cgroup CPU limit", "instruction sets", "memory", "cgroup memory limit", "huge pages",
                              "io_uring", "memlock limit", "file system", "O_DIRECT", "free space", "drive"}) {
    const auto found = finding(report, subject);
    EXPECT_THAT(found["found"].get<std::string>(), Not(IsEmpty())) << subject;
    EXPECT_THAT(result.output, HasSubstr(subject));
    // A finding that is not ok also names the cost and the remedy.
    if (found["verdict"] == "ok") continue;
    EXPECT_THAT(found["cost"].get<std::string>(), Not(IsEmpty())) << subject;
    EXPECT_THAT(found["remedy"].get<std::string>(), Not(IsEmpty())) << subject;
  }
  EXPECT_THAT(finding(report, "O_DIRECT")["found"].get<std::string>(), HasSubstr("written, flushed and read back"));
  EXPECT_GT(finding(report, "free space")["data"]["free_bytes"], 0);
  for (const auto& entry : fs::directory_iterator(path("."))) {
    EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("doctor"))) << "a trial file was left";
  }
}

TEST_F(Doctor, APathThatIsNoDirectoryIsBadInput) {
  write("file", "");
  EXPECT_EQ(run("doctor --path missing").exit_code, 2);
  EXPECT_EQ(run("doctor --path file").exit_code, 2);
  EXPECT_THAT(run("doctor --path . --path missing").errors, HasSubstr("missing is not a directory"));
}

TEST_F(Doctor, APathThatCannotBeWrittenIsMissing) {
  if (::access("/proc/self/task", F_OK) != 0) GTEST_SKIP() << "no /proc here";
  const auto result = run("doctor --path /proc/self/task --json report.json");
  EXPECT_EQ(result.exit_code, 1);
  const auto report = json_of("report.json");
  EXPECT_EQ(finding(report, "O_DIRECT")["verdict"], "missing");
  EXPECT_GE(report["missing"], 1);
  EXPECT_THAT(result.output, HasSubstr("! O_DIRECT"));
}

TEST_F(Doctor, MemoryIsNoDrive) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no /dev/shm here that can be written";
  const test::TempDirectory directory("/dev/shm");
  run("doctor --path " + directory.path().string() + " --json report.json");
  const auto found = finding(json_of("report.json"), "file system");
  if (found["data"]["type"] != "tmpfs") GTEST_SKIP() << "/dev/shm is no tmpfs here";
  EXPECT_EQ(found["verdict"], "lacking");
}

TEST_F(Doctor, DoesNotWriteOverAStore) {
  write("rank-00000.manifest", "committed");
  const auto result = run("doctor --json rank-00000.manifest");
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.errors, HasSubstr("is a file of a store"));
  EXPECT_EQ(test::contents_of(path("rank-00000.manifest")), "committed");
}

TEST_F(Doctor, WorksWhereIoUringIsForbidden) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (!test::refuse_system_call(__NR_io_uring_setup, EPERM)) ::_exit(test::kNoFilter);
    ::_exit(run("doctor --path . --json report.json").exit_code);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == test::kNoFilter) GTEST_SKIP() << "this system allows no seccomp filter";
  const auto report = json_of("report.json");
  EXPECT_EQ(WEXITSTATUS(status), report["missing"] == 0 ? 0 : 1);
  const auto found = finding(report, "io_uring");
  EXPECT_EQ(found["verdict"], "lacking");
  EXPECT_EQ(found["data"]["available"], false);
  EXPECT_THAT(found["found"].get<std::string>(), HasSubstr("seccomp"));
  EXPECT_THAT(found["remedy"].get<std::string>(), HasSubstr("--security-opt seccomp="));
  EXPECT_EQ(finding(report, "O_DIRECT")["verdict"], "ok");
  EXPECT_THAT(finding(report, "O_DIRECT")["data"]["engine"].get<std::string>(), HasSubstr("threads"));
}

// --- machines made of files ------------------------------------------------------------------------------------------

class DoctorMachine : public test::MachineOfFiles {
 protected:
  MachineSources machine() const { return {directory_ / "proc", directory_ / "sys"}; }
};

TEST_F(DoctorMachine, NothingReadableIsUnknownAndNoFailure) {
  EXPECT_FALSE(platform::drive_of({8, 0}, machine().sys));
  EXPECT_EQ(platform::file_system_of("/data", machine().proc).type, "");
  for (const cli::Section& section :
       {cli::look_at_io_uring(machine()), cli::look_at_memory(machine()), cli::look_at_devices(machine()),
        cli::look_at_path(machine(), directory_.path().string())}) {
    EXPECT_FALSE(section.findings.empty()) << section.title;
  }
}

class DoctorGpuMemory : public DoctorMachine {
 protected:
  cli::Finding memory_of(const platform::GpuMemoryFacts& facts) const {
    MachineSources one = machine();
    one.gpu_memories = [&] { return std::vector{facts}; };
    const cli::Section section = cli::look_at_devices(one);
    const auto found = std::ranges::find(section.findings, "memory of GPU 0", &cli::Finding::subject);
    EXPECT_NE(found, section.findings.end());
    return found == section.findings.end() ? cli::Finding{} : *found;
  }
};

TEST_F(DoctorGpuMemory, BehindPcieIsItsOwn) {
  const cli::Finding found = memory_of({});
  EXPECT_EQ(found.data["kind"], "separate");
  EXPECT_THAT(found.found, HasSubstr("behind PCIe"));
}

// As on GH200: the kernel counts the GPU's 96 GB, a node without processors, as the machine's.
TEST_F(DoctorGpuMemory, ThatProcessorsReachIsNotTheirs) {
  put("proc/meminfo", "MemTotal:       603979776 kB");
  put("sys/devices/system/node/node0/cpulist", "0-71");
  put("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       503316480 kB");
  put("sys/devices/system/node/node1/cpulist", "");
  put("sys/devices/system/node/node1/meminfo",
      "Node 1 MemTotal:       100663296 kB\nNode 1 MemFree:        99614720 kB");
  const cli::Finding found = memory_of({.uses_host_page_tables = true});
  EXPECT_EQ(found.data["kind"], "coherent");
  EXPECT_EQ(found.data["machine_bytes"], 576 * kGiB);
  EXPECT_EQ(found.data["processor_bytes"], 480 * kGiB);
  EXPECT_THAT(found.found, HasSubstr("of 576 GiB that the kernel counts, 480 GiB are the processors'"));
}

TEST_F(DoctorGpuMemory, ThatIsTheProcessorsHasOneBudgetWithPinnedMemory) {
  const cli::Finding found = memory_of({.is_integrated = true, .uses_host_page_tables = true});
  EXPECT_EQ(found.data["kind"], "integrated");
  EXPECT_THAT(found.found, HasSubstr("one budget limits hoist.device_memory and hoist.pinned_memory together"));
}

TEST_F(DoctorMachine, HugePagesAreMissedOnlyWhereThereAreNone) {
  const auto verdict = [&](const std::string& free_pages, const std::string& transparent) {
    put("proc/meminfo", "MemTotal: 16384 kB\nHugePages_Free: " + free_pages + "\nHugepagesize: 2048 kB");
    put("sys/kernel/mm/transparent_hugepage/enabled", transparent);
    for (const cli::Finding& finding : cli::look_at_memory(machine()).findings) {
      if (finding.subject == "huge pages") return finding.verdict;
    }
    return cli::Verdict::missing;
  };
  EXPECT_EQ(verdict("0", "always madvise [never]"), cli::Verdict::lacking);
  EXPECT_EQ(verdict("0", "always [madvise] never"), cli::Verdict::ok);
  EXPECT_EQ(verdict("16", "always madvise [never]"), cli::Verdict::ok);
}

TEST_F(DoctorMachine, APartitionHasTheQueueOfItsDrive) {
  put("sys/devices/nvme0n1/queue/logical_block_size", "512");
  put("sys/devices/nvme0n1/queue/physical_block_size", "4096");
  put("sys/devices/nvme0n1/queue/discard_max_bytes", "2199023255040");
  put("sys/devices/nvme0n1/queue/scheduler", "[none] mq-deadline");
  put("sys/devices/nvme0n1/device/model", "Fast Drive 9");
  put("sys/devices/nvme0n1/nvme0n1p2/partition", "2");
  fs::create_directories(directory_ / "sys/dev/block");
  fs::create_directory_symlink("../../devices/nvme0n1/nvme0n1p2", directory_ / "sys/dev/block/259:2");
  const auto drive = platform::drive_of({259, 2}, machine().sys);
  ASSERT_TRUE(drive);
  EXPECT_EQ(drive->name, "nvme0n1");
  EXPECT_EQ(drive->model, "Fast Drive 9");
  EXPECT_EQ(drive->logical_block_bytes, 512u);
  EXPECT_EQ(drive->physical_block_bytes, 4096u);
  EXPECT_EQ(drive->discard_bytes_max, 2199023255040u);
  EXPECT_EQ(drive->scheduler, "none");
  EXPECT_FALSE(drive->segments_max);
}

TEST_F(DoctorMachine, TheNearestMountCountsAndNamesItsDrive) {
  put("proc/self/mountinfo",
      "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
      "23 22 259:2 / /data rw,relatime shared:1 - xfs /dev/nvme0n1p2 rw,discard\n"
      "24 22 8:1 /srv /data/store rw - ext4 /dev/sda1 rw\n"
      "25 22 0:39 /@a /a rw - btrfs /dev/there-is-none rw\n"
      "26 22 0:39 /@b /b rw - btrfs /dev/there-is-none rw");
  EXPECT_EQ(platform::file_system_of("/data/hoist", machine().proc).type, "xfs");
  EXPECT_TRUE(platform::file_system_of("/data/hoist", machine().proc).discards);
  EXPECT_EQ(platform::file_system_of("/data/store/x", machine().proc).point, "/data/store");
  EXPECT_EQ(platform::file_system_of("/data/store/x", machine().proc).drive.major, 8u);
  EXPECT_EQ(platform::file_system_of("/a/store", machine().proc).type, "btrfs");
  EXPECT_EQ(platform::file_system_of("/a/store", machine().proc).drive.major, 0u);
  EXPECT_EQ(mount_of("/a/store", machine().proc)->device, mount_of("/b", machine().proc)->device);
  EXPECT_EQ(platform::file_system_of("/database", machine().proc).point, "/");
  EXPECT_FALSE(platform::file_system_of("/database", machine().proc).discards);
}

TEST_F(DoctorMachine, AMountThatALaterOneHidesDoesNotCount) {
  const std::string outer = directory_.path().string(), inner = outer + "/proc";
  struct stat status {};
  ASSERT_EQ(::stat(outer.c_str(), &status), 0);
  const auto device = fmt::format("{}:{}", major(status.st_dev), minor(status.st_dev));
  put("proc/self/mountinfo", fmt::format("22 1 0:0 / / rw - ext4 /dev/sda1 rw\n"
                                         "23 22 0:1 / {} rw - xfs /dev/hidden rw\n"
                                         "24 22 {} / {} rw - ext4 /dev/shown rw",
                                         inner, device, outer));
  for (const char* path : {"/self", "/to/be/made"})
    EXPECT_EQ(mount_of(inner + path, machine().proc)->source, "/dev/shown") << path;
}

TEST_F(DoctorMachine, ACardWithoutItsDriverIsMissing) {
  put("sys/bus/pci/devices/0000:17:00.0/class", "0x030200");
  put("sys/bus/pci/devices/0000:17:00.0/vendor", "0x10de");
  put("sys/bus/pci/devices/0000:17:00.0/numa_node", "1");
  put("sys/bus/pci/devices/0000:17:00.0/current_link_width", "8");
  put("sys/bus/pci/devices/0000:17:00.0/max_link_width", "16");
  put("sys/bus/pci/devices/0000:18:00.0/class", "0x030200");
  put("sys/bus/pci/devices/0000:18:00.0/vendor", "0x10de");
  put("sys/bus/pci/devices/0000:00:03.0/class", "0x010802");
  put("sys/bus/pci/devices/0000:00:03.0/vendor", "0x10de");
  std::map<std::string, cli::Finding> findings;
  for (cli::Finding& finding : cli::look_at_devices(machine()).findings) findings.emplace(finding.subject, finding);
  EXPECT_EQ(findings.at("NVIDIA driver").verdict, cli::Verdict::missing);
  EXPECT_EQ(findings.at("GPU 0000:17:00.0").verdict, cli::Verdict::lacking);
  EXPECT_THAT(findings.at("GPU 0000:17:00.0").found, HasSubstr("node 1, 8 of 16"));
  EXPECT_THAT(findings.at("GPU 0000:18:00.0").found, HasSubstr("node unknown, unknown of unknown PCIe lanes"));
  EXPECT_FALSE(findings.contains("GPU 0000:00:03.0"));
}

}  // namespace
}  // namespace hoist::doctor_test
