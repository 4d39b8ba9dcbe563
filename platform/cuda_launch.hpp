// SPDX-License-Identifier: Apache-2.0
// platform/cuda_launch.hpp - starting a kernel, for files that nvcc compiles. Only where hoist was built with CUDA.
//
// After `<<<>>>` an error can only be asked for with cudaGetLastError(), which answers with whatever any earlier call
// on this thread left behind, the embedding program's included, and takes it away from who looks for it: an event of
// theirs that was not ready would be a kernel of ours that failed.
//
// Threading  Any thread, with the stream's card current.
// Errors     The launch's own code.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

namespace hoist::platform {

struct LaunchShape {
  dim3 blocks;
  dim3 threads;
  cudaStream_t stream = nullptr;
  std::size_t shared_bytes = 0;  // beside what the kernel declares
};

// Pre: the arguments convert to the kernel's parameters.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const LaunchShape& shape, void (*kernel)(Parameters...), const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.blocks;
  config.blockDim = shape.threads;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace hoist::platform
