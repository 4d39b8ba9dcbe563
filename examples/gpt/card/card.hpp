// SPDX-License-Identifier: Apache-2.0
// examples/gpt/card/card.hpp - what carries out kernels and products on a compute stream: a card (cuda/), or, in tests,
// a loop over the threads of each block (tests/gpt/emulated_card.hpp).
//
// Threading  run() on the program's thread; launch and multiply in the work given to it.
// Errors     DeviceError.
#pragma once

#include <functional>
#include <span>
#include <variant>

#include <hoist/core/clock.hpp>

#include "arguments.hpp"

namespace hoist::gpt::card {

struct ForwardAttention {
  Attention attention;
};
struct BackwardAttention {
  Attention attention;
};

using Kernel = std::variant<FinishLinear, Gelu, CastWeights, Embed, OneHot, PositionGradient, NormForward, NormBackward,
                            ColumnSums, CrossEntropyRows, Mean, ForwardAttention, BackwardAttention>;

class Card {
 public:
  virtual ~Card() = default;
  Card(const Card&) = delete;
  Card& operator=(const Card&) = delete;

  // Does `work` in the order of the stream and counts its time.
  virtual void run(const char* what, std::function<void()> work) = 0;
  // Pre: the stream is synchronized.
  virtual Nanoseconds compute_time() = 0;

  virtual void launch(const Kernel& kernel) = 0;
  virtual void multiply(const Product& product) = 0;
  virtual void zero(void* target, std::uint64_t bytes) = 0;

  // Device memory that products work in.
  virtual std::uint64_t workspace_bytes() const = 0;
  virtual void use_workspace(std::span<std::byte> workspace) = 0;

 protected:
  Card() = default;
};

}  // namespace hoist::gpt::card
