// SPDX-License-Identifier: Apache-2.0
// core/processors.hpp - the processors that threads may run on, as the kernel reports them.
#pragma once

#include <vector>

namespace hoist {

// Processor numbers, ascending.
using Processors = std::vector<int>;

// Those the calling thread may run on.
Processors current_processors();

// Binds the calling thread. False if the kernel refuses (there are none, or none of them is in the process's cpuset).
bool bind_current_thread(const Processors& processors);

}  // namespace hoist
