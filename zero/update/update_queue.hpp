// SPDX-License-Identifier: Apache-2.0
// zero/update/update_queue.hpp - units that wait for their update, in every update mode. One thread updates them.
//
// begin() queues all units of a decided step. With UpdateOrder::expected they are updated in the order in which the
// next pass wants them. With UpdateOrder::on_request a unit waits for request_weights(), which also leaves its new
// weights where the caller wants them, so that one read serves update and forward; finish() updates the rest, and so
// does a while without a request, because a program may wait for the commit without another pass.
//
// open() begins a step that is not decided yet (update mode `backward`): offer() hands over each unit whose gradient is
// final, and conclude() says that there are no more. A unit is announced before it is offered, and from then on whoever
// wants its weights waits.
//
// Threading  Any thread, but callers see to it that begin(), open() and finish() do not overlap. Only two finish() may:
//            a save's and that of a read(). The program's thread calls begin() and finish(), the thread of a save
//            finish(), and in mode `backward` the thread that hands gradients on finish() and open().
// Errors     An update that fails fails every unit that is still pending, and finish().
// Main path  begin(step) -> request_weights(unit) or the expected order -> TilePipeline::run -> updated(unit) -> ended.
//            open(work), announce(unit) -> offer(unit) -> TilePipeline::run -> updated(unit); conclude(ended) -> ended.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include <hoist/core/mutex.hpp>
#include <hoist/zero/layout/step_rules.hpp>
#include <hoist/zero/update/tile_pipeline.hpp>

namespace hoist::detail {

class UpdateQueue {
 public:
  // `beside_updating`: the cause of a wait for an update while no update's arithmetic runs.
  UpdateQueue(TilePipeline& pipeline, const UnitTable& table, UpdateOrder order, WaitCause beside_updating);
  ~UpdateQueue();  // drops what is pending
  UpdateQueue(const UpdateQueue&) = delete;
  UpdateQueue& operator=(const UpdateQueue&) = delete;

  // On this object's thread, when the last unit was updated and its writes were started, or the first one failed.
  // An exception from it counts like the failure of an update.
  using Ended = std::function<void(std::exception_ptr)>;
  struct Step {
    WalkOptions walk;
    TilePipeline::Work work;
    std::vector<UnitId> expected;  // the order of the next pass, as far as it is known
    Ended ended;
  };
  // Pre: finish() returned since the last step.
  void begin(Step step);

  // A step without any unit yet. Pre: as begin().
  void open(const WalkOptions& walk, TilePipeline::Work work);
  // The unit will be offered, or withdrawn: updated(unit) waits for that. Pre: its last update is done.
  void announce(UnitId unit);
  // The unit's gradient is final: updates it after those offered before. Done when its tiles are computed and its
  // writes started: the gradient is not looked at any more. Failed when the step has failed or was dropped.
  // Pre: announced, and the step is open.
  Completion offer(UnitId unit);
  // An announced unit is not offered, because of an error or (null) because it stays as it is.
  void withdraw(UnitId unit, const std::exception_ptr& error);
  // Nothing more will be offered. The remaining units are updated in the order in which the next pass will want them,
  // as far as that is known. Pre: open(), and neither conclude() nor stop() since.
  void conclude(Ended ended, std::span<const UnitId> expected);
  // Throws what any update of the step failed with so far.
  void check() const;
  // As soon as no step is under way, fills the pipeline's buffers for the next one (TilePipeline::read_ahead). Reads
  // that have not begun when finish() or the next step comes are forgotten.
  void read_ahead(const WalkOptions& walk, std::vector<UnitId> units);

  // Done when the unit's weights are those of the last step that was begun.
  Completion updated(UnitId unit) const;
  // Done when, moreover, the store has those weights.
  Completion weights_written(UnitId unit) const;
  // Updates a pending unit soon and also leaves its trainable weights, in host layout, at `target`. Null when the unit
  // is not pending, or somebody else asked first: its weights are in the store, or will be once updated(unit) is done.
  std::optional<Completion> request_weights(UnitId unit, std::byte* target);
  // Updates a pending unit soon; for those who do not want its weights.
  Completion request(UnitId unit);
  // Carries out all that is pending. Throws what any update failed with. Pre: no step is open.
  void finish();
  // Drops what is pending and was not started; returns when nothing runs any more. For an engine that has failed.
  void stop() noexcept;

  // How long arithmetic of updates has run so far: so much of a wait is for that, the rest for beside_updating().
  Nanoseconds busy() const { return pipeline_.busy(); }
  WaitCause beside_updating() const { return beside_updating_; }

 private:
  enum class Stage : std::uint8_t { current, announced, pending, queued };
  struct UnitState {
    Stage stage = Stage::current;
    bool requested = false;          // while announced
    std::optional<Promise> promise;  // while not current
    Completion updated;
  };
  struct Ahead {
    WalkOptions walk;
    std::vector<UnitId> units;
  };
  void run();
  void carry_out(const Step& step);
  Ended conclusion();
  void enqueue(UnitId unit, std::byte* target) HOIST_REQUIRES(mutex_);
  void enqueue_rest() HOIST_REQUIRES(mutex_);
  std::optional<UpdateRequest> next(bool wait);
  void fail_pending(const std::exception_ptr& error);
  void unit_updated(UnitId unit);

  TilePipeline& pipeline_;
  const UnitTable& table_;
  const UpdateOrder order_;
  const WaitCause beside_updating_;
  mutable Mutex mutex_;
  ConditionVariable changed_;
  std::vector<UnitState> states_ HOIST_GUARDED_BY(mutex_);
  std::deque<UpdateRequest> requests_ HOIST_GUARDED_BY(mutex_);
  std::size_t unqueued_ HOIST_GUARDED_BY(mutex_) = 0;    // pending units that nobody has asked for
  std::optional<Step> step_ HOIST_GUARDED_BY(mutex_);    // under way
  bool open_ HOIST_GUARDED_BY(mutex_) = false;           // more may be offered
  std::optional<Ahead> ahead_ HOIST_GUARDED_BY(mutex_);  // to be read, once there is no step
  bool reading_ahead_ HOIST_GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ HOIST_GUARDED_BY(mutex_);
  bool stopping_ HOIST_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace hoist::detail
