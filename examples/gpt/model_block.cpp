// SPDX-License-Identifier: Apache-2.0
// examples/gpt/model_block.cpp - one transformer block, there and back: attention, then feed-forward, each behind a
// norm and beside a residual.
#include "model_parts.hpp"

namespace hoist::gpt {

void Gpt::block_forward(int layer, std::size_t count) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  const auto index = static_cast<std::size_t>(layer);
  Lease lease = engine_->gather(block.unit, *stream_);
  const BlockWeights weights(block, lease);
  for (std::size_t m = 0; m < count; ++m) {
    const float* const input = inputs_->forward_input(index, m);
    float* const output = inputs_->output_for(index + 1, m, *stream_);
    enqueue("block", [this, index, m, weights, input, output] {
      const BlockActivations& kept = work_->kept[m].blocks[index];
      compute_to_wide(input, kept, weights);
      linear_forward(pool_, {.rows = rows(),
                             .x = work_->wide,
                             .weight = weights.down,
                             .bias = weights.down_bias,
                             .residual = kept.middle,
                             .panel = work_->panel,
                             .y = output});
    });
    inputs_->leave(index, m, *stream_);
  }
  lease.release(*stream_);
}

void Gpt::block_backward(int layer, std::size_t count) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  const auto index = static_cast<std::size_t>(layer);
  Lease lease = engine_->gather(block.unit, *stream_);
  const BlockWeights weights(block, lease);
  const BlockGradients gradients(block, engine_->gradients(block.unit, *stream_));
  for (std::size_t m = 0; m < count; ++m) {
    const float* const input = inputs_->bring(index, m, *stream_);
    enqueue("block backward", [this, index, m, weights, gradients, input] {
      const Kept& kept = work_->kept[m];
      const BlockActivations& activations = kept.blocks[index];
      if (options_.activations == ActivationPolicy::keep) {
        second_norm(activations, weights);
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
  first_norm(input, block, weights);
  linear_forward(pool_, {.rows = rows(),
                         .x = w.normed,
                         .weight = weights.qkv,
                         .bias = weights.qkv_bias,
                         .panel = w.panel,
                         .y = block.qkv});
  attention_forward(pool_, attention_shape(), block.qkv, block.probabilities, block.mixed);
  linear_forward(pool_, {.rows = rows(),
                         .x = block.mixed,
                         .weight = weights.out,
                         .bias = weights.out_bias,
                         .residual = input,
                         .panel = w.panel,
                         .y = block.middle});
  second_norm(block, weights);
  linear_forward(pool_, {.rows = rows(),
                         .x = w.normed,
                         .weight = weights.up,
                         .bias = weights.up_bias,
                         .panel = w.panel,
                         .y = block.hidden});
  gelu_forward(pool_, block.hidden, rows() * 4 * width(), w.wide);
}

void Gpt::first_norm(const float* input, const BlockActivations& block, const BlockWeights& weights) {
  layer_norm_forward(pool_, {.rows = rows(),
                             .width = width(),
                             .x = input,
                             .weight = weights.norm1_weight,
                             .bias = weights.norm1_bias,
                             .mean = block.mean1,
                             .inverse_dev = block.inverse_dev1,
                             .y = work_->normed});
}

void Gpt::second_norm(const BlockActivations& block, const BlockWeights& weights) {
  layer_norm_forward(pool_, {.rows = rows(),
                             .width = width(),
                             .x = block.middle,
                             .weight = weights.norm2_weight,
                             .bias = weights.norm2_bias,
                             .mean = block.mean2,
                             .inverse_dev = block.inverse_dev2,
                             .y = work_->normed});
}

// Takes the gradient from the block's output to the stream between attention and feed-forward.
void Gpt::feed_forward_backward(float* gradient, const BlockActivations& block, const BlockWeights& weights,
                                const BlockGradients& gradients) {
  const Workspace& w = *work_;
  linear_backward_weight(pool_, {.rows = rows(),
                                 .dy = gradient,
                                 .x = w.wide,
                                 .gradient = gradients.down,
                                 .bias_gradient = gradients.down_bias,
                                 .panel = w.panel});
  linear_backward_input(pool_,
                        {.rows = rows(), .dy = gradient, .weight = weights.down, .panel = w.panel, .dx = w.wide});
  gelu_backward(pool_, block.hidden, w.wide, rows() * 4 * width(), w.wide);
  linear_backward_weight(pool_, {.rows = rows(),
                                 .dy = w.wide,
                                 .x = w.normed,
                                 .gradient = gradients.up,
                                 .bias_gradient = gradients.up_bias,
                                 .panel = w.panel});
  linear_backward_input(pool_,
                        {.rows = rows(), .dy = w.wide, .weight = weights.up, .panel = w.panel, .dx = w.gradient_part});
  layer_norm_backward(pool_, {.rows = rows(),
                              .width = width(),
                              .dy = w.gradient_part,
                              .x = block.middle,
                              .weight = weights.norm2_weight,
                              .mean = block.mean2,
                              .inverse_dev = block.inverse_dev2,
                              .dx = gradient,
                              .weight_gradient = gradients.norm2_weight,
                              .bias_gradient = gradients.norm2_bias});
}

// Takes the gradient the rest of the way to the block's input.
void Gpt::attention_branch_backward(const float* input, float* gradient, const BlockActivations& block,
                                    const BlockWeights& weights, const BlockGradients& gradients) {
  const Workspace& w = *work_;
  linear_backward_weight(pool_, {.rows = rows(),
                                 .dy = gradient,
                                 .x = block.mixed,
                                 .gradient = gradients.out,
                                 .bias_gradient = gradients.out_bias,
                                 .panel = w.panel});
  linear_backward_input(
      pool_, {.rows = rows(), .dy = gradient, .weight = weights.out, .panel = w.panel, .dx = w.gradient_part});
  attention_backward(pool_, attention_shape(),
                     {.qkv = block.qkv,
                      .probabilities = block.probabilities,
                      .dy = w.gradient_part,
                      .scratch = w.attention_scratch,
                      .dqkv = w.wide});
  first_norm(input, block, weights);  // its output made room for the second norm's
  linear_backward_weight(pool_, {.rows = rows(),
                                 .dy = w.wide,
                                 .x = w.normed,
                                 .gradient = gradients.qkv,
                                 .bias_gradient = gradients.qkv_bias,
                                 .panel = w.panel});
  linear_backward_input(pool_,
                        {.rows = rows(), .dy = w.wide, .weight = weights.qkv, .panel = w.panel, .dx = w.gradient_part});
  layer_norm_backward(pool_, {.rows = rows(),
                              .width = width(),
                              .dy = w.gradient_part,
                              .x = input,
                              .weight = weights.norm1_weight,
                              .mean = block.mean1,
                              .inverse_dev = block.inverse_dev1,
                              .dx = gradient,
                              .weight_gradient = gradients.norm1_weight,
                              .bias_gradient = gradients.norm1_bias});
}

}  // namespace hoist::gpt
