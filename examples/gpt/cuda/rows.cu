// SPDX-License-Identifier: Apache-2.0
// Which thread of a card is which thread of card/rows.hpp.
#include <algorithm>

#include <hoist/platform/cuda_launch.hpp>

#include "../card/rows.hpp"
#include "kernels.hpp"

namespace hoist::gpt::card {

namespace {

using platform::AsBf16;
using platform::AsFp16;

constexpr unsigned kThreads = 256;
constexpr std::uint64_t kBlocksMax = 4096;  // about 30 per multiprocessor of a large card; the stride does the rest

__device__ Place place() {
  return {static_cast<std::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
          static_cast<std::uint64_t>(gridDim.x) * blockDim.x};
}
unsigned blocks_for(std::uint64_t threads) {
  return static_cast<unsigned>(std::clamp((threads + kThreads - 1) / kThreads, std::uint64_t{1}, kBlocksMax));
}
unsigned blocks_of_rows(std::uint64_t rows) {
  return static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock);
}

template <typename As>
__global__ void __launch_bounds__(kThreads) finish_linear_kernel(FinishLinear a) {
  finish_linear_thread<As>(a, place());
}
template <typename As>
__global__ void __launch_bounds__(kThreads) gelu_kernel(Gelu a) {
  gelu_thread<As>(a, place());
}
template <typename As>
__global__ void __launch_bounds__(kThreads) cast_weights_kernel(CastWeights a) {
  cast_weights_thread<As>(a, place());
}
template <typename As, typename Weight>
__global__ void __launch_bounds__(kThreads) embed_kernel(Embed a) {
  embed_thread<As, Weight>(a, place());
}
template <typename As>
__global__ void __launch_bounds__(kThreads) one_hot_kernel(OneHot a) {
  one_hot_thread<As>(a, place());
}
template <typename As, typename Gradient>
__global__ void __launch_bounds__(kThreads) position_gradient_kernel(PositionGradient a) {
  position_gradient_thread<As, Gradient>(a, place());
}
template <typename As>
__global__ void __launch_bounds__(kRowThreads) norm_forward_kernel(NormForward a) {
  CardTeam team;
  norm_forward_block<As>(team, a, blockIdx.x);
}
template <typename As>
__global__ void __launch_bounds__(kRowThreads) norm_backward_kernel(NormBackward a) {
  CardTeam team;
  norm_backward_block<As>(team, a, blockIdx.x);
}
template <typename As, bool kNorm>
__global__ void __launch_bounds__(kRowThreads) column_sums_kernel(ColumnSums a) {
  __shared__ ColumnSumsShared<kNorm> shared;
  CardTeam team;
  column_sums_block<As, kNorm>(team, a, blockIdx.x, blockIdx.y, shared);
}
__global__ void __launch_bounds__(kThreads) add_slices_kernel(ColumnSums a) { add_slices_thread(a, place()); }
template <typename As>
__global__ void __launch_bounds__(kRowThreads) cross_entropy_kernel(CrossEntropyRows a) {
  CardTeam team;
  cross_entropy_block<As>(team, a, blockIdx.x);
}
__global__ void __launch_bounds__(kRowThreads) mean_kernel(Mean a) {
  __shared__ double shared[kRowThreads];
  CardTeam team;
  mean_block(team, a, shared);
}
template <typename As>
__global__ void __launch_bounds__(kRowThreads) attention_delta_kernel(Attention a) {
  CardTeam team;
  attention_delta_block<As>(team, a, blockIdx.x);
}

// A launch for each kind of arguments.
template <typename As>
struct Launch {
  cudaStream_t stream;

  // By packs of 8 values, or by rows.
  template <typename Arguments>
  cudaError_t packs(std::uint64_t values, void (*kernel)(Arguments), const Arguments& a) const {
    return platform::launch({blocks_for(values / kPack), kThreads, stream}, kernel, a);
  }
  template <typename Arguments>
  cudaError_t rows(std::uint64_t count, void (*kernel)(Arguments), const Arguments& a) const {
    return platform::launch({blocks_of_rows(count), kRowThreads, stream}, kernel, a);
  }

  cudaError_t operator()(const FinishLinear& a) const { return packs(a.rows * a.columns, finish_linear_kernel<As>, a); }
  cudaError_t operator()(const Gelu& a) const { return packs(a.count, gelu_kernel<As>, a); }
  cudaError_t operator()(const CastWeights& a) const { return packs(a.count, cast_weights_kernel<As>, a); }
  cudaError_t operator()(const Embed& a) const {
    return packs(a.rows * a.width, a.weight_dtype == DType::fp32 ? embed_kernel<As, AsFp32> : embed_kernel<As, As>, a);
  }
  cudaError_t operator()(const OneHot& a) const { return packs(a.rows * a.classes, one_hot_kernel<As>, a); }
  cudaError_t operator()(const PositionGradient& a) const {
    const bool is_fp32 = a.gradient_dtype == DType::fp32;
    return packs(a.context * a.width, is_fp32 ? position_gradient_kernel<As, AsFp32> : position_gradient_kernel<As, As>,
                 a);
  }
  cudaError_t operator()(const NormForward& a) const { return rows(a.rows, norm_forward_kernel<As>, a); }
  cudaError_t operator()(const NormBackward& a) const { return rows(a.rows, norm_backward_kernel<As>, a); }
  cudaError_t operator()(const ColumnSums& a) const {
    const dim3 grid(static_cast<unsigned>((a.columns + kColumnsPerBlock - 1) / kColumnsPerBlock),
                    static_cast<unsigned>(a.slices()));
    const cudaError_t code = platform::launch(
        {grid, kRowThreads, stream}, a.x != nullptr ? column_sums_kernel<As, true> : column_sums_kernel<As, false>, a);
    if (code != cudaSuccess) return code;
    return platform::launch({blocks_for(a.columns), kThreads, stream}, add_slices_kernel, a);
  }
  cudaError_t operator()(const CrossEntropyRows& a) const { return rows(a.rows, cross_entropy_kernel<As>, a); }
  cudaError_t operator()(const Mean& a) const { return platform::launch({1, kRowThreads, stream}, mean_kernel, a); }
  cudaError_t operator()(const ForwardAttention&) const { return cudaSuccess; }  // attention.cu's
  cudaError_t operator()(const BackwardAttention&) const { return cudaSuccess; }
};

}  // namespace

cudaError_t launch_rows(const Kernel& kernel, DType activations, cudaStream_t stream) {
  if (activations == DType::bf16) return std::visit(Launch<AsBf16>{stream}, kernel);
  return std::visit(Launch<AsFp16>{stream}, kernel);
}

cudaError_t launch_attention_delta(const Attention& a, DType activations, cudaStream_t stream) {
  const unsigned blocks = blocks_of_rows(std::uint64_t{a.batch} * a.context * a.heads);
  return platform::launch({blocks, kRowThreads, stream},
                          activations == DType::bf16 ? attention_delta_kernel<AsBf16> : attention_delta_kernel<AsFp16>,
                          a);
}

}  // namespace hoist::gpt::card
