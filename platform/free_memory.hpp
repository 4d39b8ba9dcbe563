// SPDX-License-Identifier: Apache-2.0
// platform/free_memory.hpp - how much memory the machine has, and how much of it is free.
//
// Threading  Any thread.
// Errors     None: no limit where the kernel does not say.
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

// host_memory() without the memory of GPUs that the kernel counts as the machine's. `proc`, `sys`: the roots of procfs
// and sysfs.
MemorySize host_memory_beside_gpus(const ControlGroupLimits& limits = control_group_limits(),
                                   const std::string& proc = "/proc", const std::string& sys = "/sys");

// `machine`, before any limit of a control group, without the memory of NUMA nodes that have no processors: that of
// GPUs on machines where processors reach it.
MemorySize memory_of_processors(const MemorySize& machine, const std::string& sys = "/sys");

// A text that is equal for processes that share one memory. Where a control group's limit is below the machine's
// memory, these are the processes of that group (a container with a limit of its own); else those of the machine, by
// its kernel's boot id. `proc`: the root of procfs.
std::string memory_id(const ControlGroupLimits& limits = control_group_limits(), const std::string& proc = "/proc");

// Addresses that this process may map (ulimit -v); the largest numbers if there is no limit.
MemorySize address_space();

}  // namespace hoist::platform
