// SPDX-License-Identifier: Apache-2.0
// examples/gpt/model_parts.hpp - what the sources of Gpt share: the ids of a block's parameters, where these and
// their gradients are while they are gathered, and the buffers of a pass.
//
// model.cpp declares the model and divides its memory, model_pass.cpp takes micro-batches through it, model_block.cpp
// is one transformer block.
#pragma once

#include <cstdint>
#include <vector>

#include "model.hpp"

namespace hoist::gpt {

// Where a gathered parameter is, or its gradient.
template <typename MatrixView>
MatrixView matrix_of(const TensorView& view) {
  return {view.data, view.dtype, view.shape[0], view.shape[1]};
}
inline float* floats_of(const TensorView& view) { return static_cast<float*>(view.data); }

// The parameters of a linear layer or of a norm.
struct Gpt::Layer {
  ParameterId weight{}, bias{};

  Linear linear(const Lease& lease) const {
    return {matrix_of<Matrix>(lease.view(weight)), floats_of(lease.view(bias))};
  }
  LinearGradient linear(const GradientLease& lease) const {
    return {matrix_of<GradientMatrix>(lease.view(weight)), floats_of(lease.view(bias))};
  }
  Norm norm(const Lease& lease) const {
    const TensorView view = lease.view(weight);
    return {floats_of(view), floats_of(lease.view(bias)), view.shape[0]};
  }
  NormGradient norm(const GradientLease& lease) const {
    return {floats_of(lease.view(weight)), floats_of(lease.view(bias))};
  }
};

struct Gpt::BlockWeights {
  Norm norm1, norm2;
  Linear qkv, out, up, down;
};
struct Gpt::BlockGradients {
  NormGradient norm1, norm2;
  LinearGradient qkv, out, up, down;
};

struct Gpt::Block {
  UnitId unit{};
  Layer norm1, qkv, out;  // qkv [3 * width, width], out [width, width]
  Layer norm2, up, down;  // up [4 * width, width], down [width, 4 * width]

  // BlockWeights of a Lease, BlockGradients of a GradientLease.
  template <typename Views, typename AnyLease>
  Views of(const AnyLease& lease) const {
    return {norm1.norm(lease), norm2.norm(lease), qkv.linear(lease),
            out.linear(lease), up.linear(lease),  down.linear(lease)};
  }
};

struct Gpt::BlockActivations {
  float* qkv = nullptr;            // [rows, 3 * width]
  float* probabilities = nullptr;  // [batch, heads, context, context]
  float* mixed = nullptr;          // [rows, width]: attention's output
  float* middle = nullptr;         // [rows, width]: after attention and its residual
  float* hidden = nullptr;         // [rows, 4 * width]: before GELU
  NormStatistics norm1, norm2;
};

struct Gpt::Kept {
  std::vector<BlockActivations> blocks;  // [layers]; computed again: every layer's are the same memory
  float* gradient = nullptr;             // [rows, width]: of the residual stream
  const std::uint8_t* tokens = nullptr;  // that the pass under way begins with
};

// Sizes are in values per row of activations unless said otherwise.
struct Gpt::Workspace {
  std::vector<Kept> kept;          // by micro-batch of the pass
  std::vector<float*> inputs;      // width each: what BlockInputs divides
  float* normed = nullptr;         // width
  float* wide = nullptr;           // 4 * width: after GELU; on the way back its gradient, then that of qkv
  float* gradient_part = nullptr;  // width: of one branch
  NormStatistics head_norm;
  float* row_loss = nullptr;           // 1
  float* logits = nullptr;             // kVocabulary; then their gradient
  float* attention_scratch = nullptr;  // [batch, heads, context, context]
  float* panel = nullptr;              // the largest weight matrix, in fp32
};

}  // namespace hoist::gpt
