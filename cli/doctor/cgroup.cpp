// SPDX-License-Identifier: Apache-2.0
#include "cgroup.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <vector>

#include <fmt/format.h>

namespace hoist::cli {

namespace fs = std::filesystem;

namespace {

// The mount point of a hierarchy of groups, and the group that appears there.
struct Mount {
  std::string root;
  std::string point;
};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool lists(const std::string& names, const std::string& name) {
  const auto all = split(names, ',');
  return std::ranges::find(all, name) != all.end();
}

// The mount of the v1 hierarchy with `controller`, or of v2 if `controller` is empty. A line of mountinfo: id parent
// dev root point options [tags...] - type source super-options.
std::optional<Mount> find_mount(const Machine& machine, const std::string& controller) {
  std::ifstream file(machine.proc + "/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const auto dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    const auto before = split(line.substr(0, dash), ' ');
    const auto after = split(line.substr(dash + 3), ' ');
    if (before.size() < 5 || after.empty()) continue;
    const bool wanted = controller.empty() ? after[0] == "cgroup2"
                                           : after[0] == "cgroup" && after.size() > 2 && lists(after[2], controller);
    if (wanted) return Mount{before[3], before[4]};
  }
  return std::nullopt;
}

// The process's group in that hierarchy. A line of /proc/self/cgroup: number:controllers:path.
std::optional<std::string> own_group(const Machine& machine, const std::string& controller) {
  std::ifstream file(machine.proc + "/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? controllers.empty() : lists(controllers, controller)) return line.substr(second + 1);
  }
  return std::nullopt;
}

// The directories from the process's own group up to the root of what is mounted. A mount inside a container shows only
// the group named by its root. If the process's group is outside of it, only the mount's root is visible.
std::vector<fs::path> groups_upwards(const Machine& machine, const std::string& controller) {
  const auto mount = find_mount(machine, controller);
  const auto group = own_group(machine, controller);
  if (!mount || !group) return {};
  std::string below = *group;
  if (mount->root != "/" && below.starts_with(mount->root)) below.erase(0, mount->root.size());
  std::error_code ignored;
  fs::path own = (fs::path(mount->point) / fs::path(below).relative_path()).lexically_normal();
  if (!fs::is_directory(own, ignored)) own = mount->point;
  std::vector<fs::path> groups;
  for (fs::path at = own;; at = at.parent_path()) {
    groups.push_back(at);
    if (at == fs::path(mount->point) || !at.has_relative_path()) break;
  }
  return groups;
}

template <typename Limit, typename Value>
void keep_smaller(std::optional<Limit>& limit, std::optional<Value> candidate, const fs::path& file) {
  if (!candidate) return;
  Limit found;
  found.file = file.string();
  if constexpr (std::is_same_v<Limit, CgroupLimits::Memory>) {
    found.bytes = *candidate;
    if (!limit || found.bytes < limit->bytes) limit = found;
  } else {
    found.count = *candidate;
    if (!limit || found.count < limit->count) limit = found;
  }
}

// "200000 100000" -> 2; nullopt for "max 100000".
std::optional<double> cpus_in(const std::string& path) {
  std::istringstream line(first_line(path).value_or(""));
  double quota = 0, period = 0;
  if (!(line >> quota >> period) || period <= 0) return std::nullopt;
  return quota / period;
}

// Version 1 spells "no limit" as a number just below 2^63, rounded to pages.
std::optional<std::uint64_t> v1_bytes_in(const std::string& path) {
  constexpr std::uint64_t kNoLimit = 1ull << 62;
  const auto bytes = number_in(path);
  return bytes && *bytes < kNoLimit ? bytes : std::nullopt;
}

std::optional<double> v1_cpus_in(const fs::path& group) {
  const auto quota = number_in((group / "cpu.cfs_quota_us").string());  // -1, no number: no limit
  const auto period = number_in((group / "cpu.cfs_period_us").string());
  if (!quota || !period || *period == 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

}  // namespace

CgroupLimits cgroup_limits(const Machine& machine) {
  CgroupLimits limits;
  for (const fs::path& group : groups_upwards(machine, "")) {
    // Beyond memory.high the kernel does not kill the process but slows it down; for training that is a limit.
    for (const char* name : {"memory.max", "memory.high"}) {
      keep_smaller(limits.memory, number_in((group / name).string()), group / name);
    }
    keep_smaller(limits.cpu, cpus_in((group / "cpu.max").string()), group / "cpu.max");
  }
  for (const fs::path& group : groups_upwards(machine, "memory")) {
    const fs::path file = group / "memory.limit_in_bytes";
    keep_smaller(limits.memory, v1_bytes_in(file.string()), file);
  }
  for (const fs::path& group : groups_upwards(machine, "cpu")) {
    keep_smaller(limits.cpu, v1_cpus_in(group), group / "cpu.cfs_quota_us");
  }
  return limits;
}

}  // namespace hoist::cli
