// SPDX-License-Identifier: Apache-2.0
// Kernels of the CUDA device: kernel_bodies.hpp under wrappers that provide the thread's index. CMakeLists.txt sets the
// compile flags that their bits depend on.
#include <algorithm>

#include <hoist/platform/cuda_launch.hpp>
#include <hoist/platform/detail/cuda_kernels.hpp>
#include <hoist/platform/detail/kernel_bodies.hpp>

namespace hoist::platform::detail {

namespace {

constexpr unsigned kThreads = 256;
constexpr std::uint64_t kBlocksMax = 4096;  // about 30 per multiprocessor of a large GPU; the stride covers the rest

// Blocks for as many threads as there are items of work, and at least one.
unsigned blocks_for(std::uint64_t threads) {
  return static_cast<unsigned>(std::clamp((threads + kThreads - 1) / kThreads, std::uint64_t{1}, kBlocksMax));
}
unsigned blocks_for(const PackSpan& span, std::uint64_t count) {
  return blocks_for(std::max(span.packs, rest_of(span, count)));
}

__device__ ThreadPlace place() {
  return {static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
          static_cast<std::uint64_t>(gridDim.x) * blockDim.x};
}

template <typename Target, typename Source, bool kAdd>
__global__ void __launch_bounds__(kThreads) scale_kernel(ScaleArguments a, PackSpan span) {
  scale_thread<Target, Source, kAdd>(a, span, place());
}

template <typename Source>
__global__ void __launch_bounds__(kNormThreads) norm_kernel(NormArguments a, std::uint64_t chunks) {
  __shared__ double lanes[kNormThreads];
  const std::uint64_t stride = kNormChunksPerBlock * gridDim.x;
  for (std::uint64_t first = kNormChunksPerBlock * blockIdx.x; first < chunks; first += stride) {
    lanes[threadIdx.x] = lane_of_chunk<Source>(a, first, threadIdx.x);
    __syncthreads();
    finish_chunk(a, first, threadIdx.x, lanes);
    __syncthreads();
  }
}

template <typename Masters, typename Moments, typename Gradient>
__global__ void __launch_bounds__(kThreads) update_kernel(UpdateArguments a, PackSpan span) {
  update_thread<Masters, Moments, Gradient>(a.factors, a.arrays, span, place());
}

// Asking for a kernel's attributes loads it. `failed` is the first error.
template <typename... Parameters>
void load(cudaError_t& failed, void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  const cudaError_t code = cudaFuncGetAttributes(&attributes, kernel);
  if (failed == cudaSuccess) failed = code;
}

}  // namespace

cudaError_t launch_kernel(const ScaleArguments& a, cudaStream_t stream) {
  const PackSpan span = pack_span(a);
  return with_scale_types(a, [&](auto target, auto source, auto add) {
    return launch({blocks_for(span, a.count), kThreads, stream},
                  scale_kernel<decltype(target), decltype(source), decltype(add)::value>, a, span);
  });
}

cudaError_t launch_kernel(const NormArguments& a, cudaStream_t stream) {
  const std::uint64_t chunks = (a.count + kNormChunkElements - 1) / kNormChunkElements;
  const std::uint64_t blocks = std::min((chunks + kNormChunksPerBlock - 1) / kNormChunksPerBlock, kBlocksMax);
  return with_elements(a.dtype, [&](auto source) {
    return launch({static_cast<unsigned>(blocks), kNormThreads, stream}, norm_kernel<decltype(source)>, a, chunks);
  });
}

cudaError_t launch_kernel(const UpdateArguments& a, cudaStream_t stream) {
  const PackSpan span = pack_span(a.arrays);
  return with_update_types(a.arrays, [&](auto masters, auto moments, auto gradient) {
    return launch({blocks_for(span, a.arrays.count), kThreads, stream},
                  update_kernel<decltype(masters), decltype(moments), decltype(gradient)>, a, span);
  });
}

cudaError_t load_kernels() {
  cudaError_t failed = cudaSuccess;
  constexpr DType kAll[] = {DType::bf16, DType::fp16, DType::fp32};
  for (const DType first : kAll) {
    with_elements(first, [&](auto source) { load(failed, norm_kernel<decltype(source)>); });
    for (const DType second : kAll) {
      for (const bool flag : {false, true}) {
        with_scale_types({.target_dtype = first, .source_dtype = second, .add = flag},
                         [&](auto target, auto source, auto add) {
                           load(failed, scale_kernel<decltype(target), decltype(source), decltype(add)::value>);
                         });
        with_update_types(
            {.weights_dtype = first, .moment_dtype = flag ? DType::bf16 : DType::fp32, .gradient_dtype = second},
            [&](auto masters, auto moments, auto gradient) {
              load(failed, update_kernel<decltype(masters), decltype(moments), decltype(gradient)>);
            });
      }
    }
  }
  return failed;
}

}  // namespace hoist::platform::detail
