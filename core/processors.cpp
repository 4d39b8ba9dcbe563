// SPDX-License-Identifier: Apache-2.0
#include <sched.h>

#include <hoist/core/processors.hpp>

namespace hoist {

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

}  // namespace hoist
