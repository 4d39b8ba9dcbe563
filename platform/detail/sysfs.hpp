// SPDX-License-Identifier: Apache-2.0
// platform/detail/sysfs.hpp - the NUMA node of a drive, by the kernel's device tree.
//
// Every function takes the root of the tree, so that tests can use their own.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <hoist/platform/drive.hpp>

namespace hoist::platform::detail {

// The block device of the file system of `path` or, if that does not exist yet, of its nearest existing parent.
std::optional<DeviceNumber> block_device_of_path(const std::filesystem::path& path);

// The node of a drive, of a partition, or of a volume (device mapper, md) whose drives all have the same one.
std::optional<int> numa_node_of_block_device(const std::filesystem::path& sysfs, DeviceNumber device);

// The number in a numa_node file; nullopt if it is missing or -1 ("unknown").
std::optional<int> numa_node_file(const std::filesystem::path& file);

}  // namespace hoist::platform::detail
