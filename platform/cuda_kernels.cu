// SPDX-License-Identifier: Apache-2.0
// Kernels of the CUDA device. Compiled without -use_fast_math and with -fmad=false: product and sum round separately
// and denormals are kept, so the results are the host device's bit for bit.
#include <algorithm>

#include <cuda_fp16.h>

#include <hoist/platform/detail/cuda_kernels.hpp>

namespace hoist::platform::detail {

namespace {

struct AsBf16 {
  using Stored = std::uint16_t;
  static __device__ float load(Stored value) { return __uint_as_float(static_cast<std::uint32_t>(value) << 16); }
  // hoist::to_bf16: halves away from zero, by integers; the hardware conversion rounds halves to even.
  static __device__ Stored store(float value) {
    const std::uint32_t bits = __float_as_uint(value);
    const std::uint32_t quiet = (bits >> 16) | 0x0040u;
    const std::uint32_t rounded = (bits + 0x8000u) >> 16;
    return static_cast<Stored>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
  }
};

struct AsFp16 {
  using Stored = __half;
  static __device__ float load(Stored value) { return __half2float(value); }
  static __device__ Stored store(float value) { return __float2half_rn(value); }
};

struct AsFp32 {
  using Stored = float;
  static __device__ float load(Stored value) { return value; }
  static __device__ Stored store(float value) { return value; }
};

// No __restrict__: scaling in place is allowed.
template <typename Target, typename Source, bool kAdd>
__global__ void scale_kernel(typename Target::Stored* target, const typename Source::Stored* source,
                             std::uint64_t count, float scale) {
  const std::uint64_t stride = static_cast<std::uint64_t>(gridDim.x) * blockDim.x;
  for (std::uint64_t i = static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    const float product = scale * Source::load(source[i]);
    target[i] = Target::store(kAdd ? Target::load(target[i]) + product : product);
  }
}

template <typename Target, typename Source>
cudaError_t launch(const ScaleKernelArguments& a, cudaStream_t stream) {
  constexpr unsigned kThreads = 256;
  constexpr std::uint64_t kBlocksMax = 4096;  // about 30 per multiprocessor of a large card; the stride does the rest
  const std::uint64_t wanted = (a.count + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::min(wanted, kBlocksMax));
  auto* target = static_cast<typename Target::Stored*>(a.target);
  const auto* source = static_cast<const typename Source::Stored*>(a.source);
  if (a.add) {
    scale_kernel<Target, Source, true><<<blocks, kThreads, 0, stream>>>(target, source, a.count, a.scale);
  } else {
    scale_kernel<Target, Source, false><<<blocks, kThreads, 0, stream>>>(target, source, a.count, a.scale);
  }
  return cudaGetLastError();
}

template <typename Target>
cudaError_t launch_to(const ScaleKernelArguments& a, cudaStream_t stream) {
  switch (a.source_dtype) {
    case KernelDType::bf16:
      return launch<Target, AsBf16>(a, stream);
    case KernelDType::fp16:
      return launch<Target, AsFp16>(a, stream);
    case KernelDType::fp32:
      return launch<Target, AsFp32>(a, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_scale(const ScaleKernelArguments& a, cudaStream_t stream) {
  switch (a.target_dtype) {
    case KernelDType::bf16:
      return launch_to<AsBf16>(a, stream);
    case KernelDType::fp16:
      return launch_to<AsFp16>(a, stream);
    case KernelDType::fp32:
      return launch_to<AsFp32>(a, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace hoist::platform::detail
