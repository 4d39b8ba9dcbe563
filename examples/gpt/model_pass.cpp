// SPDX-License-Identifier: Apache-2.0
// examples/gpt/model_pass.cpp - a pass over micro-batches: embedding, blocks and head, and the same backwards.
#include <algorithm>

#include <fmt/format.h>

#include <hoist/core/error.hpp>

#include "model_parts.hpp"

namespace hoist::gpt {

double Gpt::train(const Batch& batch, PassOptions options) { return run({&batch, 1}, Pass::train, options); }
double Gpt::train(std::span<const Batch> micro_batches) {
  return run(micro_batches, Pass::train, {.micro_batches = static_cast<int>(micro_batches.size())});
}
double Gpt::evaluate(const Batch& batch) { return run({&batch, 1}, Pass::evaluate, {}); }

double Gpt::run(std::span<const Batch> micro_batches, Pass pass, PassOptions options) {
  if (micro_batches.empty() || micro_batches.size() > work_->kept.size()) {
    throw UsageError(fmt::format("{} micro-batches in one pass of a model made to hold 1 to {}", micro_batches.size(),
                                 work_->kept.size()));
  }
  for (const Batch& batch : micro_batches) check(batch);
  const PassScope scope = engine_->begin(pass, options);
  // The batches are read by enqueued work, so they must not go before the stream has caught up, also when this throws.
  struct CatchUp {
    platform::Stream& stream;
    ~CatchUp() {
      try {
        stream.synchronize();
      } catch (...) {  // the error that ended the pass is already on its way
      }
    }
  } const catch_up{*stream_};

  const std::size_t count = micro_batches.size();
  const bool returns = pass == Pass::train;
  inputs_->begin(count, returns ? BlockInputs::Return::comes_back : BlockInputs::Return::never);
  embed(micro_batches);
  for (int layer = 0; layer < options_.layers; ++layer) block_forward(layer, count);
  head(micro_batches, pass);
  if (returns) {
    for (int layer = options_.layers - 1; layer >= 0; --layer) block_backward(layer, count);
    embed_backward(count);
    offloaded_bytes_ += inputs_->offloaded_bytes(count);
  }
  stream_->synchronize();
  double loss = 0;
  for (std::size_t m = 0; m < count; ++m) loss += losses_[m] / static_cast<double>(count);
  return loss;
}

void Gpt::check(const Batch& batch) const {
  const auto count = static_cast<std::size_t>(rows());
  if (batch.inputs.size() != count || batch.targets.size() != count) {
    throw UsageError(fmt::format("a batch of {} and {} bytes was given to a model of {} sequences of {} bytes",
                                 batch.inputs.size(), batch.targets.size(), options_.batch, options_.context));
  }
}

void Gpt::embed(std::span<const Batch> micro_batches) {
  Lease lease = engine_->gather(embed_, *stream_);
  const Matrix token_weight = matrix_of<Matrix>(lease.view(token_embedding_));
  const Matrix position_weight = matrix_of<Matrix>(lease.view(position_embedding_));
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    const std::uint8_t* tokens = micro_batches[m].inputs.data();
    work_->kept[m].tokens = tokens;
    float* const x = inputs_->output_for(0, m, *stream_);
    enqueue("embed", [this, tokens, token_weight, position_weight, x] {
      embedding_forward(pool_, embedding_shape(), tokens, token_weight, position_weight, x);
    });
  }
  lease.release(*stream_);
}

void Gpt::embed_backward(std::size_t count) {
  const GradientLease gradients = engine_->gradients(embed_, *stream_);
  const GradientMatrix token_gradient = matrix_of<GradientMatrix>(gradients.view(token_embedding_));
  const GradientMatrix position_gradient = matrix_of<GradientMatrix>(gradients.view(position_embedding_));
  for (std::size_t m = 0; m < count; ++m) {
    enqueue("embed backward", [this, m, token_gradient, position_gradient] {
      embedding_backward(pool_, embedding_shape(), work_->kept[m].tokens, work_->kept[m].gradient, token_gradient,
                         position_gradient, work_->panel);
    });
  }
  engine_->finish(embed_, *stream_);
}

// --- the head ------------------------------------------------------------------------------------------------------

struct Gpt::HeadWeights {
  const float* norm_weight;
  const float* norm_bias;
  Matrix tokens;  // tied: the embedding's
};

struct Gpt::HeadGradients {
  float* norm_weight;
  float* norm_bias;
  GradientMatrix tokens;
};

void Gpt::head(std::span<const Batch> micro_batches, Pass pass) {
  Lease lease = engine_->gather(head_, *stream_);
  const HeadWeights weights{floats_of(lease.view(norm_weight_)), floats_of(lease.view(norm_bias_)),
                            matrix_of<Matrix>(lease.view(token_embedding_))};
  const float loss_scale = engine_->loss_scale();
  HeadGradients gradients{};
  if (pass == Pass::train) {
    const GradientLease own = engine_->gradients(head_, *stream_);
    const GradientLease tied = engine_->gradients(embed_, *stream_);
    gradients = {floats_of(own.view(norm_weight_)), floats_of(own.view(norm_bias_)),
                 matrix_of<GradientMatrix>(tied.view(token_embedding_))};
  }
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    const std::uint8_t* targets = micro_batches[m].targets.data();
    const float* const input = inputs_->forward_input(static_cast<std::size_t>(options_.layers), m);
    enqueue("head", [this, m, targets, input, weights, loss_scale] {
      const Workspace& w = *work_;
      head_norm(input, weights);
      linear_forward(pool_, {.rows = rows(), .x = w.normed, .weight = weights.tokens, .panel = w.panel, .y = w.logits});
      losses_[m] = cross_entropy(pool_, rows(), kVocabulary, targets, w.logits, w.row_loss, loss_scale);
    });
    if (pass != Pass::train) continue;
    enqueue("head backward", [this, m, input, weights, gradients] {
      head_backward(input, work_->kept[m].gradient, weights, gradients);
    });
  }
  lease.release(*stream_);
  if (pass == Pass::train) engine_->finish(head_, *stream_);
}

void Gpt::head_norm(const float* input, const HeadWeights& weights) {
  layer_norm_forward(pool_, {.rows = rows(),
                             .width = width(),
                             .x = input,
                             .weight = weights.norm_weight,
                             .bias = weights.norm_bias,
                             .mean = work_->mean,
                             .inverse_dev = work_->inverse_dev,
                             .y = work_->normed});
}

void Gpt::head_backward(const float* input, float* gradient, const HeadWeights& weights,
                        const HeadGradients& gradients) {
  const Workspace& w = *work_;
  linear_backward_weight(
      pool_, {.rows = rows(), .dy = w.logits, .x = w.normed, .gradient = gradients.tokens, .panel = w.panel});
  linear_backward_input(
      pool_, {.rows = rows(), .dy = w.logits, .weight = weights.tokens, .panel = w.panel, .dx = w.gradient_part});
  std::fill_n(gradient, rows() * width(), 0.0f);  // nothing flows past the head
  layer_norm_backward(pool_, {.rows = rows(),
                              .width = width(),
                              .dy = w.gradient_part,
                              .x = input,
                              .weight = weights.norm_weight,
                              .mean = w.mean,
                              .inverse_dev = w.inverse_dev,
                              .dx = gradient,
                              .weight_gradient = gradients.norm_weight,
                              .bias_gradient = gradients.norm_bias});
}

}  // namespace hoist::gpt
