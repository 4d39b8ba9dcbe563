// SPDX-License-Identifier: Apache-2.0
// examples/gpt/card/card_operations.hpp - the operations on a card: activations in bf16 (fp16 beside fp16 weights),
// products accumulated in fp32, attention by tiles, everything else fused into few passes over memory.
//
// fp32 weights are rounded just before their product; their gradients stay fp32. All sums have one order: the bits of a
// run depend on the card and on the versions of its libraries, not on where state lives.
//
// Memory     Tokens and losses pass through pinned memory, taken from its budget at construction.
// Errors     UsageError for heads of a width that there are no kernels for, naming a number of heads that works.
#pragma once

#include <memory>

#include <hoist/platform/device.hpp>
#include <hoist/tiers/pinned_pool.hpp>

#include "../operations.hpp"
#include "card.hpp"

namespace hoist::gpt::card {

class CardOperations final : public Operations {
 public:
  CardOperations(Runtime& runtime, platform::Stream& stream, std::unique_ptr<Card> card,
                 const OperationsOptions& options);
  ~CardOperations() override;

  // bf16, or fp16 beside fp16 weights.
  static DType activations_beside(DType matrix_dtype) {
    return matrix_dtype == DType::fp16 ? DType::fp16 : DType::bf16;
  }

  DType activation_dtype() const override { return activation_dtype_; }
  std::uint64_t attention_kept_bytes() const override;
  std::uint64_t attention_scratch_bytes() const override { return attention_kept_bytes(); }
  std::uint64_t workspace_bytes() const override;
  void use_workspace(std::byte* workspace) override;
  void run(const char* what, std::function<void()> work) override { card_->run(what, std::move(work)); }
  Nanoseconds compute_time() override { return card_->compute_time(); }
  const std::uint8_t* tokens_on_device(Tokens which, std::size_t micro_batch,
                                       std::span<const std::uint8_t> tokens) override;

  void embedding_forward(const EmbeddingForward& a) override;
  void embedding_backward(const EmbeddingBackward& a) override;
  void linear_forward(const LinearForward& a) override;
  void logits_forward(const void* x, const Matrix& weight, float* y) override;
  void linear_backward_input(const void* dy, const Matrix& weight, void* dx) override;
  void linear_backward_weight(const LinearBackwardWeight& a) override;
  void layer_norm_forward(const LayerNormForward& a) override;
  void layer_norm_backward(const LayerNormBackward& a) override;
  void gelu_forward(const void* x, void* y) override;
  void gelu_backward(const void* x, const void* dy, void* dx) override;
  void attention_forward(const void* qkv, void* kept, void* y) override;
  void attention_backward(const Operations::AttentionBackward& a) override;
  void cross_entropy(const CrossEntropy& a) override;
  void zero(void* activations, Index count) override;
  void fetch_losses() override;
  double loss(std::size_t micro_batch) const override;

 private:
  // Its pieces of the block of memory that the model gives.
  struct Workspace {
    std::byte* weights = nullptr;  // one matrix, rounded; none unless weights are fp32
    std::byte* one_hot = nullptr;  // [rows, vocabulary]
    std::byte* partial = nullptr;  // sums of columns
    std::byte* losses = nullptr;   // [held micro-batches] doubles
    std::byte* tokens = nullptr;   // [2 * held micro-batches, rows]
    std::byte* products = nullptr;
  };
  Workspace carve(std::byte* base, std::uint64_t& bytes) const;
  std::uint64_t rows() const { return static_cast<std::uint64_t>(options_.rows()); }
  std::uint64_t width() const { return static_cast<std::uint64_t>(options_.attention.width()); }
  std::uint64_t token_bytes() const { return 2 * options_.held_micro_batches * rows(); }
  std::uint64_t loss_bytes() const { return options_.held_micro_batches * sizeof(double); }
  Attention attention() const;
  // The matrix in the type of activations. Valid until the next one.
  const void* as_activations(const Matrix& weight);
  void sum_columns(ColumnSums sums);

  platform::Device& device_;
  platform::Stream& stream_;
  const OperationsOptions options_;
  const DType activation_dtype_;
  tiers::PinnedPool pool_;
  std::span<std::byte> staged_tokens_;
  std::span<std::byte> fetched_losses_;
  std::unique_ptr<Card> card_;
  Workspace work_;
};

}  // namespace hoist::gpt::card
