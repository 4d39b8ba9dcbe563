// SPDX-License-Identifier: Apache-2.0
// zero/passes/accumulator.hpp - gradients of several micro-batches, added up in pinned memory.
//
// A unit's gradient comes down in its own type into one of two buffers; a thread adds it to the fp32 sums, in
// the order in which gradients were finished. The first micro-batch overwrites.
//
// Threading  acquire() and add() from one thread, the executor; completions from any.
// Errors     What the copy failed with fails the completion, and those after it.
// Main path  acquire -> copy down -> add(arrived) -> [thread] wait, add in parallel -> the buffer is free again.
#pragma once

#include <array>
#include <functional>
#include <span>
#include <vector>

#include <hoist/optim_cpu/accumulate.hpp>
#include <hoist/platform/stream.hpp>
#include <hoist/scheduler/executor.hpp>
#include <hoist/zero/runtime.hpp>

namespace hoist::detail {

class Accumulator {
 public:
  // `buffers`: each as large as the largest unit's shard of gradients.
  Accumulator(Runtime& runtime, std::span<const std::span<std::byte>> buffers);

  // A buffer that nothing uses any more; waits for one.
  std::byte* acquire();

  struct Part {
    float* sums = nullptr;
    const std::byte* gradient = nullptr;  // within the buffer
    DType dtype = DType::bf16;
    std::uint64_t count = 0;
  };
  // Adds the parts, which lie in the buffer that acquire() gave last, once `arrived` is reached. `bring_sums`, if any,
  // runs first: it returns when the sums are in memory.
  Completion add(platform::StreamEvent arrived, std::vector<Part> parts, optim::Accumulate how,
                 std::function<void()> bring_sums = {});

 private:
  struct Buffer {
    std::byte* data = nullptr;
    Completion idle;
  };
  void add_now(const std::vector<Part>& parts, optim::Accumulate how);

  Runtime& runtime_;
  std::vector<Buffer> buffers_;
  std::size_t next_ = 0;
  scheduler::Executor thread_{"hoist-sums"};
};

}  // namespace hoist::detail
