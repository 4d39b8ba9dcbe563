// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <system_error>

#include <fmt/format.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/platform/drive.hpp>

namespace hoist::platform {

namespace fs = std::filesystem;

namespace {

bool is_at_or_below(const std::string& path, const std::string& directory) {
  return directory == "/" || path == directory || path.starts_with(directory + "/");
}

}  // namespace

FileSystem file_system_of(const std::string& path, unsigned major, unsigned minor, const fs::path& proc) {
  FileSystem best;
  const std::string device = fmt::format("{}:{}", major, minor);
  for (const Mount& mount : mounts(proc)) {
    if (mount.device != device || !is_at_or_below(path, mount.point)) continue;
    if (!best.type.empty() && mount.point.size() < best.point.size()) continue;
    best = {mount.type, mount.source, mount.point, std::ranges::find(mount.options, "discard") != mount.options.end()};
  }
  return best;
}

std::optional<DriveFacts> drive_of(unsigned major, unsigned minor, const fs::path& sys) {
  std::error_code failed;
  fs::path directory = fs::canonical(sys / fmt::format("dev/block/{}:{}", major, minor), failed);
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
