// SPDX-License-Identifier: Apache-2.0
// examples/gpt/model.hpp - a byte-level GPT whose state is kept by a hoist::Engine, layer by layer.
//
// Units: "embed" (token and position embedding), "block.0" ... "block.L-1", "head" (final norm; tied to the token
// embedding). Matrices are bf16, or fp16 with a scaled loss, with weight decay, norms and biases fp32 without: two
// segments, two groups.
//
// The kernels run on the CPU, and read gathered weights where they are. So the device must be one whose memory the CPU
// can read: the host device.
//
// Threading  One thread. It only enqueues: kernels run in order on the compute stream, and the host runs ahead.
// Memory     One block of the device arena, taken at construction. ActivationPolicy chooses what a pass keeps for
//            the backward pass; everything else is one block's worth of one micro-batch.
// Main path  train -> (gather, enqueue per micro-batch, release) per unit -> the same backwards, with gradients and
//            finish. Mathematics: kernels.hpp.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include <hoist/zero/engine.hpp>

#include "block_inputs.hpp"
#include "kernels.hpp"
#include "text.hpp"

namespace hoist::gpt {

inline constexpr const char* kComputesOnCpu =
    "hoist-gpt computes on the CPU; set hoist.device to \"host\", or train on the GPU from PyTorch (docs/pytorch.md)";

// The values of a block that are stored for the backward pass. The result is the same, bit by bit.
enum class ActivationPolicy : std::uint8_t {
  recompute,  // its input; the rest is computed again under the lease that it needs anyway
  keep,       // everything: most device memory, 18 % fewer operations (8 of 44 width^2 a layer are the second time)
  offload,    // as recompute, but inputs wait in pinned memory: least device memory
};

struct GptOptions {
  int layers = 2;
  int width = 64;
  int heads = 2;
  int context = 32;
  int batch = 4;                     // sequences per rank and micro-batch
  int held_micro_batches = 1;        // that a pass may hold: more than one in vertical order
  std::uint64_t seed = 1;            // of the initial weights
  unsigned threads = 0;              // of the kernels; 0: every CPU the process may use
  DType matrix_dtype = DType::bf16;  // or fp16; fp32 lets a test compare with finite differences
  ActivationPolicy activations = ActivationPolicy::recompute;
};

class Gpt {
 public:
  static constexpr int kVocabulary = 256;

  // Declares the model and takes memory for activations. `engine`: the options of the engine that will train it.
  // Errors: UsageError for a device whose memory the CPU cannot read, BudgetError when activations do not fit.
  Gpt(Runtime& runtime, const EngineOptions& engine, const GptOptions& options);
  ~Gpt();
  Gpt(const Gpt&) = delete;
  Gpt& operator=(const Gpt&) = delete;

  const Model& model() const { return model_; }  // what Engine::create() or restore() is to train
  // Pre for what follows: an engine of model(), which outlives the passes.
  void attach(Engine& engine) { engine_ = &engine; }

  // GPT-2's: normal with deviation 0.02, projections back into the residual scaled by 1/sqrt(2 * layers); norms 1,
  // biases 0.
  Initializer initial_values() const;

  // [C] One pass over the batch; the mean cross-entropy of this rank's part, in nats. train leaves the gradients in
  // the engine for step().
  double train(const Batch& batch, PassOptions options = {});
  // [C] One pass over all micro-batches of a step, in vertical order; the mean of their losses.
  double train(std::span<const Batch> micro_batches);
  double evaluate(const Batch& batch);

  // For both groups, at the next step().
  void set_learning_rate(double learning_rate);

  const GptOptions& options() const { return options_; }
  std::uint64_t device_bytes() const { return device_bytes_; }  // of activations and work buffers
  // Time kernels have run.
  Nanoseconds compute_time() const { return compute_time_; }
  // Bytes of activations, moved down and up again since construction (ActivationPolicy::offload).
  std::uint64_t offloaded_bytes() const { return offloaded_bytes_; }

 private:
  class UnitBuilder;
  struct Layer;             // the ids of a layer's parameters
  struct Block;             // those of one block
  struct BlockWeights;      // where they were gathered
  struct BlockGradients;    // where their gradients are
  struct BlockActivations;  // what the way back needs of a block
  struct Workspace;         // pointers into memory_
  struct Kept;              // of them, what each micro-batch keeps

  void declare(const GroupOptions& defaults);
  Block declare_block(int layer);
  Workspace carve(std::byte* base, std::uint64_t& bytes) const;
  void check(const Batch& batch) const;
  double run(std::span<const Batch> micro_batches, Pass pass, PassOptions options);

  // On the caller's thread: gather, enqueue for each micro-batch, release.
  void embed(std::span<const Batch> micro_batches);
  void embed_backward(std::size_t count);
  void block_forward(int layer, std::size_t count);
  void block_backward(int layer, std::size_t count);
  void head(std::span<const Batch> micro_batches, Pass pass);

  // Does `work` on the compute stream and counts its time.
  void enqueue(const char* what, std::function<void()> work);

  // In enqueued work: between buffers of the workspace.
  void compute_to_wide(const float* input, const BlockActivations& block, const BlockWeights& weights);
  void feed_forward_backward(float* gradient, const BlockActivations& block, const BlockWeights& weights,
                             const BlockGradients& gradients);
  void attention_branch_backward(const float* input, float* gradient, const BlockActivations& block,
                                 const BlockWeights& weights, const BlockGradients& gradients);

  Index rows() const { return static_cast<Index>(options_.batch) * options_.context; }
  Index width() const { return options_.width; }
  KernelContext context();
  EmbeddingShape embedding_shape() const { return {.batch = options_.batch, .context = options_.context}; }
  AttentionShape attention_shape() const;
  BlockInputsOptions input_options() const;

  const GptOptions options_;
  Model model_;
  Engine* engine_ = nullptr;
  GroupId no_decay_{};
  UnitId embed_{}, head_{};
  ParameterId token_embedding_{}, position_embedding_{};
  std::vector<Block> blocks_;
  std::unique_ptr<Layer> head_norm_;
  std::uint64_t device_bytes_ = 0;
  std::uint64_t offloaded_bytes_ = 0;
  tiers::DeviceBlock memory_;
  std::unique_ptr<Workspace> work_;
  UpdatePool pool_;
  std::vector<double> losses_;  // by micro-batch; written by the stream's worker, as is the time
  Nanoseconds compute_time_{0};
  std::unique_ptr<platform::Stream> stream_;  // its work ends before what it uses
  std::unique_ptr<BlockInputs> inputs_;       // and their copies before the stream that they wait for
};

}  // namespace hoist::gpt
