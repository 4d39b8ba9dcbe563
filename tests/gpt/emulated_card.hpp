// SPDX-License-Identifier: Apache-2.0
// tests/gpt/emulated_card.hpp - a Card that is no card: the text of the kernels, block after block and thread after
// thread, in the order of a host stream, and products as plain loops.
//
// What it cannot show: the `__global__` wrappers and their launches, the five instructions of CardTeam, and cuBLASLt.
#pragma once

#include <memory>

#include <hoist/platform/stream.hpp>

#include "card/card.hpp"

namespace hoist::gpt::card {

class EmulatedCard final : public Card {
 public:
  EmulatedCard(platform::Stream& stream, DType activations) : stream_(stream), activations_(activations) {}

  void run(const char* what, std::function<void()> work) override { stream_.launch(what, std::move(work)); }
  Nanoseconds compute_time() override { return {}; }
  void launch(const Kernel& kernel) override;
  void multiply(const Product& product) override;
  void zero(void* target, std::uint64_t bytes) override;
  std::uint64_t workspace_bytes() const override { return 0; }
  void use_workspace(std::span<std::byte>) override {}

 private:
  platform::Stream& stream_;
  const DType activations_;
};

// Kernels by themselves; `backwards`: the last block and thread first.
void emulate(const Kernel& kernel, DType activations, bool backwards = false);

}  // namespace hoist::gpt::card
