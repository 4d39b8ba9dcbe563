// SPDX-License-Identifier: Apache-2.0
#include "operations.hpp"

#include <hoist/core/error.hpp>
#include <hoist/zero/runtime.hpp>

#include "host_operations.hpp"
#ifdef HOIST_GPT_CUDA
#include "cuda/cuda_card.hpp"
#endif

namespace hoist::gpt {

std::unique_ptr<Operations> Operations::create(Runtime& runtime, platform::Stream& stream,
                                               const OperationsOptions& options) {
  if (runtime.device().kind() == platform::DeviceKind::host) return std::make_unique<HostOperations>(stream, options);
#ifdef HOIST_GPT_CUDA
  return make_cuda_operations(runtime, stream, options);
#else
  throw UsageError(
      "this hoist-gpt has no kernels for a CUDA device: build it with the CUDA Toolkit and cuBLASLt installed "
      "(HOIST_WITH_CUDA=ON says what is missing), or choose the host device (--device host)");
#endif
}

}  // namespace hoist::gpt
