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

// The final norm and the logits, with the loss, and in a train pass their way back.
void Gpt::head(std::span<const Batch> micro_batches, Pass pass) {
  Lease lease = engine_->gather(head_, *stream_);
  const Norm norm = head_norm_->norm(lease);
  const Linear tokens{.weight = matrix_of<Matrix>(lease.view(token_embedding_))};  // tied: the embedding's
  NormGradient norm_gradient;
  LinearGradient token_gradient;
  if (pass == Pass::train) {
    norm_gradient = head_norm_->norm(engine_->gradients(head_, *stream_));
    token_gradient.weight = matrix_of<GradientMatrix>(engine_->gradients(embed_, *stream_).view(token_embedding_));
  }
  const float loss_scale = engine_->loss_scale();
  for (std::size_t m = 0; m < micro_batches.size(); ++m) {
    const std::uint8_t* targets = micro_batches[m].targets.data();
    const float* const input = inputs_->forward_input(static_cast<std::size_t>(options_.layers), m);
    enqueue("head", [this, m, targets, input, norm, tokens, loss_scale] {
      const Workspace& w = *work_;
      norm_forward(context(), {.x = input, .layer = norm, .statistics = w.head_norm, .y = w.normed});
      linear_forward(context(), {.x = w.normed, .layer = tokens, .y = w.logits});
      losses_[m] = cross_entropy(pool_, rows(), kVocabulary, targets, w.logits, w.row_loss, loss_scale);
    });
    if (pass != Pass::train) continue;
    enqueue("head backward", [this, m, input, norm, tokens, norm_gradient, token_gradient] {
      const Workspace& w = *work_;
      float* const gradient = w.kept[m].gradient;
      linear_backward(
          context(),
          {.x = w.normed, .dy = w.logits, .layer = tokens, .gradient = token_gradient, .dx = w.gradient_part});
      std::fill_n(gradient, rows() * width(), 0.0f);  // nothing flows past the head
      norm_backward(context(), {.x = input,
                                .dy = w.gradient_part,
                                .layer = norm,
                                .statistics = w.head_norm,
                                .gradient = norm_gradient,
                                .dx = gradient});
    });
  }
  lease.release(*stream_);
  if (pass == Pass::train) engine_->finish(head_, *stream_);
}

}  // namespace hoist::gpt
