// SPDX-License-Identifier: Apache-2.0
// zero/detail/gradients.hpp - gradients on their way down: accumulated on the device, reduced over ranks, copied home.
//
// Several micro-batches a step: in horizontal order home gradients are fp32 sums, added to as each comes down. In
// vertical order one pass holds them all; they are added up in fp32 in the buffer, and what is reduced and comes down
// is their mean, rounded once to the parameter's type.
//
// Threading  The program's thread calls everything; reductions are submitted by the executor.
// Errors     BudgetError when more units have unfinished gradients than there are buffers.
// Main path  buffer(unit) -> zeroed device memory -> finish -> reduce-scatter -> copy down -> home gradient.
#pragma once

#include <vector>

#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/scheduler/executor.hpp>
#include <hoist/zero/detail/accumulator.hpp>
#include <hoist/zero/detail/alarm.hpp>
#include <hoist/zero/detail/gatherer.hpp>
#include <hoist/zero/detail/memory.hpp>

namespace hoist::detail {

class Gradients {
 public:
  Gradients(Runtime& runtime, const UnitTable& table, const Memory& memory, scheduler::Executor& executor,
            Streams& streams, DeferredUpdate* deferred, Alarm& alarm);

  // The unit's gradient buffer of this pass, laid out as place() says; zeroed on `stream` when it is the first request.
  // A request on another stream than the one before makes it wait for what that one has to do so far. The stream
  // outlives finish() or clear().
  std::byte* buffer(UnitId unit, StreamRef stream);
  // Where in a buffer the program of the pass under way adds to a segment's gradient, and as what.
  struct Place {
    std::uint64_t offset_bytes = 0;
    DType dtype = DType::bf16;
  };
  Place place(const Segment& segment) const;
  // Reduces and copies home, once the work on `stream` so far is done.
  void finish(UnitId unit, StreamRef stream);
  bool finished(UnitId unit) const { return states_[unit.index].finished; }

  // Forgets what was finished, but, unless this is the `first` micro-batch of a step, not the sums so far. `held`:
  // micro-batches that the pass holds; more than one in vertical order only.
  void begin_pass(bool first, int held);
  // Returns when every finished gradient is at home and no dropped one is still being made. Pre: executor drained.
  void wait();
  // This rank's sum of squares over parameters that count in the norm, in unit, segment and chunk order; not a finite
  // number when any gradient, of whichever parameter, is none.
  double sum_of_squares();
  // Forgets the gradients; buffers become free as their last use ends.
  void clear();

 private:
  // One reduction, shared between the program's thread and the executor.
  struct Reduction {
    Completion submitted;
    platform::StreamEvent home;  // the gradient has come down, the buffer is free; set before `submitted`
    Completion added;            // to the sums of the micro-batches before it
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
    bool summed = false;  // an earlier micro-batch of the step is at home
  };
  struct Chunk {
    std::uint32_t unit = 0;
    const std::byte* data = nullptr;
    DType dtype = DType::bf16;
    std::size_t count = 0;
    bool in_norm = true;
  };
  Buffer& acquire(UnitId unit);
  void take_mean(const Unit& unit, std::byte* buffer, StreamRef stream) const;
  void reduce(UnitId unit, std::byte* source, const platform::StreamEvent& ready, optim::Accumulate how,
              Reduction& reduction);
  void bring_home(UnitId unit, const std::byte* source);
  void sum_at_home(UnitId unit, const std::byte* source, optim::Accumulate how, Reduction& reduction);
  const std::byte* own_shard(const Segment& segment, const std::byte* source) const;
  void list_chunks();
  void sum_on_device();  // partial_sums_

  Runtime& runtime_;
  const UnitTable& table_;
  const Memory& memory_;
  scheduler::Executor& executor_;
  Streams& streams_;
  DeferredUpdate* deferred_;  // null in update mode `step`
  Alarm& alarm_;
  std::unique_ptr<Accumulator> accumulator_;  // null where steps have one micro-batch, or gradients stay on the device
  int held_ = 1;                              // micro-batches of the pass under way
  std::vector<State> states_;
  std::vector<Buffer> shared_;  // any unit
  std::vector<Buffer> own_;     // by unit; data is null for units that share
  std::vector<Chunk> chunks_;
  std::vector<double> partial_sums_;  // by chunk
};

}  // namespace hoist::detail
