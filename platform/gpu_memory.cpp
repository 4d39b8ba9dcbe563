// SPDX-License-Identifier: Apache-2.0
// The part that asks no GPU; cuda_device.cpp has the other, and device.cpp what a build without CUDA answers.
#include <cstddef>

#include <hoist/platform/gpu_memory.hpp>

namespace hoist::platform {

const char* gpu_memory_name(GpuMemory memory) {
  static constexpr const char* kNames[] = {"separate", "coherent", "integrated"};
  return kNames[static_cast<std::size_t>(memory)];
}

GpuMemory gpu_memory(const GpuMemoryFacts& facts) {
  if (facts.is_integrated) return GpuMemory::integrated;
  return facts.uses_host_page_tables ? GpuMemory::coherent : GpuMemory::separate;
}

}  // namespace hoist::platform
