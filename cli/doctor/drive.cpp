// SPDX-License-Identifier: Apache-2.0
#include "drive.hpp"

#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <vector>

#include <fmt/format.h>

namespace hoist::cli {

namespace fs = std::filesystem;

namespace {

bool is_at_or_below(const std::string& path, const std::string& directory) {
  return directory == "/" || path == directory || path.starts_with(directory + "/");
}

// "none [mq-deadline] kyber" -> "mq-deadline".
std::string chosen_of(const std::string& choices) {
  const auto open = choices.find('[');
  return open == std::string::npos ? choices : choices.substr(open + 1, choices.find(']') - open - 1);
}

}  // namespace

FileSystem file_system_of(const Machine& machine, const std::string& path, unsigned major, unsigned minor) {
  FileSystem best;
  std::ifstream file(machine.proc + "/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // id parent major:minor root point options [tags...] - type source super-options
    std::istringstream before(line);
    std::string id, parent, device, root, point, options;
    if (!(before >> id >> parent >> device >> root >> point >> options)) continue;
    const auto dash = line.find(" - ");
    if (dash == std::string::npos || device != fmt::format("{}:{}", major, minor) || !is_at_or_below(path, point))
      continue;
    if (!best.type.empty() && point.size() < best.point.size()) continue;
    std::istringstream after(line.substr(dash + 3));
    std::string super_options;
    after >> best.type >> best.source >> super_options;
    best.point = point;
    best.discards = ("," + options + "," + super_options + ",").find(",discard,") != std::string::npos;
  }
  return best;
}

std::optional<BlockDevice> drive_of(const Machine& machine, unsigned major, unsigned minor) {
  std::error_code failed;
  fs::path directory = fs::canonical(fs::path(machine.sys) / fmt::format("dev/block/{}:{}", major, minor), failed);
  if (failed) return std::nullopt;
  // A partition's directory is inside its drive's, which has the queue.
  if (fs::exists(directory / "partition", failed)) directory = directory.parent_path();
  const auto number = [&](const char* name) { return number_in((directory / "queue" / name).string()); };
  return BlockDevice{.name = directory.filename().string(),
                     .model = first_line((directory / "device/model").string()).value_or(""),
                     .logical_block_bytes = number("logical_block_size"),
                     .physical_block_bytes = number("physical_block_size"),
                     .discard_bytes_max = number("discard_max_bytes"),
                     .segments_max = number("max_segments"),
                     .request_kib_max = number("max_sectors_kb"),
                     .rotational = number("rotational").value_or(0) == 1,
                     .virtualized = directory.string().find("/virtio") != std::string::npos ||
                                    directory.string().find("/vbd-") != std::string::npos,
                     .scheduler = chosen_of(first_line((directory / "queue/scheduler").string()).value_or("unknown"))};
}

}  // namespace hoist::cli
