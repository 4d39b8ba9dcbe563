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

template <typename MatrixView>
MatrixView matrix_of(const TensorView& view) {
  return {view.data, view.dtype, view.shape[0], view.shape[1]};
}
inline float* floats_of(const TensorView& view) { return static_cast<float*>(view.data); }

struct Gpt::Block {
  UnitId unit{};
  ParameterId norm1_weight{}, norm1_bias{};
  ParameterId qkv_weight{}, qkv_bias{};  // [3 * width, width]
  ParameterId out_weight{}, out_bias{};  // [width, width]
  ParameterId norm2_weight{}, norm2_bias{};
  ParameterId up_weight{}, up_bias{};      // [4 * width, width]
  ParameterId down_weight{}, down_bias{};  // [width, 4 * width]
};

// A block's parameters where they were gathered (const float*, Matrix), or their gradients (float*, GradientMatrix).
template <typename Floats, typename MatrixView>
struct Gpt::BlockViews {
  template <typename AnyLease>
  BlockViews(const Block& block, const AnyLease& lease)
      : norm1_weight(floats_of(lease.view(block.norm1_weight))),
        norm1_bias(floats_of(lease.view(block.norm1_bias))),
        norm2_weight(floats_of(lease.view(block.norm2_weight))),
        norm2_bias(floats_of(lease.view(block.norm2_bias))),
        qkv(matrix_of<MatrixView>(lease.view(block.qkv_weight))),
        out(matrix_of<MatrixView>(lease.view(block.out_weight))),
        up(matrix_of<MatrixView>(lease.view(block.up_weight))),
        down(matrix_of<MatrixView>(lease.view(block.down_weight))),
        qkv_bias(floats_of(lease.view(block.qkv_bias))),
        out_bias(floats_of(lease.view(block.out_bias))),
        up_bias(floats_of(lease.view(block.up_bias))),
        down_bias(floats_of(lease.view(block.down_bias))) {}

  Floats norm1_weight, norm1_bias, norm2_weight, norm2_bias;
  MatrixView qkv, out, up, down;
  Floats qkv_bias, out_bias, up_bias, down_bias;
};

struct Gpt::BlockActivations {
  float* qkv = nullptr;            // [rows, 3 * width]
  float* probabilities = nullptr;  // [batch, heads, context, context]
  float* mixed = nullptr;          // [rows, width]: attention's output
  float* middle = nullptr;         // [rows, width]: after attention and its residual
  float* hidden = nullptr;         // [rows, 4 * width]: before GELU
  float* mean1 = nullptr;          // [rows], as are the next three
  float* inverse_dev1 = nullptr;
  float* mean2 = nullptr;
  float* inverse_dev2 = nullptr;
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
  float* mean = nullptr;           // 1: of the head's norm, as the next one
  float* inverse_dev = nullptr;
  float* row_loss = nullptr;           // 1
  float* logits = nullptr;             // kVocabulary; then their gradient
  float* attention_scratch = nullptr;  // [batch, heads, context, context]
  float* panel = nullptr;              // the largest weight matrix, in fp32
};

}  // namespace hoist::gpt
