// SPDX-License-Identifier: Apache-2.0
#include <fstream>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/platform/detail/sysfs.hpp>

namespace hoist::platform::detail {

namespace fs = std::filesystem;

namespace {

std::vector<fs::path> children(const fs::path& folder) {
  std::vector<fs::path> result;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    result.push_back(entry->path());
  }
  return result;
}

std::optional<int> node_of_folder(const fs::path& sysfs, const fs::path& folder, int depth);

// The common node of all drives under a volume; nullopt if one is unknown or two differ.
std::optional<int> common_node(const fs::path& sysfs, const std::vector<fs::path>& drives, int depth) {
  constexpr int kVolumeDepthMax = 8;  // volumes upon volumes
  std::optional<int> common;
  for (const fs::path& link : drives) {
    std::error_code error;
    const fs::path drive = fs::canonical(link, error);
    const auto node = error || depth == kVolumeDepthMax ? std::nullopt : node_of_folder(sysfs, drive, depth + 1);
    if (!node || (common && *common != *node)) return std::nullopt;
    common = node;
  }
  return common;
}

// The controllers of an NVMe subsystem: a multipath namespace belongs to the subsystem, not to a PCI device.
std::vector<fs::path> nvme_controllers(const fs::path& subsystem) {
  std::vector<fs::path> result;
  for (const fs::path& child : children(subsystem)) {
    if (fs::exists(child / "numa_node")) result.push_back(child);
  }
  return result;
}

// `folder` is a block device's own folder in the device tree, or a controller's.
std::optional<int> node_of_folder(const fs::path& sysfs, const fs::path& folder, int depth) {
  // A partition's folder is inside its drive's.
  const fs::path drive = fs::exists(folder / "partition") ? folder.parent_path() : folder;
  const std::vector<fs::path> parts = children(drive / "slaves");
  if (!parts.empty()) return common_node(sysfs, parts, depth);
  for (fs::path at = drive; at != sysfs && at.has_relative_path(); at = at.parent_path()) {
    if (fs::exists(at / "numa_node")) return numa_node_file(at / "numa_node");
    if (at.filename().string().starts_with("nvme-subsys")) return common_node(sysfs, nvme_controllers(at), depth);
  }
  return std::nullopt;
}

}  // namespace

std::optional<DeviceNumber> block_device_of_path(const fs::path& path) {
  struct stat status {};
  std::error_code error;
  fs::path at = fs::absolute(path, error);
  if (error) return std::nullopt;
  while (::stat(at.c_str(), &status) != 0) {
    if (!at.has_relative_path()) return std::nullopt;
    at = at.parent_path();
  }
  if (S_ISBLK(status.st_mode)) return DeviceNumber{major(status.st_rdev), minor(status.st_rdev)};
  if (major(status.st_dev) != 0) return DeviceNumber{major(status.st_dev), minor(status.st_dev)};
  const DeviceNumber drive = file_system_of(at.string()).drive;
  return drive.major != 0 ? std::optional(drive) : std::nullopt;
}

std::optional<int> numa_node_of_block_device(const fs::path& sysfs, DeviceNumber device) {
  std::error_code error;
  const fs::path root = fs::canonical(sysfs, error);
  if (error) return std::nullopt;
  const fs::path folder = fs::canonical(root / "dev/block" / fmt::format("{}:{}", device.major, device.minor), error);
  if (error) return std::nullopt;
  return node_of_folder(root, folder, 0);
}

std::optional<int> numa_node_file(const fs::path& file) {
  std::ifstream stream(file);
  int node = -1;
  if (!(stream >> node) || node < 0) return std::nullopt;
  return node;
}

}  // namespace hoist::platform::detail
