// SPDX-License-Identifier: Apache-2.0
// platform/gpu_memory.hpp - the memory of a GPU, and whether it is the machine's, too.
//
// Threading  Any thread.
// Errors     DeviceError for a GPU that does not answer.
#pragma once

#include <cstdint>

#include <hoist/platform/free_memory.hpp>

namespace hoist::platform {

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
