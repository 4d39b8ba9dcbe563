// SPDX-License-Identifier: Apache-2.0
// zero/passes/gradients.hpp - gradients on their way down: accumulated on the device, reduced over ranks, copied to
// where the update reads them.
//
// If a step has several micro-batches in horizontal order, this rank's shards of the gradients are fp32 sums in memory,
// to which each pass adds. In vertical order one pass holds all micro-batches: they are added up in fp32 in the buffer,
// and their mean, rounded once to the parameter's type, is reduced and comes down.
//
// Gradients of units whose state is in device memory stay there.
//
// A spilled gradient passes through a ring of pinned memory to NVMe, from where the update reads it. Fp32 sums come
// back into the ring for each micro-batch after the first. In the pass that completes a step the gradient is summed up
// for the norm on its way, so that clipping needs no other read.
//
// Update mode `backward`: in the pass that completes a step, a gradient that arrives on the host is summed up for the
// norm and handed on at once. (No gradient is spilled then.) Units then share a ring for their gradients, unless sums
// must outlive a pass: a gradient lies in the ring from its arrival to the end of its unit's update.
//
// Threading  The program's thread calls everything; the executor submits reductions; a thread of this object hands
//            gradients on, or to NVMe. The recipient of a gradient reads shards() of its unit until its update ends.
// Errors     BudgetError when more units have unfinished gradients than there are buffers.
// Main path  buffer(unit) -> zeroed device memory -> finish -> reduce-scatter -> copy down -> shards.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <hoist/optim_cpu/update_pool.hpp>
#include <hoist/scheduler/executor.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/passes/accumulator.hpp>
#include <hoist/zero/passes/gradient_norm.hpp>
#include <hoist/zero/passes/gradient_ring.hpp>
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
  // Who gets gradients as they arrive.
  struct Recipient {
    // Called once, before the others. Runs on the arrivals thread, as `take` and `withdraw` do.
    std::function<void()> open;
    // Runs on the executor, between what was submitted before the unit's reduction and what comes after it. After it,
    // the unit will be taken or withdrawn.
    std::function<void(UnitId)> announce;
    // Starts the unit's update; units come in the order of arrival. The gradient is in use until the returned
    // completion is done.
    std::function<Completion(UnitId)> take;
    // Called instead of `take`: with the error that the gradient failed with, or null if it is not finite.
    std::function<void(UnitId, std::exception_ptr)> withdraw;
  };
  // From the next finish() on until clear(), gradients that come to the host are handed on. Each waits until it has
  // been added to its own unit's sums; those of other units may still be on their way. Pre: made for update mode
  // `backward`.
  void hand_on(Recipient recipient);
  // Returns when the last `open` has ended. Errors: its.
  void await_opened();
  // Nothing more is handed on. Pre: executor drained.
  void await_handed_on() noexcept;
  // This rank's shards of a unit's gradient; null if it is spilled.
  const std::byte* shards(UnitId unit) const { return shards_[unit.index]; }
  // Returns when the device has made the last gradient that was finished, or failed to.
  void await_made() noexcept;
  // Returns when every finished gradient has arrived, and is handed on, and no dropped one is still being made. Pre:
  // executor drained.
  void wait();
  // This rank's sum of squares over parameters that count in the norm, in unit, segment and chunk order. Infinity if
  // any gradient has an element that is not finite, also of a parameter that does not count in the norm.
  double sum_of_squares();
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
    Completion submitted;
    platform::StreamEvent arrived;  // the gradient has come down, the buffer is free; set before `submitted`
    Completion added;               // to the sums of the micro-batches before it
    bool hand_on = false;           // set by finish()
    bool completes_step = false;    // likewise
    Completion handed_on;
    Completion spilling;  // summed up for the norm, and on its way to NVMe
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
              Reduction& reduction);
  void bring_down(UnitId unit, const std::byte* source, std::byte* shards);
  void sum_in_memory(UnitId unit, const std::byte* source, std::byte* sums, optim::Accumulate how,
                     Reduction& reduction);
  std::function<void()> reads_sums(UnitId unit, std::byte* sums);
  void enqueue_spill(UnitId unit, const std::byte* shards, Reduction& reduction);
  const std::byte* own_shard(const Segment& segment, const std::byte* source) const;
  bool in_ring(UnitId unit) const;
  bool is_summed_on_arrival(UnitId unit) const;
  void enqueue_hand_on(UnitId id, Reduction& reduction);
  Completion hand_on_now(UnitId id);

  Runtime& runtime_;
  const bool reduces_;  // over the ranks
  const UnitTable& table_;
  const Memory& memory_;
  GradientSpill* const spill_;  // null unless some gradients are spilled
  scheduler::Executor& executor_;
  Streams& streams_;
  UpdateQueue& updates_;
  AbortNotifier& abort_notifier_;
  std::unique_ptr<Accumulator> accumulator_;  // null where steps have one micro-batch, or gradients stay on the device
  int micro_batches_in_pass_ = 1;             // micro-batches of the pass under way
  bool completes_step_ = true;                // the pass under way
  std::vector<State> states_;
  std::vector<Buffer> shared_;      // any unit
  std::vector<Buffer> own_;         // by unit; data is null for units that share
  std::vector<std::byte*> shards_;  // by unit; where there is a ring, of the last gradient that came down
  GradientNorm norm_;
  std::vector<UnitId> left_;         // in sum_of_squares(); kept for its memory
  platform::StreamEvent last_made_;  // of the last finish()
  std::optional<GradientRing> ring_;
  std::vector<Completion> spilling_;               // by unit, of its last reduction. The executor's
  Recipient recipient_;                            // of the last step that handed on
  bool handing_on_ = false;                        // the gradients that finish() takes
  Completion opened_;                              // of the last `open`
  std::unique_ptr<scheduler::Executor> arrivals_;  // null unless gradients are handed on, or spilled
};

}  // namespace hoist::detail
