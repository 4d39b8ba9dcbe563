// SPDX-License-Identifier: Apache-2.0
// Reads /proc and the control groups. mmap() alone does not tell: it also gives addresses for which there is no memory,
// and the kernel then kills the process when it touches them.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include <hoist/platform/free_memory.hpp>

namespace hoist::platform {

namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

// The number after `name` in a file of "name value" lines.
std::optional<std::uint64_t> named_value(const std::filesystem::path& path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    std::uint64_t value = 0;
    if (words >> word >> value && word == name) return value;
  }
  return std::nullopt;
}

std::optional<std::uint64_t> single_value(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;  // missing, or "max"
}

struct GroupFiles {
  const char* limit;
  const char* soft_limit;  // beyond it the kernel slows the processes down, which is a limit for training; or null
  const char* usage;
  const char* reclaimable;  // line of memory.stat: page cache that is dropped first, so it does not count as used
};

MemorySize smaller(const MemorySize& a, const MemorySize& b) {
  return {std::min(a.total_bytes, b.total_bytes), std::min(a.free_bytes, b.free_bytes)};
}

constexpr MemorySize kNoLimit{kUnlimited, kUnlimited};

MemorySize of_group(const std::filesystem::path& group, const GroupFiles& files) {
  auto limit = single_value(group / files.limit);
  if (const auto soft = files.soft_limit ? single_value(group / files.soft_limit) : std::nullopt; soft)
    limit = std::min(limit.value_or(*soft), *soft);
  const auto usage = single_value(group / files.usage);
  if (!limit || !usage) return kNoLimit;
  const std::uint64_t cache = named_value(group / "memory.stat", files.reclaimable).value_or(0);
  const std::uint64_t used = *usage > cache ? *usage - cache : 0;
  return {*limit, *limit > used ? *limit - used : 0};
}

// The smallest of any group from `path` up to the root of the hierarchy. Inside a container the path may name invisible
// groups; the visible ones still apply.
MemorySize of_hierarchy(const std::filesystem::path& mount, const std::string& path, const GroupFiles& files) {
  MemorySize size = of_group(mount, files);
  for (std::filesystem::path group(path); group.has_relative_path(); group = group.parent_path())
    size = smaller(size, of_group(mount / group.relative_path(), files));
  return size;
}

// The control groups of this process that know of `controller`: is_v2, and the path below the controller's mount.
std::vector<std::pair<bool, std::string>> control_groups(const std::string& controller) {
  std::vector<std::pair<bool, std::string>> groups;
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // "hierarchy:controllers:path"
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty() || ("," + controllers + ",").find("," + controller + ",") != std::string::npos)
      groups.emplace_back(controllers.empty(), line.substr(second + 1));
  }
  return groups;
}

MemorySize of_control_groups() {
  MemorySize size = kNoLimit;
  for (const auto& [is_v2, path] : control_groups("memory"))
    size = smaller(size, memory_of_groups(is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory", path, is_v2));
  return size;
}

// How many processors "0-3,8" names; 0 if it is not such a list.
unsigned count_of_list(const std::string& list) {
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

}  // namespace

MemorySize memory_of_groups(const std::string& mount, const std::string& path, bool is_v2) {
  const GroupFiles files =
      is_v2 ? GroupFiles{"memory.max", "memory.high", "memory.current", "inactive_file"}
            : GroupFiles{"memory.limit_in_bytes", nullptr, "memory.usage_in_bytes", "total_inactive_file"};
  return of_hierarchy(mount, path, files);
}

MemorySize address_space() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  const std::uint64_t used = named_value("/proc/self/status", "VmSize:").value_or(0) * 1024;
  return {limit.rlim_cur, limit.rlim_cur > used ? limit.rlim_cur - used : 0};
}

MemorySize host_memory() {
  const auto of_machine = [](const char* name) {
    const auto kib = named_value("/proc/meminfo", name);
    return kib ? *kib * 1024 : kUnlimited;
  };
  const MemorySize machine{of_machine("MemTotal:"), of_machine("MemAvailable:")};
  return smaller(machine, of_control_groups());
}

MemorySize memory_of_processors(const MemorySize& host, const std::string& sys) {
  namespace fs = std::filesystem;
  MemorySize size = host;
  const auto take_away = [](std::uint64_t& bytes, std::uint64_t other) { bytes -= std::min(bytes, other); };
  std::error_code failed;
  for (fs::directory_iterator entry(fs::path(sys) / "devices/system/node", failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    std::ifstream cpus(entry->path() / "cpulist");
    std::string list;
    if (!name.starts_with("node") || !cpus || std::getline(cpus, list).fail() || count_of_list(list) > 0) continue;
    // "Node 1 MemTotal:       16777216 kB"
    std::ifstream file(entry->path() / "meminfo");
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::string node, number, key;
      std::uint64_t kib = 0;
      if (!(words >> node >> number >> key >> kib)) continue;
      if (key == "MemTotal:") take_away(size.total_bytes, kib * 1024);
      if (key == "MemFree:") take_away(size.free_bytes, kib * 1024);
    }
  }
  return size;
}

const char* gpu_memory_name(GpuMemory memory) {
  static constexpr const char* kNames[] = {"separate", "coherent", "integrated"};
  return kNames[static_cast<std::size_t>(memory)];
}

GpuMemory gpu_memory(const GpuMemoryFacts& facts) {
  if (facts.is_integrated) return GpuMemory::integrated;
  return facts.uses_host_page_tables ? GpuMemory::coherent : GpuMemory::separate;
}

unsigned processor_count() {
  namespace fs = std::filesystem;
  for (const auto& [is_v2, path] : control_groups("cpuset")) {
    const fs::path mount = is_v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpuset";
    const char* const name = is_v2 ? "cpuset.cpus.effective" : "cpuset.effective_cpus";
    for (fs::path group = fs::path(path).relative_path();; group = group.parent_path()) {
      std::ifstream file(mount / group / name);
      std::string list;
      if (std::getline(file, list))
        if (const unsigned count = count_of_list(list); count > 0) return count;
      if (group.empty()) break;
    }
  }
  return static_cast<unsigned>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
}

}  // namespace hoist::platform
