// SPDX-License-Identifier: Apache-2.0
// examples/gpt/operations.hpp - what the model asks of a device: each layer forward, and its derivative. Two
// implementations: CPU kernels (host_operations.cpp), and a card's (card_operations.hpp).
//
// Matrices are row-major. Activations and their gradients have one type, activation_dtype(); weights and their
// gradients any; norms, biases, their gradients, statistics and logits are fp32. Products are accumulated in fp32.
//
// Threading  run() on the program's thread; everything that says "in run()" only in the work given to it.
// Memory     No allocation after construction but plans of products: the model hands in every buffer, all of them
// device
//            memory, and one block that the operations divide among themselves (workspace_bytes, use_workspace).
// Errors     What a device cannot compute is refused at construction, with the remedy: UsageError.
// Main path  run(what, work) -> on the host device the stream's worker calls work, and kernels run there; on a card the
//            caller does, and every operation is enqueued on the stream.
#pragma once

#include <functional>
#include <memory>
#include <span>

#include <hoist/core/clock.hpp>
#include <hoist/platform/stream.hpp>

#include "kernels.hpp"

namespace hoist {
class Runtime;
}

namespace hoist::gpt {

// The largest shapes of every operation, so that workspaces are known before the first step.
struct OperationsOptions {
  AttentionShape attention;            // of one micro-batch
  Index hidden = 0;                    // width of the feed-forward part
  Index vocabulary = 0;                // classes, and tokens
  std::size_t held_micro_batches = 1;  // of a pass
  DType matrix_dtype = DType::bf16;    // of weights
  unsigned threads = 0;                // of CPU kernels; 0: every CPU
  Index rows() const { return attention.batch * attention.context; }
};

class Operations {
 public:
  // The operations of the runtime's device. `stream` is the compute stream and outlives them.
  static std::unique_ptr<Operations> create(Runtime& runtime, platform::Stream& stream, const OperationsOptions&);
  virtual ~Operations() = default;
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

  virtual DType activation_dtype() const = 0;
  // Attention's stored values of a micro-batch for the backward pass, and its workspace.
  virtual std::uint64_t attention_kept_bytes() const = 0;
  virtual std::uint64_t attention_scratch_bytes() const = 0;
  // A block of so many bytes is theirs from use_workspace() on; aligned to 256.
  virtual std::uint64_t workspace_bytes() const = 0;
  virtual void use_workspace(std::byte* workspace) = 0;

  // Does `work` in the order of the stream and counts its time.
  virtual void run(const char* what, std::function<void()> work) = 0;
  // Time that kernels have run. Pre: the stream is synchronized.
  virtual Nanoseconds compute_time() = 0;

  // The address of a micro-batch's `tokens` for work enqueued from now on. They are borrowed until the stream is
  // synchronized. Inputs and targets of each micro-batch have a place of their own.
  enum class Tokens : std::uint8_t { inputs, targets };
  virtual const std::uint8_t* tokens_on_device(Tokens which, std::size_t micro_batch,
                                               std::span<const std::uint8_t> tokens) = 0;

  // --- in run() ------------------------------------------------------------------------------------------------------

  // x[rows, width] = tokens[token] + positions[row % context].
  struct EmbeddingForward {
    const std::uint8_t* tokens = nullptr;
    Matrix token_weight, position_weight;
    void* x = nullptr;
  };
  virtual void embedding_forward(const EmbeddingForward& a) = 0;
  struct EmbeddingBackward {
    const std::uint8_t* tokens = nullptr;
    const void* dx = nullptr;
    GradientMatrix token_gradient, position_gradient;  // added to
  };
  virtual void embedding_backward(const EmbeddingBackward& a) = 0;

  // y[rows, out] = x[rows, in] W[out, in]^T (+ bias[out]) (+ residual[rows, out]); gelu = GELU(y), where asked for.
  struct LinearForward {
    const void* x = nullptr;
    Matrix weight;
    const float* bias = nullptr;
    const void* residual = nullptr;
    void* y = nullptr;
    void* gelu = nullptr;
  };
  virtual void linear_forward(const LinearForward& a) = 0;
  // The same without any addition, y in fp32.
  virtual void logits_forward(const void* x, const Matrix& weight, float* y) = 0;
  // dx[rows, in] = dy[rows, out] W[out, in].
  virtual void linear_backward_input(const void* dy, const Matrix& weight, void* dx) = 0;
  // dW[out, in] += dy^T x; bias_gradient[out] += the column sums of dy.
  struct LinearBackwardWeight {
    const void* dy = nullptr;
    const void* x = nullptr;
    GradientMatrix gradient;
    float* bias_gradient = nullptr;  // may be null
  };
  virtual void linear_backward_weight(const LinearBackwardWeight& a) = 0;

  // y = (x - mean) / sqrt(variance + 1e-5) * weight + bias by rows; both statistics are kept.
  struct LayerNormForward {
    const void* x = nullptr;
    const float* weight = nullptr;
    const float* bias = nullptr;
    float* mean = nullptr;         // [rows]
    float* inverse_dev = nullptr;  // [rows]
    void* y = nullptr;
  };
  virtual void layer_norm_forward(const LayerNormForward& a) = 0;
  // dx += the derivative; the gradients are added to.
  struct LayerNormBackward {
    const void* dy = nullptr;
    const void* x = nullptr;
    const float* weight = nullptr;
    const float* mean = nullptr;
    const float* inverse_dev = nullptr;
    void* dx = nullptr;
    float* weight_gradient = nullptr;
    float* bias_gradient = nullptr;
  };
  virtual void layer_norm_backward(const LayerNormBackward& a) = 0;

  // GELU of x[rows, hidden], tanh form; dx = dy * GELU'(x), dy and dx may be the same memory.
  virtual void gelu_forward(const void* x, void* y) = 0;
  virtual void gelu_backward(const void* x, const void* dy, void* dx) = 0;

  // Causal attention over qkv[rows, 3 * width], queries, keys and values side by side; y[rows, width].
  virtual void attention_forward(const void* qkv, void* kept, void* y) = 0;
  struct AttentionBackward {
    const void* qkv = nullptr;
    const void* kept = nullptr;
    const void* y = nullptr;  // what the forward pass made
    const void* dy = nullptr;
    void* scratch = nullptr;
    void* dqkv = nullptr;
  };
  virtual void attention_backward(const AttentionBackward& a) = 0;

  // gradient = (softmax(logits) - target) * loss_scale / rows, and the mean cross-entropy, in nats, becomes the
  // micro-batch's loss. The gradient may be the logits' memory where activations are fp32.
  struct CrossEntropy {
    std::size_t micro_batch = 0;
    const std::uint8_t* targets = nullptr;
    float* logits = nullptr;
    void* gradient = nullptr;
    float* row_loss = nullptr;  // [rows]
    float loss_scale = 1;
  };
  virtual void cross_entropy(const CrossEntropy& a) = 0;
  virtual void zero(void* activations, Index count) = 0;

  // --- after run() ---------------------------------------------------------------------------------------------------

  // Enqueues what loss() needs; after the last cross_entropy of a pass.
  virtual void fetch_losses() = 0;
  // Pre: the stream is synchronized.
  virtual double loss(std::size_t micro_batch) const = 0;

 protected:
  Operations() = default;
};

}  // namespace hoist::gpt
