// SPDX-License-Identifier: Apache-2.0
// cli/doctor/cgroup.hpp - what control groups, of version 1 or 2, allow this process.
//
// A limit anywhere between the process's own group and the root binds, so each is the smallest on that way.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "finding.hpp"

namespace hoist::cli {

struct CgroupLimits {
  struct Memory {
    std::uint64_t bytes = 0;
    std::string file;  // that says so
  };
  struct Cpu {
    double count = 0;  // processors' worth of time
    std::string file;
  };
  std::optional<Memory> memory;  // nothing: no limit that could be read
  std::optional<Cpu> cpu;
};

CgroupLimits cgroup_limits(const Machine& machine);

}  // namespace hoist::cli
