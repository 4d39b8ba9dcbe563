// SPDX-License-Identifier: Apache-2.0
#include "host_operations.hpp"

#include <algorithm>

namespace hoist::gpt {
namespace {

const float* floats(const void* activations) { return static_cast<const float*>(activations); }
float* floats(void* activations) { return static_cast<float*>(activations); }

}  // namespace

HostOperations::HostOperations(platform::Stream& stream, const OperationsOptions& options)
    : stream_(stream), options_(options), pool_({.threads = options.threads}), losses_(options.held_micro_batches) {
  use_own_threads();
  take_product_memory(pool_.threads());
}

std::uint64_t HostOperations::attention_kept_bytes() const {
  return static_cast<std::uint64_t>(options_.attention.probability_count()) * sizeof(float);
}

std::uint64_t HostOperations::workspace_bytes() const {
  const Index width = options_.attention.width();
  const Index largest =
      std::max({options_.hidden * width, options_.vocabulary * width, options_.attention.context * width});
  return static_cast<std::uint64_t>(largest) * sizeof(float);
}

void HostOperations::run(const char* what, std::function<void()> work) {
  stream_.launch(what, [this, work = std::move(work)] {
    const TimePoint begin = Clock::now();
    work();
    compute_time_ += Clock::now() - begin;
  });
}

void HostOperations::embedding_forward(const EmbeddingForward& a) {
  gpt::embedding_forward(pool_, embedding_shape(), a.tokens, a.token_weight, a.position_weight, floats(a.x));
}

void HostOperations::embedding_backward(const EmbeddingBackward& a) {
  gpt::embedding_backward(pool_, embedding_shape(), a.tokens, floats(a.dx), a.token_gradient, a.position_gradient,
                          panel_);
}

void HostOperations::linear_forward(const LinearForward& a) {
  gpt::linear_forward(pool_, {.rows = rows(),
                              .x = floats(a.x),
                              .weight = a.weight,
                              .bias = a.bias,
                              .residual = floats(a.residual),
                              .panel = panel_,
                              .y = floats(a.y)});
  if (a.gelu != nullptr) gpt::gelu_forward(pool_, floats(a.y), rows() * a.weight.rows, floats(a.gelu));
}

void HostOperations::logits_forward(const void* x, const Matrix& weight, float* y) {
  gpt::linear_forward(pool_, {.rows = rows(), .x = floats(x), .weight = weight, .panel = panel_, .y = y});
}

void HostOperations::linear_backward_input(const void* dy, const Matrix& weight, void* dx) {
  gpt::linear_backward_input(pool_,
                             {.rows = rows(), .dy = floats(dy), .weight = weight, .panel = panel_, .dx = floats(dx)});
}

void HostOperations::linear_backward_weight(const LinearBackwardWeight& a) {
  gpt::linear_backward_weight(pool_, {.rows = rows(),
                                      .dy = floats(a.dy),
                                      .x = floats(a.x),
                                      .gradient = a.gradient,
                                      .bias_gradient = a.bias_gradient,
                                      .panel = panel_});
}

void HostOperations::layer_norm_forward(const LayerNormForward& a) {
  gpt::layer_norm_forward(pool_, {.rows = rows(),
                                  .width = options_.attention.width(),
                                  .x = floats(a.x),
                                  .weight = a.weight,
                                  .bias = a.bias,
                                  .mean = a.mean,
                                  .inverse_dev = a.inverse_dev,
                                  .y = floats(a.y)});
}

void HostOperations::layer_norm_backward(const LayerNormBackward& a) {
  gpt::layer_norm_backward(pool_, {.rows = rows(),
                                   .width = options_.attention.width(),
                                   .dy = floats(a.dy),
                                   .x = floats(a.x),
                                   .weight = a.weight,
                                   .mean = a.mean,
                                   .inverse_dev = a.inverse_dev,
                                   .dx = floats(a.dx),
                                   .weight_gradient = a.weight_gradient,
                                   .bias_gradient = a.bias_gradient});
}

void HostOperations::gelu_forward(const void* x, void* y) {
  gpt::gelu_forward(pool_, floats(x), rows() * options_.hidden, floats(y));
}

void HostOperations::gelu_backward(const void* x, const void* dy, void* dx) {
  gpt::gelu_backward(pool_, floats(x), floats(dy), rows() * options_.hidden, floats(dx));
}

void HostOperations::attention_forward(const void* qkv, void* kept, void* y) {
  gpt::attention_forward(pool_, options_.attention, floats(qkv), floats(kept), floats(y));
}

void HostOperations::attention_backward(const AttentionBackward& a) {
  gpt::attention_backward(pool_, options_.attention,
                          {.qkv = floats(a.qkv),
                           .probabilities = floats(a.kept),
                           .dy = floats(a.dy),
                           .scratch = floats(a.scratch),
                           .dqkv = floats(a.dqkv)});
}

void HostOperations::cross_entropy(const CrossEntropy& a) {
  losses_[a.micro_batch] =
      gpt::cross_entropy(pool_, rows(), options_.vocabulary, a.targets, a.logits, a.row_loss, a.loss_scale);
  if (a.gradient != a.logits) std::copy_n(a.logits, rows() * options_.vocabulary, floats(a.gradient));
}

void HostOperations::zero(void* activations, Index count) { std::fill_n(floats(activations), count, 0.0f); }

}  // namespace hoist::gpt
