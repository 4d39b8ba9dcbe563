// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

#include <unistd.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/platform/control_groups.hpp>

namespace hoist::platform {

namespace {

namespace fs = std::filesystem;
using Limits = ControlGroupLimits;

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// The hierarchies of control groups that are mounted. Version 1 has several, named by their controllers ("memory");
// version 2 has one, named "" here.
class Hierarchies {
 public:
  explicit Hierarchies(const fs::path& proc) : mounts_(mounts(proc)) {
    // A line of /proc/self/cgroup: number:controllers:path.
    std::ifstream file(proc / "self/cgroup");
    for (std::string line; std::getline(file, line);) {
      const auto first = line.find(':');
      const auto second = line.find(':', first + 1);
      if (first == std::string::npos || second == std::string::npos) continue;
      own_groups_.push_back({split(line.substr(first + 1, second - first - 1), ','), line.substr(second + 1)});
    }
  }

  // The directories from the process's own group up to the root of what is mounted. A mount inside a container shows
  // only the group named by its root. If the process's group is outside of it, only the mount's root is visible.
  std::vector<fs::path> groups_upwards(const std::string& controller) const {
    const auto mount = std::ranges::find_if(mounts_, [&](const Mount& candidate) {
      return controller.empty() ? candidate.type == "cgroup2"
                                : candidate.type == "cgroup" && has(candidate.options, controller);
    });
    const auto group = std::ranges::find_if(own_groups_, [&](const OwnGroup& candidate) {
      return controller.empty() ? candidate.controllers.empty() : has(candidate.controllers, controller);
    });
    if (mount == mounts_.end() || group == own_groups_.end()) return {};
    const fs::path below = fs::path(group->path).lexically_relative(mount->root).lexically_normal();
    std::error_code ignored;
    fs::path own = (fs::path(mount->point) / below).lexically_normal();
    const bool is_outside = below.empty() || *below.begin() == "..";
    if (is_outside || !fs::is_directory(own, ignored)) own = mount->point;
    std::vector<fs::path> groups;
    for (fs::path at = own;; at = at.parent_path()) {
      groups.push_back(at);
      if (at == fs::path(mount->point) || !at.has_relative_path()) break;
    }
    return groups;
  }

 private:
  struct OwnGroup {
    std::vector<std::string> controllers;
    std::string path;
  };
  std::vector<Mount> mounts_;
  std::vector<OwnGroup> own_groups_;
};

void keep_smaller(std::optional<Limits::Cpu>& limit, std::optional<double> count, const fs::path& file) {
  if (count && (!limit || *count < limit->count)) limit = Limits::Cpu{*count, file.string()};
}

struct MemoryFiles {
  std::vector<const char*> limits;
  const char* usage;
  const char* reclaimable;  // line of memory.stat
};

// The number after `name` in a file of "name value" lines.
std::optional<std::uint64_t> named_value(const fs::path& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  for (std::uint64_t value = 0; file >> word >> value;)
    if (word == name) return value;
  return std::nullopt;
}

void limit_memory(Limits& limits, const fs::path& group, const MemoryFiles& files) {
  constexpr std::uint64_t kMost = 1ull << 62;  // version 1 spells that as a number just below 2^63
  for (const char* const name : files.limits) {
    const auto bytes = number_in(group / name);
    if (!bytes || *bytes >= kMost) continue;
    if (!limits.memory || *bytes < limits.memory->bytes) limits.memory = {*bytes, (group / name).string()};
    const std::uint64_t usage = number_in(group / files.usage).value_or(0);
    const std::uint64_t cache = named_value(group / "memory.stat", files.reclaimable).value_or(0);
    const std::uint64_t used = usage - std::min(usage, cache);
    const std::uint64_t left = *bytes - std::min(*bytes, used);
    limits.free_memory_bytes = std::min(limits.free_memory_bytes.value_or(left), left);
  }
}

// "200000 100000" -> 2; nullopt for "max 100000".
std::optional<double> cpus_in(const fs::path& file) {
  std::istringstream line(first_line(file).value_or(""));
  double quota = 0, period = 0;
  if (!(line >> quota >> period) || period <= 0) return std::nullopt;
  return quota / period;
}

std::optional<double> v1_cpus_in(const fs::path& group) {
  const auto quota = number_in(group / "cpu.cfs_quota_us");  // -1, no number: no limit
  const auto period = number_in(group / "cpu.cfs_period_us");
  if (!quota || !period || *period == 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

// A group without processors of its own has those of the one above.
std::optional<unsigned> processors_of(const std::vector<fs::path>& groups, const char* name) {
  for (const fs::path& group : groups)
    if (const auto count = size_of_list(first_line(group / name).value_or("")); count > 0) return count;
  return std::nullopt;
}

}  // namespace

ControlGroupLimits control_group_limits(const fs::path& proc) {
  const Hierarchies hierarchies(proc);
  Limits limits;
  const std::vector<fs::path> unified = hierarchies.groups_upwards("");
  for (const fs::path& group : unified) {
    limit_memory(limits, group, {{"memory.max", "memory.high"}, "memory.current", "inactive_file"});
    keep_smaller(limits.cpu, cpus_in(group / "cpu.max"), group / "cpu.max");
  }
  for (const fs::path& group : hierarchies.groups_upwards("memory"))
    limit_memory(limits, group, {{"memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"});
  for (const fs::path& group : hierarchies.groups_upwards("cpu"))
    keep_smaller(limits.cpu, v1_cpus_in(group), group / "cpu.cfs_quota_us");
  limits.processors = processors_of(unified, "cpuset.cpus.effective");
  if (!limits.processors)
    limits.processors = processors_of(hierarchies.groups_upwards("cpuset"), "cpuset.effective_cpus");
  return limits;
}

unsigned processor_count(const ControlGroupLimits& limits) {
  const auto online = static_cast<unsigned>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  return limits.processors.value_or(online);
}

}  // namespace hoist::platform
