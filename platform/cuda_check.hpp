// SPDX-License-Identifier: Apache-2.0
// platform/cuda_check.hpp - for programs with their own kernels: CUDA's return codes as errors, and the current GPU.
// Only if hoist was built with CUDA.
//
// Threading  Any thread.
// Errors     DeviceError with the call's name, CUDA's code and a remedy.
#pragma once

#include <cuda_runtime_api.h>

namespace hoist::platform {

// Throws DeviceError unless `code` is success. `call` names the CUDA function, or the kernel.
void cuda_check(cudaError_t code, const char* call);

// Makes the GPU current for a scope, and keeps calls in it out of a CUDA graph that another thread is capturing.
// Otherwise querying any stream's event would break a capture in the usual, global mode, and fail. The destructor
// restores the thread's settings.
//
// Use it around every call, also those that take an event or a stream of another GPU: on a thread that never chose a
// GPU, they would make a context on GPU 0.
class CurrentGpu {
 public:
  explicit CurrentGpu(int ordinal);
  ~CurrentGpu();
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int previous_ = -1;                                              // negative: nothing to restore
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeThreadLocal;  // the thread's own setting, to restore
};

}  // namespace hoist::platform
