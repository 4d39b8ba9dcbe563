// SPDX-License-Identifier: Apache-2.0
// platform/drive.hpp - the file system and the block device of a directory, as the kernel describes them.
//
// The roots of procfs and sysfs are arguments, so that tests can use their own.
//
// Threading  Any.
// Errors     None: what cannot be read is unknown.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace hoist::platform {

// Identifies a block device; 0:0 means that there is none.
struct DeviceNumber {
  unsigned major = 0;
  unsigned minor = 0;
};

struct FileSystem {
  std::string type;       // "ext4"; empty: unknown
  std::string source;     // "/dev/nvme0n1p1"
  std::string point;      // where it is mounted
  bool discards = false;  // mounted with the option `discard`
  DeviceNumber drive;     // the block device below; if there are several (btrfs, an XFS log of its own), the one that
                          // the mount names
  bool is_memory() const { return type == "tmpfs" || type == "ramfs"; }
};
FileSystem file_system_of(const std::string& path, const std::filesystem::path& proc = "/proc");

struct DriveFacts {
  std::string name;   // "nvme0n1"
  std::string model;  // empty: unknown
  std::optional<std::uint64_t> logical_block_bytes;
  std::optional<std::uint64_t> physical_block_bytes;
  std::optional<std::uint64_t> discard_bytes_max;  // 0: the drive does not discard
  std::optional<std::uint64_t> segments_max;       // pieces of memory in one request, at most
  std::optional<std::uint64_t> request_kib_max;
  bool rotational = false;
  bool virtualized = false;  // a virtual drive: the hypervisor may have invented its properties
  std::string scheduler;
};
// The whole drive, also for a partition; nullopt without a block device (network, memory, overlays).
std::optional<DriveFacts> drive_of(DeviceNumber device, const std::filesystem::path& sys = "/sys");

}  // namespace hoist::platform
