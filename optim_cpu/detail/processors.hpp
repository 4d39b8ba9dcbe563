// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/processors.hpp - the processors that threads may run on, by the kernel's record.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sched.h>

namespace hoist::optim::detail {

// Processor numbers, ascending.
using Processors = std::vector<int>;

// Those the calling thread may run on.
Processors current_processors();

// Binds the calling thread. False if the kernel refuses (none of them is in the process's cpuset).
bool bind_current_thread(const Processors& processors);

// "0-3,8" -> 0 1 2 3 8, the kernel's list format. Empty when malformed.
Processors parse_processor_list(std::string_view list);

// The processors of a NUMA node; nullopt if the node does not exist. If the kernel has no information about nodes, node
// 0 is everything that the calling thread may use.
std::optional<Processors> node_processors(int node, const std::string& sysfs_nodes = "/sys/devices/system/node");

}  // namespace hoist::optim::detail
