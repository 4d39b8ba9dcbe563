// SPDX-License-Identifier: Apache-2.0
// examples/gpt/kernels.hpp - the mathematics of a GPT on the CPU: each layer forward, and its derivative.
//
// Everything is fp32 and row-major; only weights and their gradients may be bf16 or fp16. A weight is widened into
// `panel` piece by piece just before the product that needs it, so at most one matrix exists in fp32 at a time.
//
// Threading  One call at a time per output; the pool's threads share the work of a call.
// Memory     No allocation. The caller hands in every buffer.
// Determinism  Work is cut by shape, never by thread count, each piece is one single-threaded sgemm or one loop in a
//            fixed order: the same bits for any number of threads. Call use_own_threads() once before.
#pragma once

#include <cstddef>
#include <cstdint>

#include <hoist/core/dtype.hpp>
#include <hoist/optim_cpu/update_pool.hpp>

namespace hoist::gpt {

using Index = std::int64_t;
using optim::UpdatePool;

// Stops OpenBLAS from splitting a product over its own threads (how it splits depends on their number).
void use_own_threads();
// Takes the memory that OpenBLAS keeps for each thread that computes a product, for as many as `threads` at once.
// OpenBLAS would take it at the first products instead, and repeats a refused request for ever.
// Errors: Error if the system refuses that much address space.
void take_product_memory(unsigned threads);

// Gathered weights, [rows, columns].
struct Matrix {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  Index rows = 0;
  Index columns = 0;
};

// Memory of a gradient, [rows, columns]; kernels add to it: widened, added in fp32, rounded once.
struct GradientMatrix {
  void* data = nullptr;
  DType dtype = DType::bf16;
  Index rows = 0;
  Index columns = 0;
};

// The arguments that all calls of a pass share.
struct KernelContext {
  UpdatePool& pool;
  Index rows = 0;          // of activations
  float* panel = nullptr;  // as many floats as the largest weight matrix has elements
};

// A linear layer's parameters, and their gradients; the bias may be null.
struct Linear {
  Matrix weight;  // [out, in]
  const float* bias = nullptr;
};
struct LinearGradient {
  GradientMatrix weight;
  float* bias = nullptr;
};

// y[rows, out] = x[rows, in] W^T (+ bias[out]) (+ residual[rows, out]).
struct LinearForward {
  const float* x = nullptr;
  Linear layer;
  const float* residual = nullptr;
  float* y = nullptr;
};
void linear_forward(const KernelContext& context, const LinearForward& a);

// dW += dy[rows, out]^T x[rows, in]; dbias += the column sums of dy; then dx[rows, in] = dy W. x and dx may be the same
// memory.
struct LinearBackward {
  const float* x = nullptr;
  const float* dy = nullptr;
  Linear layer;
  LinearGradient gradient;
  float* dx = nullptr;
};
void linear_backward(const KernelContext& context, const LinearBackward& a);

// A layer norm's parameters, and their gradients: [width] each.
struct Norm {
  const float* weight = nullptr;
  const float* bias = nullptr;
  Index width = 0;
};
struct NormGradient {
  float* weight = nullptr;
  float* bias = nullptr;
};
// Statistics of each row of a norm's input. The backward pass needs them.
struct NormStatistics {
  float* mean = nullptr;
  float* inverse_dev = nullptr;
};

// y = (x - mean) / sqrt(variance + 1e-5) * weight + bias, per row.
struct NormForward {
  const float* x = nullptr;
  Norm layer;
  NormStatistics statistics;
  float* y = nullptr;
};
void norm_forward(const KernelContext& context, const NormForward& a);

// dx += the derivative with respect to x (the residual's gradient is already there); gradients are added to.
struct NormBackward {
  const float* x = nullptr;
  const float* dy = nullptr;
  Norm layer;
  NormStatistics statistics;
  NormGradient gradient;
  float* dx = nullptr;
};
void norm_backward(const KernelContext& context, const NormBackward& a);

// GELU, tanh form (Hendrycks & Gimpel, arXiv 1606.08415). dx = dy * gelu'(x); dy and dx may be the same memory.
void gelu_forward(UpdatePool& pool, const float* x, Index count, float* y);
void gelu_backward(UpdatePool& pool, const float* x, const float* dy, Index count, float* dx);

// Causal attention over qkv[batch * context, 3 * heads * head_width]: queries, keys, values side by side.
struct AttentionShape {
  Index batch = 0;
  Index context = 0;
  Index heads = 0;
  Index head_width = 0;
  Index width() const { return heads * head_width; }
  Index probability_count() const { return batch * heads * context * context; }
};
// y[batch * context, width]; probabilities[batch, heads, context, context] are kept for the way back.
void attention_forward(UpdatePool& pool, const AttentionShape& shape, const float* qkv, float* probabilities, float* y);
// scratch: probability_count() floats.
struct AttentionBackward {
  const float* qkv = nullptr;
  const float* probabilities = nullptr;
  const float* dy = nullptr;
  float* scratch = nullptr;
  float* dqkv = nullptr;
};
void attention_backward(UpdatePool& pool, const AttentionShape& shape, const AttentionBackward& a);

// x[batch * context, width] = tokens[token] + positions[t].
struct EmbeddingShape {
  Index batch = 0;
  Index context = 0;
};
void embedding_forward(UpdatePool& pool, const EmbeddingShape& shape, const std::uint8_t* tokens, Matrix token_weight,
                       Matrix position_weight, float* x);
// scratch: as many floats as the larger of the two matrices has elements.
void embedding_backward(UpdatePool& pool, const EmbeddingShape& shape, const std::uint8_t* tokens, const float* dx,
                        GradientMatrix token_gradient, GradientMatrix position_gradient, float* scratch);

// Turns logits[rows, classes] into the gradient of `loss_scale` times the mean loss, (softmax - target) / rows, in
// place, and returns the mean cross-entropy in nats, without the scale. row_loss: [rows] floats.
double cross_entropy(UpdatePool& pool, Index rows, Index classes, const std::uint8_t* targets, float* logits,
                     float* row_loss, float loss_scale = 1);

}  // namespace hoist::gpt
