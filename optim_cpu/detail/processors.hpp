// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/processors.hpp - which processors threads may run on, as the kernel keeps it.
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

// Binds the calling thread. False when the kernel refuses (none of them is in the process's cpuset).
bool bind_current_thread(const Processors& processors);

// "0-3,8" -> 0 1 2 3 8, the kernel's list format. Empty when malformed.
Processors parse_processor_list(std::string_view list);

// The processors of a NUMA node; nullopt when the node does not exist. Node 0 is everything the calling thread may use
// where the kernel tells nothing about nodes.
std::optional<Processors> node_processors(int node, const std::string& sysfs_nodes = "/sys/devices/system/node");

}  // namespace hoist::optim::detail
