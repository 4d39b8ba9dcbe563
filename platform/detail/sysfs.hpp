// SPDX-License-Identifier: Apache-2.0
// platform/detail/sysfs.hpp - which NUMA node a drive hangs off, as the kernel's device tree says it.
//
// Every function takes the root of the tree, so that tests can build their own.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace hoist::platform::detail {

struct BlockDevice {
  unsigned major = 0;
  unsigned minor = 0;
};

// The block device of the file system that holds `path` or, when that does not exist yet, its nearest existing parent.
std::optional<BlockDevice> block_device_of_path(const std::filesystem::path& path);

// The node of a drive, of a partition, or of a volume (device mapper, md) whose drives all hang off the same one.
std::optional<int> numa_node_of_block_device(const std::filesystem::path& sysfs, BlockDevice device);

// The number in a numa_node file; nullopt when it is missing or -1 ("unknown").
std::optional<int> numa_node_file(const std::filesystem::path& file);

}  // namespace hoist::platform::detail
