// SPDX-License-Identifier: Apache-2.0
// platform/detail/cuda_kernels.hpp - the C++ interface of cuda_kernels.cu. Each call enqueues one kernel and returns
// the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <hoist/platform/detail/kernel_arguments.hpp>

namespace hoist::platform::detail {

cudaError_t launch_kernel(const ScaleArguments& arguments, cudaStream_t stream);
cudaError_t launch_kernel(const NormArguments& arguments, cudaStream_t stream);
cudaError_t launch_kernel(const UpdateArguments& arguments, cudaStream_t stream);

// Loads the code of all of them, which the runtime would otherwise do at the first launch of each: with memory of the
// device, at a time when the program may have taken all of it. The first error, such as that of a GPU for which no code
// was built.
cudaError_t load_kernels();

}  // namespace hoist::platform::detail
