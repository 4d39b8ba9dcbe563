// SPDX-License-Identifier: Apache-2.0
// examples/gpt/host_operations.hpp - the operations on CPU kernels (kernels.hpp), in fp32, for the host device.
//
// Weights are widened piece by piece just before their product, so at most one matrix exists in fp32 at a time.
#pragma once

#include <vector>

#include "operations.hpp"

namespace hoist::gpt {

class HostOperations final : public Operations {
 public:
  HostOperations(platform::Stream& stream, const OperationsOptions& options);

  DType activation_dtype() const override { return DType::fp32; }
  std::uint64_t attention_kept_bytes() const override;
  std::uint64_t attention_scratch_bytes() const override { return attention_kept_bytes(); }
  std::uint64_t workspace_bytes() const override;
  void use_workspace(std::byte* workspace) override { panel_ = reinterpret_cast<float*>(workspace); }

  void run(const char* what, std::function<void()> work) override;
  Nanoseconds compute_time() override { return compute_time_; }
  const std::uint8_t* tokens_on_device(Tokens, std::size_t, std::span<const std::uint8_t> tokens) override {
    return tokens.data();
  }

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
  void attention_backward(const AttentionBackward& a) override;
  void cross_entropy(const CrossEntropy& a) override;
  void zero(void* activations, Index count) override;
  void fetch_losses() override {}
  double loss(std::size_t micro_batch) const override { return losses_[micro_batch]; }

 private:
  EmbeddingShape embedding_shape() const {
    return {.batch = options_.attention.batch, .context = options_.attention.context};
  }
  Index rows() const { return options_.rows(); }
  platform::Stream& stream_;
  const OperationsOptions options_;
  UpdatePool pool_;
  float* panel_ = nullptr;      // one weight matrix
  std::vector<double> losses_;  // written by the stream's worker, as is the time
  Nanoseconds compute_time_{0};
};

}  // namespace hoist::gpt
