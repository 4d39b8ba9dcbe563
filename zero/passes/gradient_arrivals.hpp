// SPDX-License-Identifier: Apache-2.0
// zero/passes/gradient_arrivals.hpp - what happens to a gradient when it has come down: it is summed up for the norm,
// and is handed to its update or written to NVMe, on a thread of its own.
//
// A spilled gradient passes through a ring of pinned memory to NVMe, from where the update reads it. Fp32 sums come
// back into the ring for each micro-batch after the first. In the pass that completes a step the gradient is summed up
// for the norm on its way, so that clipping needs no other read.
//
// Update mode `backward`: in the pass that completes a step, a gradient that arrives on the host is summed up for the
// norm and handed on at once. (No gradient is spilled then.) Units then share a ring for their gradients, unless sums
// must outlive a pass: a gradient lies in the ring from its arrival to the end of its unit's update.
//
// Threading  The program's thread calls everything above "the executor". A thread of this object hands gradients on, or
//            to NVMe. The recipient of a gradient reads shards() of its unit until its update ends.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <hoist/scheduler/executor.hpp>
#include <hoist/zero/memory/gradient_spill.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/passes/gradient_norm.hpp>
#include <hoist/zero/passes/gradient_ring.hpp>
#include <hoist/zero/passes/streams.hpp>

namespace hoist::detail {

class GradientArrivals {
 public:
  GradientArrivals(Runtime& runtime, const EngineOptions& options, const UnitTable& table, const Memory& memory,
                   GradientSpill* spill, Streams& streams);

  // Who gets gradients as they arrive.
  struct Recipient {
    // Called once, before the others. Runs on the arrivals thread, as `take` and `withdraw` do.
    std::function<void()> open;
    // Runs on the executor, in the order of submission: gathers that were submitted later see that an update will come.
    // Afterwards the unit is taken or withdrawn.
    std::function<void(UnitId)> announce;
    // Starts the unit's update; units come in the order of arrival. The gradient is in use until the returned
    // completion is done.
    std::function<Completion(UnitId)> take;
    // Called instead of `take`: with the error that the gradient failed with, or null if it is not finite.
    std::function<void(UnitId, std::exception_ptr)> withdraw;
  };
  // From now on until stop_handing_on(), gradients that are finished, and come to the host, are handed on. Each waits
  // until it has been added to its own unit's sums; those of other units may still be on their way. Pre: made for
  // update mode `backward`.
  void hand_on(Recipient recipient);
  void stop_handing_on() { handing_on_ = false; }
  // Returns when the last `open` has ended. Errors: its.
  void await_opened();
  // Nothing more is handed on. Pre: executor drained.
  void await_handed_on() noexcept;
  // This rank's shards of a unit's gradient; null if it is spilled.
  const std::byte* shards(UnitId unit) const { return shards_[unit.index]; }
  // Whether a gradient of the unit, finished now, is handed on.
  bool hands_on(UnitId unit) const { return handing_on_ && !memory_.state_on_device(unit); }
  // This rank's sum of squares over parameters that count in the norm, in unit, segment and chunk order. Infinity if
  // any gradient has an element that is not finite, also of a parameter that does not count in the norm.
  double sum_of_squares();

  // --- the executor ---
  // One gradient on its way.
  struct Arrival {
    bool hand_on = false;
    bool completes_step = false;    // its pass does
    platform::StreamEvent reduced;  // over ranks; reached from the start if this object does not reduce
    platform::StreamEvent arrived;  // it has come down
    Completion added;               // to the sums of the micro-batches before it
    Completion handed_on;
    Completion spilling;  // summed up for the norm, and on its way to NVMe
  };
  // Where this rank's shards of the unit's gradient come down to. Waits for room if that is in the ring.
  std::byte* place(UnitId unit);
  // Starts to read the sums of a spilled gradient back to `sums`, as soon as they have been written. The result waits
  // until they are there, and verifies them.
  std::function<void()> start_reading_sums(UnitId unit, std::byte* sums);
  // Takes over what comes down to `shards`, and sets `handed_on` or `spilling`.
  void follow(UnitId unit, const std::byte* shards, Arrival& arrival);
  // Called instead of follow() if nothing comes down, inside of a handler for the reason.
  void fail(UnitId unit) { spilling_[unit.index] = Completion::failed(std::current_exception()); }

 private:
  bool in_ring(UnitId unit) const;
  bool is_summed_on_arrival(UnitId unit) const;
  void enqueue_spill(UnitId unit, const std::byte* shards, Arrival& arrival);
  void enqueue_hand_on(UnitId unit, Arrival& arrival);
  Completion hand_on_now(UnitId unit);

  const UnitTable& table_;
  const Memory& memory_;
  GradientSpill* const spill_;  // null unless some gradients are spilled
  Streams& streams_;
  std::vector<std::byte*> shards_;  // by unit; where there is a ring, of the last gradient that came down
  GradientNorm norm_;
  std::vector<UnitId> left_;  // in sum_of_squares(); kept for its memory
  std::optional<GradientRing> ring_;
  std::vector<Completion> spilling_;             // by unit, of its last reduction. The executor's
  Recipient recipient_;                          // of the last step that handed on
  bool handing_on_ = false;                      // the gradients that are finished
  Completion opened_;                            // of the last `open`
  std::unique_ptr<scheduler::Executor> thread_;  // null unless gradients are handed on, or spilled
};

}  // namespace hoist::detail
