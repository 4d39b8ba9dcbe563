// SPDX-License-Identifier: Apache-2.0
// Reads /proc and the control groups. mmap() alone does not tell: it also gives addresses for which there is no memory,
// and the kernel then kills the process when it touches them.
#include <algorithm>
#include <climits>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/control_groups.hpp>
#include <hoist/platform/free_memory.hpp>

namespace hoist::platform {

namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

MemorySize machine_memory(const std::string& proc) {
  return {field_bytes(proc + "/meminfo", "MemTotal").value_or(kUnlimited),
          field_bytes(proc + "/meminfo", "MemAvailable").value_or(kUnlimited)};
}

MemorySize within(const ControlGroupLimits& limits, const MemorySize& machine) {
  return {std::min(machine.total_bytes, limits.memory ? limits.memory->bytes : kUnlimited),
          std::min(machine.free_bytes, limits.free_memory_bytes.value_or(kUnlimited))};
}

}  // namespace

MemorySize address_space() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {kUnlimited, kUnlimited};
  const std::uint64_t used = field_bytes("/proc/self/status", "VmSize").value_or(0);
  return {limit.rlim_cur, left_of(limit.rlim_cur, used)};
}

std::string memory_id(const ControlGroupLimits& limits, const std::string& proc) {
  std::string id = first_line(proc + "/sys/kernel/random/boot_id").value_or("");
  if (id.empty()) {  // of a kernel that is not Linux, but answers like it
    char name[HOST_NAME_MAX + 1] = {};
    if (::gethostname(name, HOST_NAME_MAX) == 0) id = name;
  }
  // Containers number control groups by their own paths; the file is one and the same in all of them.
  struct stat limit {};
  const bool is_limited = limits.memory && limits.memory->bytes < machine_memory(proc).total_bytes;
  if (is_limited && ::stat(limits.memory->file.c_str(), &limit) == 0) id += ":" + std::to_string(limit.st_ino);
  return id;
}

MemorySize host_memory(const ControlGroupLimits& limits) { return within(limits, machine_memory("/proc")); }

MemorySize host_memory_beside_gpus(const ControlGroupLimits& limits, const std::string& proc, const std::string& sys) {
  return within(limits, memory_of_processors(machine_memory(proc), sys));
}

MemorySize memory_of_processors(const MemorySize& machine, const std::string& sys) {
  namespace fs = std::filesystem;
  MemorySize size = machine;
  const auto take_away = [](std::uint64_t& bytes, std::uint64_t other) { bytes -= std::min(bytes, other); };
  std::error_code failed;
  for (fs::directory_iterator entry(fs::path(sys) / "devices/system/node", failed), end; !failed && entry != end;
       entry.increment(failed)) {
    const std::string name = entry->path().filename().string();
    const auto list = first_line(entry->path() / "cpulist");
    if (!name.starts_with("node") || !list || size_of_list(*list) > 0) continue;
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

}  // namespace hoist::platform
