// SPDX-License-Identifier: Apache-2.0
// platform/control_groups.hpp - what the control groups of this process, of version 1 or 2, allow it.
//
// A limit applies anywhere between the process's own group and the root, so each value is the smallest on that path.
//
// Threading  Any.
// Errors     None: what cannot be read is no limit.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace hoist::platform {

struct ControlGroupLimits {
  struct Memory {
    std::uint64_t bytes = 0;
    std::string file;  // the file with the limit
  };
  struct Cpu {
    double count = 0;  // processors' worth of time
    std::string file;
  };
  // memory.high is a limit, too: beyond it the kernel slows processes down.
  std::optional<Memory> memory;
  // What is left below the limits; cache of files that the kernel drops first counts as left.
  std::optional<std::uint64_t> free_memory_bytes;
  std::optional<Cpu> cpu;
  std::optional<unsigned> processors;  // how many the process may be moved to
};

// `proc`: the root of procfs.
ControlGroupLimits control_group_limits(const std::filesystem::path& proc = "/proc");

// Processors of the machine, within these limits. A launcher may have bound the process to fewer.
unsigned processor_count(const ControlGroupLimits& limits = control_group_limits());

}  // namespace hoist::platform
