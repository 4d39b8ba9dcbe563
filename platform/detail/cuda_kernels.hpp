// SPDX-License-Identifier: Apache-2.0
// platform/detail/cuda_kernels.hpp - what cuda_kernels.cu offers to C++; plain C++17, since nvcc reads it too.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace hoist::platform::detail {

// Numbers of hoist::DType.
enum class KernelDType : std::uint8_t { bf16 = 0, fp16 = 1, fp32 = 2 };

struct ScaleKernelArguments {
  void* target;
  KernelDType target_dtype;
  const void* source;
  KernelDType source_dtype;
  std::uint64_t count;
  float scale;
  bool add;
};

// Stream::scale_into. Returns the launch's error.
cudaError_t launch_scale(const ScaleKernelArguments& arguments, cudaStream_t stream);

}  // namespace hoist::platform::detail
