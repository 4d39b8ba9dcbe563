// SPDX-License-Identifier: Apache-2.0
// cli/doctor/drive.hpp - the file system and the block device of a directory, as the kernel describes them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "finding.hpp"

namespace hoist::cli {

struct FileSystem {
  std::string type;       // "ext4"; empty: unknown
  std::string source;     // "/dev/nvme0n1p1"
  std::string point;      // where it is mounted
  bool discards = false;  // mounted with the option `discard`
  bool is_memory() const { return type == "tmpfs" || type == "ramfs"; }
};
// The mount with this device number. If several share it, the one nearest above `path`.
FileSystem file_system_of(const Machine& machine, const std::string& path, unsigned major, unsigned minor);

struct BlockDevice {
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
std::optional<BlockDevice> drive_of(const Machine& machine, unsigned major, unsigned minor);

}  // namespace hoist::cli
