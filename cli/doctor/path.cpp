// SPDX-License-Identifier: Apache-2.0
// `hoist doctor` about a directory for a store.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/aio/file.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/drive.hpp>
#include <hoist/platform/topology.hpp>

#include "finding.hpp"
#include "gpus.hpp"

namespace hoist::cli {

namespace {

constexpr std::uint64_t kTrialBytes = 64 * kKiB;

// A file without a name from now on, so that it disappears with the process.
aio::File trial_file(const std::string& directory) {
  std::random_device random;  // processes of several containers can have one number
  const std::string name = fmt::format(".hoist-doctor-{}-{:08x}{:08x}", ::getpid(), random(), random());
  const std::string path = (std::filesystem::path(directory) / name).string();
  aio::File file(path, {.mode = aio::OpenMode::create, .reserve_bytes = kTrialBytes});
  ::unlink(path.c_str());
  return file;
}

// Whether the operations of training work here: reserve, write past the page cache, flush, read back.
Finding direct_transfers(const std::string& directory) {
  Finding finding{.subject = "O_DIRECT", .found = "works: written, flushed and read back"};
  try {
    const aio::File file = trial_file(directory);
    const auto memory = std::unique_ptr<std::byte, void (*)(void*)>(
        static_cast<std::byte*>(std::aligned_alloc(kBlockAlignment, 2 * kTrialBytes)), std::free);
    const std::span written(memory.get(), kTrialBytes), read(memory.get() + kTrialBytes, kTrialBytes);
    std::ranges::fill(written, std::byte{0x5a});
    std::ranges::fill(read, std::byte{0});
    aio::DriveQueue queue({});
    queue.write(file, 0, written, aio::Priority::foreground).wait();
    queue.sync(file).wait();
    queue.read(file, 0, read, aio::Priority::foreground).wait();
    finding.data = {{"direct", file.is_direct()}, {"engine", queue.description()}};
    if (std::memcmp(written.data(), read.data(), kTrialBytes) != 0) {
      return {.subject = "O_DIRECT",
              .found = "the drive returned other bytes than were written",
              .verdict = Verdict::missing,
              .cost = "training stops at the first checksum",
              .remedy = "replace the drive, or use another"};
    }
    if (!file.is_direct()) {
      finding.found = "not offered by this file system: transfers go through the page cache";
      finding.lacks(
          Verdict::lacking, "each byte is copied once more, and memory beyond the budgets fills with cached state",
          "put the store on ext4 (without data=journal) or XFS, on a local drive with sectors of at most 4 KiB");
    }
  } catch (const IoError& error) {
    finding.found = error.what();
    finding.lacks(Verdict::missing, "no store can be made here",
                  error.where.code == EACCES || error.where.code == EROFS || error.where.code == EPERM
                      ? fmt::format("sudo chown $USER {}, or remount it writable", directory)
                      : "choose another directory");
  } catch (const std::exception& error) {  // no thread, or no memory
    finding.found = error.what();
    finding.lacks(Verdict::missing, "no transfer was tried",
                  "raise the limits of this process (ulimit -a), and try again");
  }
  return finding;
}

Finding file_system(const platform::FileSystem& system) {
  Finding finding{.subject = "file system", .found = "unknown"};
  if (system.type.empty()) return finding;
  finding.found = fmt::format("{} on {}, mounted at {}", system.type, system.source, system.point);
  finding.data = {{"type", system.type}, {"source", system.source}, {"mount", system.point}};
  if (!system.is_memory()) return finding;
  return finding.lacks(
      Verdict::lacking,
      "this is memory, not a drive: state here competes with pinned memory and does not survive a reboot",
      "choose a directory on a drive; findmnt -t ext4,xfs lists some");
}

Finding space(const std::string& directory) {
  Finding finding{.subject = "free space", .found = "unknown"};
  struct statvfs system {};
  if (::statvfs(directory.c_str(), &system) != 0) return finding;
  const std::uint64_t free_bytes = std::uint64_t{system.f_bavail} * system.f_frsize;
  finding.found = fmt::format("{} of {}: enough for about {:.1f} billion parameters (24 bytes each)",
                              format_bytes(free_bytes), format_bytes(std::uint64_t{system.f_blocks} * system.f_frsize),
                              static_cast<double>(free_bytes) / 24e9);
  finding.data = {{"free_bytes", free_bytes}};
  if (free_bytes > 0) return finding;
  return finding.lacks(Verdict::missing, "no store can be made here", "free space, or choose another directory");
}

Finding blocks(const platform::DriveFacts& drive) {
  const std::uint64_t logical = drive.logical_block_bytes.value_or(512);
  Finding finding{
      .subject = "drive",
      .found = fmt::format("{}{}{}, blocks of {} B ({} B inside), requests of at most {} KiB in {} pieces, "
                           "scheduler {}",
                           drive.name, drive.model.empty() ? "" : " " + drive.model,
                           drive.virtualized  ? " (virtual)"
                           : drive.rotational ? " (rotating)"
                                              : "",
                           logical, drive.physical_block_bytes.value_or(logical), drive.request_kib_max.value_or(0),
                           drive.segments_max.value_or(0), drive.scheduler.empty() ? "unknown" : drive.scheduler)};
  finding.data = {{"name", drive.name},
                  {"model", drive.model},
                  {"logical_block_bytes", logical},
                  {"physical_block_bytes", drive.physical_block_bytes.value_or(logical)},
                  {"rotational", drive.rotational},
                  {"virtual", drive.virtualized},
                  {"scheduler", drive.scheduler}};
  if (logical > kBlockAlignment) {
    finding.lacks(Verdict::lacking,
                  fmt::format("direct transfers are cut at {} B, which this drive does not accept: they go through the "
                              "page cache",
                              kBlockAlignment),
                  "format the namespace with blocks of 4096 B: nvme format --lbaf=N (erases it), or use another drive");
  } else if (drive.rotational && !drive.virtualized) {
    finding.lacks(Verdict::lacking,
                  "a rotating disk moves a fraction of what an NVMe drive does, and every step waits for it",
                  "choose a directory on an NVMe drive; lsblk -d -o NAME,ROTA,MODEL lists them");
  }
  return finding;
}

Finding discard(const platform::DriveFacts& drive, const platform::FileSystem& system) {
  Finding finding{.subject = "discard", .found = "not offered by the drive"};
  const bool offered = drive.discard_bytes_max.value_or(0) > 0;
  finding.data = {{"offered", offered}, {"mounted", system.discards}};
  if (!offered) return finding;
  finding.found =
      system.discards ? "offered, and the file system uses it at once" : "offered; not used when files are removed";
  if (system.discards) return finding;
  return finding.lacks(
      Verdict::lacking,
      "space of removed stores stays occupied inside the drive, which then writes slower and wears faster",
      fmt::format("sudo fstrim -v {}   (and for good: sudo systemctl enable --now fstrim.timer)", system.point));
}

// The NUMA node of the drive, and whether its data crosses to a GPU of another processor.
Finding node(const MachineSources& machine, platform::DeviceNumber drive) {
  Finding finding{.subject = "NUMA node",
                  .found = "the system does not say (virtual, several drives, or a single node)"};
  std::optional<int> node;
  try {
    node = platform::Topology::detect_with_sysfs(machine.sys).node_of_block_device(drive.major, drive.minor);
  } catch (const Error& error) {
    finding.found = fmt::format("unknown: {}", error.what());
  }
  if (!node) return finding;
  finding.found = fmt::format("{}: its I/O thread runs there", *node);
  finding.data["node"] = *node;
  std::vector<int> elsewhere;
  for (const PciGpu& gpu : find_gpus(machine)) {
    if (gpu.node == node) return finding;
    if (gpu.node) elsewhere.push_back(*gpu.node);
  }
  if (elsewhere.empty()) return finding;
  finding.verdict = Verdict::lacking;
  finding.found += fmt::format("; GPUs are on {}", fmt::join(elsewhere, ", "));
  finding.cost = "all data between drive and GPU crosses the link between the processors";
  finding.remedy =
      fmt::format("use a drive on node {}; lsblk -d -o NAME and /sys/block/NAME/device/numa_node say where each is",
                  elsewhere.front());
  return finding;
}

}  // namespace

Section look_at_path(const MachineSources& machine, const std::string& directory) {
  Section section{directory, {}};
  struct stat status {};
  if (::stat(directory.c_str(), &status) != 0) {
    section.findings.push_back({.subject = "directory",
                                .found = errno_text(errno),
                                .verdict = Verdict::missing,
                                .cost = "no store can be made here",
                                .remedy = "check the path and its permissions"});
    return section;
  }
  const platform::FileSystem system = platform::file_system_of(directory, machine.proc);
  section.findings.push_back(file_system(system));
  section.findings.push_back(direct_transfers(directory));
  section.findings.push_back(space(directory));
  if (const auto drive = platform::drive_of(system.drive, machine.sys)) {
    section.findings.push_back(blocks(*drive));
    section.findings.push_back(discard(*drive, system));
    section.findings.push_back(node(machine, system.drive));
  } else {
    section.findings.push_back({.subject = "drive",
                                .found = "none that the system names: the file system is not a plain "
                                         "block device's"});
  }
  return section;
}

}  // namespace hoist::cli
