// SPDX-License-Identifier: Apache-2.0
// platform/free_memory.hpp - how much memory the machine and its GPUs have, how much of it is free, and how many
// processors there are.
//
// Threading  Any thread.
// Errors     DeviceError for a GPU that does not answer.
#pragma once

#include <cstdint>

namespace hoist::platform {

struct MemorySize {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;
};

// The memory of the machine that this process may have, within its memory control groups. Free is what it can take
// without swapping or a kill, by the kernel's estimate.
MemorySize host_memory();

// Addresses that this process may map (ulimit -v); the largest numbers if there is no limit.
MemorySize address_space();

// Processors of the machine, within the control groups of this process. A launcher may have bound the process to fewer.
unsigned processor_count();

// The memory of a CUDA device. Takes a context on it. Errors: DeviceError without CUDA support.
MemorySize cuda_memory(int ordinal);

}  // namespace hoist::platform
