// SPDX-License-Identifier: Apache-2.0
// examples/gpt/model_block.cpp - one transformer block, there and back: attention, then feed-forward, each behind a
// norm and beside a residual.
#include "model_parts.hpp"

namespace hoist::gpt {

void Gpt::block_forward(int layer, std::size_t count) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  const auto index = static_cast<std::size_t>(layer);
  Lease lease = engine_->gather(block.unit, *stream_);
  const auto weights = block.of<BlockWeights>(lease);
  for (std::size_t m = 0; m < count; ++m) {
    const float* const input = inputs_->forward_input(index, m);
    float* const output = inputs_->output_for(index + 1, m, *stream_);
    enqueue("block", [this, index, m, weights, input, output] {
      const BlockActivations& kept = work_->kept[m].blocks[index];
      compute_to_wide(input, kept, weights);
      linear_forward(context(), {.x = work_->wide, .layer = weights.down, .residual = kept.middle, .y = output});
    });
    inputs_->leave(index, m, *stream_);
  }
  lease.release(*stream_);
}

void Gpt::block_backward(int layer, std::size_t count) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  const auto index = static_cast<std::size_t>(layer);
  Lease lease = engine_->gather(block.unit, *stream_);
  const auto weights = block.of<BlockWeights>(lease);
  const auto gradients = block.of<BlockGradients>(engine_->gradients(block.unit, *stream_));
  for (std::size_t m = 0; m < count; ++m) {
    const float* const input = inputs_->bring(index, m, *stream_);
    enqueue("block backward", [this, index, m, weights, gradients, input] {
      const Kept& kept = work_->kept[m];
      const BlockActivations& activations = kept.blocks[index];
      if (options_.activations == ActivationPolicy::keep) {
        norm_forward(
            context(),
            {.x = activations.middle, .layer = weights.norm2, .statistics = activations.norm2, .y = work_->normed});
        gelu_forward(pool_, activations.hidden, rows() * 4 * width(), work_->wide);
      } else {
        compute_to_wide(input, activations, weights);
      }
      feed_forward_backward(kept.gradient, activations, weights, gradients);
      attention_branch_backward(input, kept.gradient, activations, weights, gradients);
    });
  }
  lease.release(*stream_);
  engine_->finish(block.unit, *stream_);
}

// The block up to GELU: everything its backward pass needs, and all but one of the products of its forward pass.
void Gpt::compute_to_wide(const float* input, const BlockActivations& block, const BlockWeights& weights) {
  const Workspace& w = *work_;
  norm_forward(context(), {.x = input, .layer = weights.norm1, .statistics = block.norm1, .y = w.normed});
  linear_forward(context(), {.x = w.normed, .layer = weights.qkv, .y = block.qkv});
  attention_forward(pool_, attention_shape(), block.qkv, block.probabilities, block.mixed);
  linear_forward(context(), {.x = block.mixed, .layer = weights.out, .residual = input, .y = block.middle});
  norm_forward(context(), {.x = block.middle, .layer = weights.norm2, .statistics = block.norm2, .y = w.normed});
  linear_forward(context(), {.x = w.normed, .layer = weights.up, .y = block.hidden});
  gelu_forward(pool_, block.hidden, rows() * 4 * width(), w.wide);
}

// Takes the gradient from the block's output to the stream between attention and feed-forward.
void Gpt::feed_forward_backward(float* gradient, const BlockActivations& block, const BlockWeights& weights,
                                const BlockGradients& gradients) {
  const Workspace& w = *work_;
  linear_backward(context(),
                  {.x = w.wide, .dy = gradient, .layer = weights.down, .gradient = gradients.down, .dx = w.wide});
  gelu_backward(pool_, block.hidden, w.wide, rows() * 4 * width(), w.wide);
  linear_backward(context(),
                  {.x = w.normed, .dy = w.wide, .layer = weights.up, .gradient = gradients.up, .dx = w.gradient_part});
  norm_backward(context(), {.x = block.middle,
                            .dy = w.gradient_part,
                            .layer = weights.norm2,
                            .statistics = block.norm2,
                            .gradient = gradients.norm2,
                            .dx = gradient});
}

// Takes the gradient the rest of the way to the block's input.
void Gpt::attention_branch_backward(const float* input, float* gradient, const BlockActivations& block,
                                    const BlockWeights& weights, const BlockGradients& gradients) {
  const Workspace& w = *work_;
  linear_backward(
      context(),
      {.x = block.mixed, .dy = gradient, .layer = weights.out, .gradient = gradients.out, .dx = w.gradient_part});
  attention_backward(pool_, attention_shape(),
                     {.qkv = block.qkv,
                      .probabilities = block.probabilities,
                      .dy = w.gradient_part,
                      .scratch = w.attention_scratch,
                      .dqkv = w.wide});
  // Once more: its output made room for the second norm's.
  norm_forward(context(), {.x = input, .layer = weights.norm1, .statistics = block.norm1, .y = w.normed});
  linear_backward(
      context(), {.x = w.normed, .dy = w.wide, .layer = weights.qkv, .gradient = gradients.qkv, .dx = w.gradient_part});
  norm_backward(context(), {.x = input,
                            .dy = w.gradient_part,
                            .layer = weights.norm1,
                            .statistics = block.norm1,
                            .gradient = gradients.norm1,
                            .dx = gradient});
}

}  // namespace hoist::gpt
