// SPDX-License-Identifier: Apache-2.0
// zero/passes/gradients.hpp - gradients on their way down: accumulated on the device, reduced over ranks, copied to
// where the update reads them. GradientArrivals has them from there.
//
// If a step has several micro-batches in horizontal order, this rank's shards of the gradients are fp32 sums in memory,
// to which each pass adds. In vertical order one pass holds all micro-batches: they are added up in fp32 in the buffer,
// and their mean, rounded once to the parameter's type, is reduced and comes down.
//
// Gradients of units whose state is in device memory stay there.
//
// Threading  The program's thread calls everything; the executor submits reductions.
// Errors     BudgetError when more units have unfinished gradients than there are buffers.
// Main path  buffer(unit) -> zeroed device memory -> finish -> reduce-scatter -> copy down -> shards.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/scheduler/executor.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/passes/accumulator.hpp>
#include <hoist/zero/passes/gradient_arrivals.hpp>
#include <hoist/zero/passes/streams.hpp>
#include <hoist/zero/ranks/abort_notifier.hpp>
#include <hoist/zero/update/update_queue.hpp>

namespace hoist::detail {

class Gradients {
 public:
  Gradients(Runtime& runtime, const EngineOptions& options, const UnitTable& table, const Memory& memory,
            GradientSpill* spill, scheduler::Executor& executor, Streams& streams, UpdateQueue& updates,
            AbortNotifier& abort_notifier);

  // The unit's gradient buffer of this pass, laid out as place() says; zeroed on `stream` when it is the first request.
  // If the unit's buffer was last requested on another stream, `stream` first waits for the work that is now enqueued
  // on that one. The stream outlives finish() or clear().
  std::byte* buffer(UnitId unit, StreamRef stream);
  // Where in a buffer the program of the pass under way adds to a segment's gradient, and as what.
  struct Place {
    std::uint64_t offset_bytes = 0;
    DType dtype = DType::bf16;
  };
  Place place(const Segment& segment) const;
  // Reduces the gradient and brings this rank's shards down, once the work on `stream` so far is done.
  void finish(UnitId unit, StreamRef stream);
  bool finished(UnitId unit) const { return states_[unit.index].finished; }

  struct PassOfStep {
    bool first = true, last = true;
    int micro_batches = 1;  // that the pass holds; more than one in vertical order only
  };
  // Forgets what was finished, but, unless this is the first pass of a step, not the sums so far.
  void begin_pass(const PassOfStep& pass);
  // What happens to them when they have come down.
  GradientArrivals& arrivals() { return arrivals_; }
  // Returns when the device has made the last gradient that was finished, or failed to.
  void await_made() noexcept;
  // Returns when every finished gradient has arrived, and is handed on, and no dropped one is still being made. Pre:
  // executor drained.
  void wait();
  // Forgets the gradients; buffers become free as their last use ends.
  void clear();
  // Forgets those of the pass under way, which has finished none, and keeps the sums of the micro-batches before it.
  void clear_pass();
  bool finished_any() const {
    return std::ranges::any_of(states_, [](const State& state) { return state.finished; });
  }

 private:
  // One reduction, shared between the program's thread and the executor.
  struct Reduction {
    Completion submitted;               // the members of `arrival` are set before it
    GradientArrivals::Arrival arrival;  // the buffer is free when it has come down
  };
  struct Buffer {
    std::byte* data = nullptr;
    bool busy = false;                     // between the first request and finish()
    std::shared_ptr<Reduction> reduction;  // the last one out of it
    platform::StreamEvent dropped;         // end of a use that was never finished
  };
  struct State {
    Buffer* buffer = nullptr;  // of the pass under way
    platform::Stream* stream = nullptr;
    std::shared_ptr<Reduction> reduction;
    bool finished = false;
    bool summed = false;  // an earlier micro-batch's gradient of the step has arrived
  };
  Buffer& acquire(UnitId unit);
  void drop_buffer(State& state);
  void take_mean(const Unit& unit, std::byte* buffer, StreamRef stream) const;
  void reduce(UnitId unit, std::byte* source, const platform::StreamEvent& ready, optim::Accumulate how,
              GradientArrivals::Arrival& arrival);
  void bring_down(UnitId unit, const std::byte* source, std::byte* shards);
  void sum_in_memory(UnitId unit, const std::byte* source, std::byte* sums, optim::Accumulate how,
                     GradientArrivals::Arrival& arrival);
  const std::byte* own_shard(const Segment& segment, const std::byte* source) const;

  Runtime& runtime_;
  const bool reduces_;  // over the ranks
  const UnitTable& table_;
  const Memory& memory_;
  scheduler::Executor& executor_;
  Streams& streams_;
  UpdateQueue& updates_;
  AbortNotifier& abort_notifier_;
  std::unique_ptr<Accumulator> accumulator_;  // null where steps have one micro-batch, or gradients stay on the device
  int micro_batches_in_pass_ = 1;             // micro-batches of the pass under way
  bool completes_step_ = true;                // the pass under way
  std::vector<State> states_;
  std::vector<Buffer> shared_;       // any unit
  std::vector<Buffer> own_;          // by unit; data is null for units that share
  platform::StreamEvent last_made_;  // of the last finish()
  GradientArrivals arrivals_;
};

}  // namespace hoist::detail
