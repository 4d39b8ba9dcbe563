// SPDX-License-Identifier: Apache-2.0
// examples/gpt/block_inputs.hpp - where the input of every block, and of the head, lies: what the backward pass begins
// a block with. All on the device, or in pinned memory but for a few (tiers/activation_offload.hpp).
//
// Threading  The program's thread: what is waited for is waited for by the compute stream.
// Memory     Device memory is the model's; pinned memory is taken at construction.
// Main path  forward: output_for -> compute -> leave; backward: bring -> compute.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <hoist/tiers/activation_offload.hpp>

namespace hoist {
class Runtime;
}

namespace hoist::gpt {

struct BlockInputsOptions {
  std::size_t layers = 0;
  std::size_t held_micro_batches = 1;
  std::uint64_t item_bytes = 0;  // of one input of one micro-batch
  bool offload = false;
};

class BlockInputs {
 public:
  BlockInputs(Runtime& runtime, const BlockInputsOptions& options);

  // Buffers on the device, each of item_bytes.
  static std::size_t buffer_count(const BlockInputsOptions& options);
  void use_buffers(std::vector<float*> buffers) { buffers_ = std::move(buffers); }

  // A pass over so many micro-batches; `comes_back`: a backward pass follows the forward pass.
  enum class Return : std::uint8_t { comes_back, never };
  void begin(std::size_t micro_batches, Return when);
  // Layer `layers` is the head. The buffer that the work enqueued next may write the input of `layer` to.
  float* output_for(std::size_t layer, std::size_t micro_batch, platform::StreamRef compute);
  // At the address from output_for.
  float* forward_input(std::size_t layer, std::size_t micro_batch) const;
  // The block was enqueued: its input may go.
  void leave(std::size_t layer, std::size_t micro_batch, platform::StreamRef compute);
  // The address of the input for the work that is enqueued next. In the order of the backward pass: from the last block
  // to the first, and in each all micro-batches.
  float* bring(std::size_t layer, std::size_t micro_batch, platform::StreamRef compute);

  // Moved down, and moved up, in a pass with a way back.
  std::uint64_t offloaded_bytes(std::size_t micro_batches) const;

 private:
  std::size_t item(std::size_t layer, std::size_t micro_batch) const { return layer * micro_batches_ + micro_batch; }
  void fetch(std::size_t turn, platform::StreamRef compute);
  const BlockInputsOptions options_;
  std::vector<float*> buffers_;
  std::optional<tiers::ActivationOffload> offload_;
  std::size_t micro_batches_ = 1;
  Return return_ = Return::comes_back;
  std::vector<platform::StreamEvent> leaving_;  // by buffer: until when it is read
  platform::StreamEvent arriving_[2];           // by turn of the backward pass, modulo 2
};

}  // namespace hoist::gpt
