// SPDX-License-Identifier: Apache-2.0
// examples/gpt/model.hpp - a byte-level GPT whose state is lifted by a hoist::Engine, layer by layer.
//
// Units: "embed" (token and position embedding), "block.0" ... "block.L-1", "head" (final norm; tied to the token
// embedding). Matrices are bf16, or fp16 with a scaled loss, with weight decay, norms and biases fp32 without: two
// segments, two groups.
//
// Threading  One thread. It only enqueues: kernels run in order on the stream's worker, and the host runs ahead.
// Memory     One block of the device arena, taken at construction: the input of every block is kept, for each
// micro-batch
//            that a pass holds; everything else is one block's worth of one micro-batch, because the backward pass
//            computes a block again under the lease it needs anyway.
// Main path  train -> (gather, enqueue per micro-batch, release) per unit -> the same backwards, with gradients and
//            finish.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <hoist/zero/engine.hpp>

#include "kernels.hpp"
#include "text.hpp"

namespace hoist::gpt {

struct ModelOptions {
  int layers = 2;
  int width = 64;
  int heads = 2;
  int context = 32;
  int batch = 4;                     // sequences per rank and micro-batch
  int held_micro_batches = 1;        // that a pass may hold: more than one in vertical order
  std::uint64_t seed = 1;            // of the initial weights
  unsigned threads = 0;              // of the kernels; 0: every CPU the process may use
  DType matrix_dtype = DType::bf16;  // or fp16; fp32 lets a test compare with finite differences
};

class Model {
 public:
  static constexpr int kVocabulary = 256;

  // Declares units and groups on `engine`; `defaults` is the optimizer setting of group 0. Call before
  // engine.initialize(initial_values()) or engine.restore().
  // Errors: UsageError on a CUDA device (these kernels are CPU code), BudgetError when activations do not fit.
  Model(Runtime& runtime, Engine& engine, const ModelOptions& options, const GroupOptions& defaults);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // GPT-2's: normal with deviation 0.02, projections back into the residual scaled by 1/sqrt(2 * layers); norms 1,
  // biases 0.
  Fill initial_values() const;

  // [C] One pass over the batch; the mean cross-entropy of this rank's part, in nats. train leaves the gradients in
  // the engine for step().
  double train(const Batch& batch, PassOptions options = {});
  // [C] One pass over all micro-batches of a step, in vertical order; the mean of their losses.
  double train(std::span<const Batch> micro_batches);
  double evaluate(const Batch& batch);

  // For both groups, at the next step().
  void set_learning_rate(double learning_rate);

  const ModelOptions& options() const { return options_; }
  std::uint64_t device_bytes() const { return device_bytes_; }  // of activations and work buffers
  std::uint64_t activation_bytes() const { return memory_.bytes().size(); }
  // Time kernels have run.
  Nanoseconds compute_time() const { return compute_time_; }

 private:
  class UnitBuilder;
  struct Block;         // the ids of one block's parameters
  struct BlockWeights;  // where they were gathered
  struct BlockGradients;
  struct HeadWeights;
  struct HeadGradients;
  struct Workspace;  // pointers into memory_
  struct Kept;       // of them, what each micro-batch keeps

  void declare(const GroupOptions& defaults);
  Block declare_block(int layer);
  Workspace carve(std::byte* base, std::uint64_t& bytes) const;
  void check(const Batch& batch) const;
  double run(std::span<const Batch> micro_batches, Pass pass, PassOptions options);

  // On the caller's thread: gather, enqueue for each micro-batch, release.
  void embed(std::span<const Batch> micro_batches);
  void embed_backward(std::span<const Batch> micro_batches);
  void block_forward(int layer, std::size_t count);
  void block_backward(int layer, std::size_t count);
  void head(std::span<const Batch> micro_batches, Pass pass);
  void enqueue(const char* what, std::function<void()> work);

  // On the stream's worker: kernels between buffers of the workspace.
  void compute_to_hidden(const float* input, const BlockWeights& weights);
  void first_norm(const float* input, const BlockWeights& weights);
  void feed_forward_backward(float* gradient, const BlockWeights& weights, const BlockGradients& gradients);
  void attention_branch_backward(const float* input, float* gradient, const BlockWeights& weights,
                                 const BlockGradients& gradients);
  void head_forward(Kept& kept, const std::uint8_t* targets, const HeadWeights& weights, float loss_scale);
  void head_backward(const Kept& kept, const HeadWeights& weights, const HeadGradients& gradients);

  Index rows() const { return static_cast<Index>(options_.batch) * options_.context; }
  AttentionShape attention_shape() const;
  EmbeddingShape embedding_shape() const { return {.batch = options_.batch, .context = options_.context}; }

  Runtime& runtime_;
  Engine& engine_;
  const ModelOptions options_;
  GroupId no_decay_{};
  UnitId embed_{}, head_{};
  ParameterId token_embedding_{}, position_embedding_{}, norm_weight_{}, norm_bias_{};
  std::vector<Block> blocks_;
  UpdatePool pool_;
  std::uint64_t device_bytes_ = 0;
  tiers::DeviceBlock memory_;
  std::unique_ptr<Workspace> work_;
  Nanoseconds compute_time_{0};               // written by the stream's worker, read after synchronize()
  std::unique_ptr<platform::Stream> stream_;  // last: its worker ends before what it uses
};

}  // namespace hoist::gpt
