// SPDX-License-Identifier: Apache-2.0
// Reads /proc and the control groups. mmap() alone does not tell: it also gives addresses for which there is no memory,
// and the kernel then kills the process when it touches them.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include <sys/resource.h>
#include <unistd.h>

#include <hoist/core/kernel_files.hpp>
#include <hoist/core/units.hpp>
#include <hoist/platform/control_groups.hpp>
#include <hoist/platform/free_memory.hpp>

namespace hoist::platform {

namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

MemorySize smaller(const MemorySize& a, const MemorySize& b) {
  return {std::min(a.total_bytes, b.total_bytes), std::min(a.free_bytes, b.free_bytes)};
}

constexpr MemorySize kNoLimit{kUnlimited, kUnlimited};

}  // namespace

MemorySize address_space() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  const std::uint64_t used = field_bytes("/proc/self/status", "VmSize").value_or(0);
  return {limit.rlim_cur, left_of(limit.rlim_cur, used)};
}

MemorySize host_memory(const ControlGroupLimits& limits) {
  const MemorySize machine{field_bytes("/proc/meminfo", "MemTotal").value_or(kUnlimited),
                           field_bytes("/proc/meminfo", "MemAvailable").value_or(kUnlimited)};
  const std::uint64_t limit = limits.memory ? limits.memory->bytes : kUnlimited;
  return smaller(machine, {limit, limits.free_memory_bytes.value_or(kUnlimited)});
}

MemorySize memory_of_processors(const MemorySize& host, const std::string& sys) {
  namespace fs = std::filesystem;
  MemorySize size = host;
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

const char* gpu_memory_name(GpuMemory memory) {
  static constexpr const char* kNames[] = {"separate", "coherent", "integrated"};
  return kNames[static_cast<std::size_t>(memory)];
}

GpuMemory gpu_memory(const GpuMemoryFacts& facts) {
  if (facts.is_integrated) return GpuMemory::integrated;
  return facts.uses_host_page_tables ? GpuMemory::coherent : GpuMemory::separate;
}

unsigned processor_count(const ControlGroupLimits& limits) {
  const auto online = static_cast<unsigned>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  return limits.processors.value_or(online);
}

}  // namespace hoist::platform
