// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/core/units.hpp>

namespace hoist {

std::optional<std::string> first_line(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string line;
  if (!std::getline(stream, line)) return std::nullopt;
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

std::optional<std::uint64_t> number_in(const std::filesystem::path& file) {
  const auto line = first_line(file);
  return line ? parse_number<std::uint64_t>(*line) : std::nullopt;
}

std::optional<std::string> field_of(const std::filesystem::path& file, const std::string& key) {
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    if (!line.starts_with(key)) continue;
    const auto colon = line.find_first_not_of(" \t", key.size());
    if (colon == std::string::npos || line[colon] != ':') continue;
    const auto start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? std::string() : line.substr(start);
  }
  return std::nullopt;
}

std::optional<std::uint64_t> field_bytes(const std::filesystem::path& file, const std::string& key) {
  const auto field = field_of(file, key);
  if (!field) return std::nullopt;
  std::uint64_t kilobytes = 0;
  const auto [end, error] = std::from_chars(field->data(), field->data() + field->size(), kilobytes);
  if (error != std::errc()) return std::nullopt;
  return kilobytes * 1024;
}

std::string chosen_of(const std::string& choices) {
  const auto open = choices.find('[');
  return open == std::string::npos ? choices : choices.substr(open + 1, choices.find(']', open) - open - 1);
}

unsigned size_of_list(const std::string& list) {
  unsigned count = 0;
  std::istringstream ranges(list);
  for (std::string range; std::getline(ranges, range, ',');) {
    std::istringstream numbers(range);
    unsigned first = 0;
    if (!(numbers >> first)) return 0;
    unsigned last = first;
    if (numbers.get() == '-' && !(numbers >> last)) return 0;
    if (last < first) return 0;
    count += last - first + 1;
  }
  return count;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

namespace {

// A field of mountinfo: blanks are written as \040.
std::string decoded(const std::string& field) {
  std::string text;
  for (std::size_t i = 0; i < field.size(); ++i) {
    const auto digits = field.substr(std::min(i + 1, field.size()), 3);
    if (field[i] == '\\' && digits.size() == 3 && digits.find_first_not_of("01234567") == std::string::npos) {
      text += static_cast<char>(std::stoi(digits, nullptr, 8));
      i += 3;
    } else {
      text += field[i];
    }
  }
  return text;
}

// "259:2", or nothing: errno says why.
std::string device_of(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return "";
  return fmt::format("{}:{}", major(status.st_dev), minor(status.st_dev));
}

}  // namespace

std::vector<Mount> mounts(const std::filesystem::path& proc) {
  std::vector<Mount> result;
  std::ifstream file(proc / "self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    // id parent major:minor root point options [tags...] - type source super-options
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto before = split(line.substr(0, dash), ' ');
    const auto after = split(line.substr(dash + 3), ' ');
    if (before.size() < 6 || after.size() < 2) continue;
    std::string options = before[5];
    if (after.size() > 2) options += "," + after[2];
    result.push_back(
        {before[2], decoded(before[3]), decoded(before[4]), after[0], decoded(after[1]), split(options, ',')});
  }
  return result;
}

std::optional<Mount> mount_of(const std::filesystem::path& path, const std::filesystem::path& proc) {
  std::error_code failed;
  const std::filesystem::path whole = std::filesystem::absolute(path, failed);
  const std::filesystem::path resolved = std::filesystem::weakly_canonical(failed ? path : whole, failed);
  const std::string at = failed ? path.string() : resolved.string();
  const auto is_above = [&](const std::string& point) {
    return point == "/" || at == point || at.starts_with(point + "/");
  };
  std::vector<Mount> above;
  for (Mount& mount : mounts(proc))
    if (is_above(mount.point)) above.push_back(std::move(mount));
  // One that a later mount hides is listed all the same. Subvolumes of btrfs have device numbers that are in no list.
  std::filesystem::path existing = at;
  while (device_of(existing).empty() && existing.has_relative_path()) existing = existing.parent_path();
  const std::string device = device_of(existing);
  const auto is_of_device = [&](const Mount& mount) { return mount.device == device; };
  const bool is_listed = std::ranges::any_of(above, is_of_device);
  std::optional<Mount> nearest;
  for (Mount& mount : above) {  // of several at one point, the last one is seen
    if (is_listed && !is_of_device(mount)) continue;
    if (!nearest || mount.point.size() >= nearest->point.size()) nearest = std::move(mount);
  }
  return nearest;
}

std::string file_system_key(const std::filesystem::path& path) {
  const std::string device = device_of(path);
  if (device.empty()) return "";
  const auto mount = mount_of(path);
  return mount ? mount->device : device;
}

}  // namespace hoist
