// SPDX-License-Identifier: Apache-2.0
// cli/doctor/cgroup.hpp - the limits of control groups, of version 1 or 2, on this process.
//
// A limit applies anywhere between the process's own group and the root, so each value is the smallest on that path.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "finding.hpp"

namespace hoist::cli {

struct CgroupLimits {
  struct Memory {
    std::uint64_t bytes = 0;
    std::string file;  // the file with the limit
  };
  struct Cpu {
    double count = 0;  // processors' worth of time
    std::string file;
  };
  std::optional<Memory> memory;  // nullopt: no readable limit
  std::optional<Cpu> cpu;
};

CgroupLimits cgroup_limits(const Machine& machine);

}  // namespace hoist::cli
