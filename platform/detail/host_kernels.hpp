// SPDX-License-Identifier: Apache-2.0
// platform/detail/host_kernels.hpp - kernels of the host device: they run on one thread and give the same bits as a
// GPU's.
//
// Each runs in a FloatEnvironment of its own: a stream's worker inherits the environment of the thread that made it.
#pragma once

#include <hoist/platform/detail/kernel_arguments.hpp>

namespace hoist::platform::detail {

void scale_on_host(const ScaleArguments& arguments);
void sums_of_squares_on_host(const NormArguments& arguments);
void update_on_host(const UpdateArguments& arguments);

}  // namespace hoist::platform::detail
