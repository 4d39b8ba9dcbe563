// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/zero/passes/accumulator.hpp>

namespace hoist::detail {

namespace {

// The elements that one thread adds at a time: 384 KiB of sums and bf16 gradients, within an L2 of 512 KiB
// or more.
constexpr std::uint64_t kPieceElements = 65536;

}  // namespace

Accumulator::Accumulator(Runtime& runtime, std::span<const std::span<std::byte>> buffers) : runtime_(runtime) {
  for (const auto& bytes : buffers) buffers_.push_back({.data = bytes.data()});
}

std::byte* Accumulator::acquire() {
  next_ = (next_ + 1) % buffers_.size();
  buffers_[next_].idle.wait();
  return buffers_[next_].data;
}

Completion Accumulator::add(platform::StreamEvent arrived, std::vector<Part> parts, optim::Accumulate how,
                            std::function<void()> bring_sums) {
  Completion done = thread_.enqueue(
      [this, arrived = std::move(arrived), parts = std::move(parts), how, bring_sums = std::move(bring_sums)] {
        if (bring_sums) bring_sums();
        arrived.wait();
        add_now(parts, how);
      });
  buffers_[next_].idle = done;
  return done;
}

void Accumulator::add_now(const std::vector<Part>& parts, optim::Accumulate how) {
  for (const Part& part : parts) {
    runtime_.update_pool().run(divide_up(part.count, kPieceElements), [&](std::size_t piece) {
      const std::uint64_t first = piece * kPieceElements;
      optim::accumulate_gradient(part.sums + first, part.gradient + first * dtype_bytes(part.dtype), part.dtype,
                                 std::min(kPieceElements, part.count - first), how);
    });
  }
}

}  // namespace hoist::detail
