// SPDX-License-Identifier: Apache-2.0
// platform/cuda_check.hpp - for programs with kernels of their own: CUDA's return codes as errors, and the current
// card. Only where hoist was built with CUDA.
//
// Threading  Any thread.
// Errors     DeviceError with the call's name, CUDA's code and a remedy.
#pragma once

#include <cuda_runtime_api.h>

namespace hoist::platform {

// Throws DeviceError unless `code` is success. `call` names the CUDA function, or the kernel.
void cuda_check(cudaError_t code, const char* call);

// Makes the card current for a scope, and what is called there no business of a CUDA graph that another thread is
// capturing: asking an event, of whichever stream, would else break a capture in the usual, global mode, and fail. What
// the thread had is restored.
//
// Around every call, also those that take an event or a stream of another card: on a thread that never chose a card,
// they would make a context on card 0.
class CurrentCard {
 public:
  explicit CurrentCard(int ordinal);
  ~CurrentCard();
  CurrentCard(const CurrentCard&) = delete;
  CurrentCard& operator=(const CurrentCard&) = delete;

 private:
  int previous_ = -1;                                              // negative: nothing to restore
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeThreadLocal;  // the thread's own, meanwhile
};

}  // namespace hoist::platform
