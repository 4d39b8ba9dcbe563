// SPDX-License-Identifier: Apache-2.0
// platform/free_memory.hpp - how much memory the machine and its GPUs have, how much of it is free, and how many
// processors there are.
//
// Threading  Any thread.
// Errors     DeviceError for a GPU that does not answer.
#pragma once

#include <cstdint>
#include <string>

#include <hoist/platform/control_groups.hpp>

namespace hoist::platform {

struct MemorySize {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;
};

// The memory of the machine that this process may have, within the limits of its control groups. Free is what it can
// take without swapping or a kill, by the kernel's estimate.
MemorySize host_memory(const ControlGroupLimits& limits = control_group_limits());

// Addresses that this process may map (ulimit -v); the largest numbers if there is no limit.
MemorySize address_space();

// Processors of the machine, within the limits of this process's control groups. A launcher may have bound the process
// to fewer.
unsigned processor_count(const ControlGroupLimits& limits = control_group_limits());

// host_memory() without the memory of NUMA nodes that have no processors, as far as the kernel counts it in: that of
// GPUs on machines where processors reach it. `sys`: the root of sysfs.
MemorySize memory_of_processors(const MemorySize& host, const std::string& sys = "/sys");

// The memory of a CUDA device. Takes a context on it. Errors: DeviceError without CUDA support.
MemorySize cuda_memory(int ordinal);

// How the memory of a GPU and that of the machine belong together.
enum class GpuMemory : std::uint8_t {
  separate,    // its own, behind PCIe
  coherent,    // its own; processors and GPU reach each other's memory through the same page tables (GH200)
  integrated,  // there is one memory, which the GPU shares with the processors (GB10)
};
const char* gpu_memory_name(GpuMemory memory);

// Properties of a GPU, as the CUDA runtime reports them.
struct GpuMemoryFacts {
  bool is_integrated = false;          // cudaDevAttrIntegrated
  bool uses_host_page_tables = false;  // cudaDevAttrPageableMemoryAccessUsesHostPageTables
};
GpuMemory gpu_memory(const GpuMemoryFacts& facts);
// All properties are false without CUDA support, and where the runtime does not report them.
GpuMemoryFacts cuda_memory_facts(int ordinal);

}  // namespace hoist::platform
