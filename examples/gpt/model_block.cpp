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
    const void* const input = inputs_->forward_input(index, m);
    void* const output = inputs_->output_for(index + 1, m, *stream_);
    operations_->run("block", [this, index, m, weights, input, output] {
      const BlockActivations& kept = work_->kept[m].blocks[index];
      compute_to_wide(input, kept, weights);
      operations_->linear_forward(
          {.x = work_->wide, .weight = weights.down, .bias = weights.down_bias, .residual = kept.middle, .y = output});
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
    const void* const input = inputs_->bring(index, m, *stream_);
    operations_->run("block backward", [this, index, m, weights, gradients, input] {
      const Kept& kept = work_->kept[m];
      const BlockActivations& activations = kept.blocks[index];
      if (options_.activations == ActivationPolicy::keep) {
        second_norm(activations, weights);
        operations_->gelu_forward(activations.hidden, work_->wide);
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
void Gpt::compute_to_wide(const void* input, const BlockActivations& block, const BlockWeights& weights) {
  const Workspace& w = *work_;
  first_norm(input, block, weights);
  operations_->linear_forward({.x = w.normed, .weight = weights.qkv, .bias = weights.qkv_bias, .y = block.qkv});
  operations_->attention_forward(block.qkv, block.attention, block.mixed);
  operations_->linear_forward(
      {.x = block.mixed, .weight = weights.out, .bias = weights.out_bias, .residual = input, .y = block.middle});
  second_norm(block, weights);
  operations_->linear_forward(
      {.x = w.normed, .weight = weights.up, .bias = weights.up_bias, .y = block.hidden, .gelu = w.wide});
}

void Gpt::first_norm(const void* input, const BlockActivations& block, const BlockWeights& weights) {
  operations_->layer_norm_forward({.x = input,
                                   .weight = weights.norm1_weight,
                                   .bias = weights.norm1_bias,
                                   .mean = block.mean1,
                                   .inverse_dev = block.inverse_dev1,
                                   .y = work_->normed});
}

void Gpt::second_norm(const BlockActivations& block, const BlockWeights& weights) {
  operations_->layer_norm_forward({.x = block.middle,
                                   .weight = weights.norm2_weight,
                                   .bias = weights.norm2_bias,
                                   .mean = block.mean2,
                                   .inverse_dev = block.inverse_dev2,
                                   .y = work_->normed});
}

// Takes the gradient from the block's output to the stream between attention and feed-forward.
void Gpt::feed_forward_backward(void* gradient, const BlockActivations& block, const BlockWeights& weights,
                                const BlockGradients& gradients) {
  const Workspace& w = *work_;
  operations_->linear_backward_weight(
      {.dy = gradient, .x = w.wide, .gradient = gradients.down, .bias_gradient = gradients.down_bias});
  operations_->linear_backward_input(gradient, weights.down, w.wide);
  operations_->gelu_backward(block.hidden, w.wide, w.wide);
  operations_->linear_backward_weight(
      {.dy = w.wide, .x = w.normed, .gradient = gradients.up, .bias_gradient = gradients.up_bias});
  operations_->linear_backward_input(w.wide, weights.up, w.gradient_part);
  operations_->layer_norm_backward({.dy = w.gradient_part,
                                    .x = block.middle,
                                    .weight = weights.norm2_weight,
                                    .mean = block.mean2,
                                    .inverse_dev = block.inverse_dev2,
                                    .dx = gradient,
                                    .weight_gradient = gradients.norm2_weight,
                                    .bias_gradient = gradients.norm2_bias});
}

// Takes the gradient the rest of the way to the block's input.
void Gpt::attention_branch_backward(const void* input, void* gradient, const BlockActivations& block,
                                    const BlockWeights& weights, const BlockGradients& gradients) {
  const Workspace& w = *work_;
  operations_->linear_backward_weight(
      {.dy = gradient, .x = block.mixed, .gradient = gradients.out, .bias_gradient = gradients.out_bias});
  operations_->linear_backward_input(gradient, weights.out, w.gradient_part);
  operations_->attention_backward({.qkv = block.qkv,
                                   .kept = block.attention,
                                   .y = block.mixed,
                                   .dy = w.gradient_part,
                                   .scratch = w.attention_scratch,
                                   .dqkv = w.wide});
  first_norm(input, block, weights);  // its output made room for the second norm's
  operations_->linear_backward_weight(
      {.dy = w.wide, .x = w.normed, .gradient = gradients.qkv, .bias_gradient = gradients.qkv_bias});
  operations_->linear_backward_input(w.wide, weights.qkv, w.gradient_part);
  operations_->layer_norm_backward({.dy = w.gradient_part,
                                    .x = input,
                                    .weight = weights.norm1_weight,
                                    .mean = block.mean1,
                                    .inverse_dev = block.inverse_dev1,
                                    .dx = gradient,
                                    .weight_gradient = gradients.norm1_weight,
                                    .bias_gradient = gradients.norm1_bias});
}

}  // namespace hoist::gpt
