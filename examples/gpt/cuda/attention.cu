// SPDX-License-Identifier: Apache-2.0
// Which block of a card is which block of card/attention.hpp, and where its tiles lie.
#include <hoist/platform/cuda_launch.hpp>

#include "../card/attention.hpp"
#include "kernels.hpp"

namespace hoist::gpt::card {

namespace {

using platform::AsBf16;
using platform::AsFp16;

extern __shared__ __align__(16) unsigned char attention_shared[];

// Blocks that have the most to do begin first: those of the last queries, those of the first keys.
enum class First : std::uint8_t { first_block, last_block };
template <First kFirst>
__device__ AttentionPlace place() {
  return {blockIdx.z, blockIdx.y, kFirst == First::first_block ? blockIdx.x : gridDim.x - 1 - blockIdx.x};
}

template <typename As, unsigned kWidth>
__global__ void __launch_bounds__(kAttentionThreads) forward_kernel(Attention a) {
  CardTeam team;
  attention_forward_block<As, kWidth>(team, a, place<First::last_block>(),
                                      *reinterpret_cast<ForwardShared<kWidth>*>(attention_shared));
}
template <typename As, unsigned kWidth>
__global__ void __launch_bounds__(kAttentionThreads) backward_keys_kernel(Attention a) {
  CardTeam team;
  attention_backward_keys_block<As, kWidth>(team, a, place<First::first_block>(),
                                            *reinterpret_cast<KeysBackwardShared<kWidth>*>(attention_shared));
}
template <typename As, unsigned kWidth>
__global__ void __launch_bounds__(kAttentionThreads) backward_queries_kernel(Attention a) {
  CardTeam team;
  attention_backward_queries_block<As, kWidth>(team, a, place<First::last_block>(),
                                               *reinterpret_cast<QueriesBackwardShared<kWidth>*>(attention_shared));
}

// With more shared memory than a kernel may have unasked.
cudaError_t launch_blocks(void (*kernel)(Attention), std::size_t shared_bytes, const Attention& a,
                          cudaStream_t stream) {
  const cudaError_t code =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (code != cudaSuccess) return code;
  const dim3 grid((a.context + kBlockRows - 1) / kBlockRows, a.heads, a.batch);
  return platform::launch({grid, kAttentionThreads, stream, shared_bytes}, kernel, a);
}

template <typename As, unsigned kWidth>
cudaError_t forward(const Attention& a, cudaStream_t stream) {
  return launch_blocks(forward_kernel<As, kWidth>, sizeof(ForwardShared<kWidth>), a, stream);
}
template <typename As, unsigned kWidth>
cudaError_t backward(const Attention& a, cudaStream_t stream) {
  const cudaError_t code =
      launch_blocks(backward_keys_kernel<As, kWidth>, sizeof(KeysBackwardShared<kWidth>), a, stream);
  if (code != cudaSuccess) return code;
  return launch_blocks(backward_queries_kernel<As, kWidth>, sizeof(QueriesBackwardShared<kWidth>), a, stream);
}

}  // namespace

cudaError_t launch_attention(const ForwardAttention& kernel, DType activations, cudaStream_t stream) {
  const Attention& a = kernel.attention;
  if (activations == DType::bf16)
    return a.head_width == 64 ? forward<AsBf16, 64>(a, stream) : forward<AsBf16, 128>(a, stream);
  return a.head_width == 64 ? forward<AsFp16, 64>(a, stream) : forward<AsFp16, 128>(a, stream);
}

cudaError_t launch_attention(const BackwardAttention& kernel, DType activations, cudaStream_t stream) {
  const Attention& a = kernel.attention;
  if (activations == DType::bf16)
    return a.head_width == 64 ? backward<AsBf16, 64>(a, stream) : backward<AsBf16, 128>(a, stream);
  return a.head_width == 64 ? backward<AsFp16, 64>(a, stream) : backward<AsFp16, 128>(a, stream);
}

}  // namespace hoist::gpt::card
