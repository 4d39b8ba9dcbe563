// SPDX-License-Identifier: Apache-2.0
// zero/machine.hpp - what this machine has, and what a Runtime takes of it where its options leave the choice.
//
// Device         The GPU if there is one, else the host device.
// Memory         The free memory less a reserve for the program and for others. The reserve is a tenth of the total, at
//                least 1 GiB and at most 32 GiB, and never more than half of the total. The result is rounded down to a
//                multiple of a 32nd of the total, so that it is the same from run to run. The processes of a machine
//                divide its host memory (docs/launchers.md says who counts them). On the host device, device memory is
//                host memory, and one budget limits both; so it is where a GPU has no memory of its own
//                (GpuMemory::integrated). Where processors reach a GPU's memory, the kernel counts it as the machine's;
//                pinned memory is of the NUMA nodes with processors alone. A budget is a limit, not what an engine
//                takes.
// NUMA           Pinned memory and update threads of a process are on its own nodes and processors, its I/O threads and
//                staging buffers on the nodes of the drives (platform/numa_placement.hpp), unless
//                RuntimeOptions::numa_placement is false. A launcher that has bound the process has chosen its
//                processors.
// Update threads As many as the process has processors by this rule.
//
// Threading  Any thread.
// Errors     DeviceError for a GPU that does not answer; CommError for a launcher's wrong variables.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <hoist/platform/free_memory.hpp>
#include <hoist/platform/gpu_memory.hpp>
#include <hoist/platform/topology.hpp>
#include <hoist/zero/options.hpp>

namespace hoist {

struct Machine {
  int gpu_count = 0;
  std::string no_gpu{};        // why there is none that this process can use; empty where nobody looked for one
  int gpu_ordinal = 0;         // which one is this process's
  platform::MemorySize gpu{};  // its memory
  platform::GpuMemory gpu_memory = platform::GpuMemory::separate;
  platform::MemorySize host{};     // within the limits of the process
  int processes = 1;               // of this job, on this machine
  int local_rank = -1;             // which of them this is; -1: unknown
  unsigned cpu_count = 1;          // of the machine, within the control groups of the process
  unsigned allowed_cpu_count = 1;  // that this process may run on
  // Processors' worth of time that the control groups give all processes together (docker run --cpus); nullopt: no
  // limit.
  std::optional<double> cpu_limit{};
  // Empty: nothing is placed. With the processors that this process may use.
  std::vector<platform::Topology::Node> nodes{};
  std::vector<std::optional<int>> gpu_nodes{};  // of each GPU
};

// As a process with these options sees it. Looks for GPUs only if `options` may mean one.
Machine this_machine(const RuntimeOptions& options);

// The device that these options choose on this machine.
platform::DeviceKind device_kind(const RuntimeOptions& options);

struct MachineChoice {
  std::string key;
  std::string value;   // as in a configuration file
  std::string reason;  // part of a sentence
};

struct ChosenOptions {
  RuntimeOptions runtime;              // device, ordinal and budgets are set
  std::vector<MachineChoice> choices;  // what was; without those that need no reason
};

// Pure. A number that is given stays.
ChosenOptions choose(const RuntimeOptions& options, const Machine& machine);
// A GPU's budget is taken at the start. Where it is part of a budget of both memories, this says how much it takes:
// what RuntimeOptions::device_arena_bytes says, or half. Pinned memory has the rest. Pure.
void divide_shared_memory(ChosenOptions& chosen);
ChosenOptions choose_for_this_machine(const RuntimeOptions& options);

}  // namespace hoist
