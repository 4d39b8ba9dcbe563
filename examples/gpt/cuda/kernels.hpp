// SPDX-License-Identifier: Apache-2.0
// examples/gpt/cuda/kernels.hpp - what the .cu files offer to C++. Each call enqueues a kernel, or a few, and returns
// the first error of their launches.
#pragma once

#include <cuda_runtime_api.h>

#include "../card/card.hpp"

namespace hoist::gpt::card {

// All but attention.
cudaError_t launch_rows(const Kernel& kernel, DType activations, cudaStream_t stream);
cudaError_t launch_attention(const ForwardAttention& kernel, DType activations, cudaStream_t stream);
cudaError_t launch_attention(const BackwardAttention& kernel, DType activations, cudaStream_t stream);
// The kernel of BackwardAttention that is of rows.
cudaError_t launch_attention_delta(const Attention& attention, DType activations, cudaStream_t stream);

}  // namespace hoist::gpt::card
