// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <system_error>

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/platform/drive.hpp>

namespace hoist::platform {

namespace fs = std::filesystem;

namespace {

// The source names a drive also where the mount's number is one of the file system's own (btrfs), and the number does
// where the source is no file (/dev/root).
DeviceNumber drive_under(const Mount& mount) {
  struct stat source {};
  if (::stat(mount.source.c_str(), &source) == 0 && S_ISBLK(source.st_mode))
    return {major(source.st_rdev), minor(source.st_rdev)};
  DeviceNumber device;
  return std::sscanf(mount.device.c_str(), "%u:%u", &device.major, &device.minor) == 2 && device.major != 0
             ? device
             : DeviceNumber{};
}

}  // namespace

FileSystem file_system_of(const std::string& path, const fs::path& proc) {
  const auto mount = mount_of(path, proc);
  if (!mount) return {};
  return {.type = mount->type,
          .source = mount->source,
          .point = mount->point,
          .discards = std::ranges::find(mount->options, "discard") != mount->options.end(),
          .drive = drive_under(*mount)};
}

std::optional<DriveFacts> drive_of(DeviceNumber device, const fs::path& sys) {
  std::error_code failed;
  fs::path directory = fs::canonical(sys / fmt::format("dev/block/{}:{}", device.major, device.minor), failed);
  if (failed) return std::nullopt;
  // A partition's directory is inside its drive's, which has the queue.
  if (fs::exists(directory / "partition", failed)) directory = directory.parent_path();
  const auto number = [&](const char* name) { return number_in(directory / "queue" / name); };
  return DriveFacts{.name = directory.filename().string(),
                    .model = first_line(directory / "device/model").value_or(""),
                    .logical_block_bytes = number("logical_block_size"),
                    .physical_block_bytes = number("physical_block_size"),
                    .discard_bytes_max = number("discard_max_bytes"),
                    .segments_max = number("max_segments"),
                    .request_kib_max = number("max_sectors_kb"),
                    .rotational = number("rotational").value_or(0) == 1,
                    .virtualized = directory.string().find("/virtio") != std::string::npos ||
                                   directory.string().find("/vbd-") != std::string::npos,
                    .scheduler = chosen_of(first_line(directory / "queue/scheduler").value_or(""))};
}

}  // namespace hoist::platform
