// SPDX-License-Identifier: Apache-2.0
// optim_cpu/detail/processors.hpp - the processors that threads may run on, by the kernel's record.
#pragma once

#include <vector>

#include <sched.h>

namespace hoist::optim::detail {

// Processor numbers, ascending.
using Processors = std::vector<int>;

// Those the calling thread may run on.
Processors current_processors();

// Binds the calling thread. False if the kernel refuses (none of them is in the process's cpuset).
bool bind_current_thread(const Processors& processors);

}  // namespace hoist::optim::detail
