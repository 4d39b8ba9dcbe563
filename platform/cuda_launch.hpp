// SPDX-License-Identifier: Apache-2.0
// platform/cuda_launch.hpp - starts a kernel, for files that nvcc compiles. Only if hoist was built with CUDA.
//
// After `<<<>>>` an error can only be queried with cudaGetLastError(). It returns the error of any earlier call on this
// thread, the embedding program's included, and clears it. An event of the program that was not ready would look like a
// failed kernel of hoist.
//
// Threading  Any thread, with the stream's GPU current.
// Errors     The launch's own code.
#pragma once

#include <cuda_runtime.h>

namespace hoist::platform {

struct LaunchShape {
  dim3 blocks;
  dim3 threads;
  cudaStream_t stream = nullptr;
};

// Pre: the arguments convert to the kernel's parameters.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const LaunchShape& shape, void (*kernel)(Parameters...), const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.stream = shape.stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace hoist::platform
