// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>

#include <sched.h>

#include <hoist/optim_cpu/detail/processors.hpp>

namespace hoist::optim::detail {

namespace {

constexpr std::size_t kProcessorsMax = 16384;  // above the largest NR_CPUS of any distribution
using Mask = std::vector<cpu_set_t>;
constexpr std::size_t kMaskBytes = kProcessorsMax / 8;

Mask empty_mask() {
  Mask mask(kMaskBytes / sizeof(cpu_set_t));
  CPU_ZERO_S(kMaskBytes, mask.data());
  return mask;
}

}  // namespace

Processors current_processors() {
  Mask mask = empty_mask();
  Processors processors;
  if (sched_getaffinity(0, kMaskBytes, mask.data()) != 0) return {0};
  for (std::size_t cpu = 0; cpu < kProcessorsMax; ++cpu) {
    if (CPU_ISSET_S(cpu, kMaskBytes, mask.data())) processors.push_back(static_cast<int>(cpu));
  }
  return processors;
}

bool bind_current_thread(const Processors& processors) {
  Mask mask = empty_mask();
  for (const int cpu : processors) {
    if (cpu < 0 || static_cast<std::size_t>(cpu) >= kProcessorsMax) return false;
    CPU_SET_S(static_cast<std::size_t>(cpu), kMaskBytes, mask.data());
  }
  return sched_setaffinity(0, kMaskBytes, mask.data()) == 0;
}

Processors parse_processor_list(std::string_view list) {
  Processors processors;
  while (!list.empty() && (list.back() == '\n' || list.back() == ' ')) list.remove_suffix(1);
  const char* at = list.data();
  const char* const end = at + list.size();
  while (at != end) {
    int first = 0;
    auto parsed = std::from_chars(at, end, first);
    if (parsed.ec != std::errc{} || first < 0) return {};
    int last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') {
      parsed = std::from_chars(parsed.ptr + 1, end, last);
      if (parsed.ec != std::errc{} || last < first || static_cast<std::size_t>(last) >= kProcessorsMax) return {};
    }
    for (int cpu = first; cpu <= last; ++cpu) processors.push_back(cpu);
    at = parsed.ptr;
    if (at != end && *at++ != ',') return {};
  }
  std::sort(processors.begin(), processors.end());
  return processors;
}

std::optional<Processors> node_processors(int node, const std::string& sysfs_nodes) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(sysfs_nodes, ignored)) {
    return node == 0 ? std::optional(current_processors()) : std::nullopt;
  }
  std::ifstream file(sysfs_nodes + "/node" + std::to_string(node) + "/cpulist");
  std::string list;
  if (!std::getline(file, list)) return std::nullopt;
  return parse_processor_list(list);
}

}  // namespace hoist::optim::detail
