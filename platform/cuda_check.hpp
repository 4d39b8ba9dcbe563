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

// Makes the card current for a scope. An embedding program's choice is restored.
class CurrentCard {
 public:
  explicit CurrentCard(int ordinal);
  ~CurrentCard();
  CurrentCard(const CurrentCard&) = delete;
  CurrentCard& operator=(const CurrentCard&) = delete;

 private:
  int previous_ = -1;  // negative: nothing to restore
};

}  // namespace hoist::platform
