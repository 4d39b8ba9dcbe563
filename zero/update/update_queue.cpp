// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <hoist/core/assert.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/thread.hpp>
#include <hoist/zero/update/update_queue.hpp>

namespace hoist::detail {

namespace {

// After so long without a request, the rest is updated unasked; its weights are then read twice.
constexpr Nanoseconds kIdleMax = std::chrono::seconds(5);

}  // namespace

UpdateQueue::UpdateQueue(TilePipeline& pipeline, const UnitTable& table, UpdateOrder order, WaitCause beside_updating)
    : pipeline_(pipeline),
      table_(table),
      order_(order),
      beside_updating_(beside_updating),
      states_(table.units().size()) {
  thread_ = start_thread("hoist-update", [this] { run(); });
}

UpdateQueue::~UpdateQueue() {
  stop();
  thread_.join();
}

void UpdateQueue::stop() noexcept {
  MutexLock lock(mutex_);
  stopping_ = true;
  ahead_.reset();
  changed_.notify_all();
  changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return !step_ && !reading_ahead_; });
}

void UpdateQueue::begin(Step step) {
  {
    const MutexLock lock(mutex_);
    HOIST_ASSERT(!step_ && !failure_, "a step begins before the last one was finished");
    for (std::uint32_t u = 0; u < states_.size(); ++u) {
      if (!table_.units()[u].is_trainable()) continue;
      states_[u].stage = Stage::pending;
      states_[u].promise.emplace();
      states_[u].updated = states_[u].promise->completion();
      ++unqueued_;
    }
    const std::vector<UnitId> expected = std::move(step.expected);
    ahead_.reset();
    step_ = std::move(step);
    if (order_ == UpdateOrder::expected) {
      for (const UnitId unit : expected)
        if (states_[unit.index].stage == Stage::pending) enqueue(unit, nullptr);
      enqueue_rest();
    }
  }
  changed_.notify_all();
}

void UpdateQueue::open(const WalkOptions& walk, TilePipeline::Work work) {
  {
    const MutexLock lock(mutex_);
    HOIST_ASSERT(!step_ && !failure_, "a step is opened before the last one was finished");
    step_ = Step{.walk = walk, .work = std::move(work), .expected = {}, .ended = {}};
    open_ = true;
  }
  changed_.notify_all();
}

void UpdateQueue::announce(UnitId unit) {
  const MutexLock lock(mutex_);
  UnitState& state = states_[unit.index];
  if (failure_) {
    state.updated = Completion::failed(failure_);
    return;
  }
  HOIST_ASSERT(state.stage == Stage::current, "unit {} is announced twice, or before its last update", unit.index);
  state.stage = Stage::announced;
  state.requested = false;
  state.promise.emplace();
  state.updated = state.promise->completion();
}

Completion UpdateQueue::offer(UnitId unit) {
  std::exception_ptr refusal;
  {
    const MutexLock lock(mutex_);
    UnitState& state = states_[unit.index];
    refusal = failure_;
    if (!refusal && (!step_ || stopping_)) refusal = std::make_exception_ptr(Error("the step was dropped"));
    if (!refusal) {
      HOIST_ASSERT(open_ && state.stage == Stage::announced, "unit {} is offered unannounced, or to no step",
                   unit.index);
      state.stage = Stage::queued;
      requests_.insert(state.requested ? requests_.begin() : requests_.end(), {unit, nullptr});
      changed_.notify_all();
      return state.updated;
    }
  }
  withdraw(unit, refusal);
  return Completion::failed(refusal);
}

void UpdateQueue::withdraw(UnitId unit, const std::exception_ptr& error) {
  std::optional<Promise> promise;
  {
    const MutexLock lock(mutex_);
    UnitState& state = states_[unit.index];
    if (state.stage != Stage::announced) return;  // the step failed first
    state.stage = Stage::current;
    promise = std::exchange(state.promise, std::nullopt);
  }
  promise->settle(error);
}

void UpdateQueue::conclude(Ended ended, std::span<const UnitId> expected) {
  const MutexLock lock(mutex_);
  HOIST_ASSERT(step_ && open_, "no step is open");
  std::ranges::stable_sort(requests_, {}, [&](const UpdateRequest& request) {
    return std::ranges::find(expected, request.unit) - expected.begin();
  });
  step_->ended = std::move(ended);
  open_ = false;
  changed_.notify_all();
}

void UpdateQueue::check() const {
  const MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void UpdateQueue::read_ahead(const WalkOptions& walk, std::vector<UnitId> units) {
  const MutexLock lock(mutex_);
  if (failure_ || stopping_) return;
  ahead_ = Ahead{.walk = walk, .units = std::move(units)};
  changed_.notify_all();
}

Completion UpdateQueue::updated(UnitId unit) const {
  const MutexLock lock(mutex_);
  return states_[unit.index].updated;
}

Completion UpdateQueue::weights_written(UnitId unit) const {
  const Completion now = updated(unit);
  if (now.done()) return now.error() ? now : pipeline_.weights_written(unit);
  return followed_by(now, [unit, pipeline = &pipeline_] { return pipeline->weights_written(unit); });
}

std::optional<Completion> UpdateQueue::request_weights(UnitId unit, std::byte* target) {
  const MutexLock lock(mutex_);
  if (states_[unit.index].stage != Stage::pending) return std::nullopt;
  enqueue(unit, target);
  changed_.notify_all();
  return states_[unit.index].updated;
}

Completion UpdateQueue::request(UnitId unit) {
  const MutexLock lock(mutex_);
  if (states_[unit.index].stage == Stage::pending) {
    enqueue(unit, nullptr);
    changed_.notify_all();
  } else if (states_[unit.index].stage == Stage::announced) {
    states_[unit.index].requested = true;
  } else if (states_[unit.index].stage == Stage::queued) {
    const auto queued = std::ranges::find(requests_, unit, &UpdateRequest::unit);
    if (queued != requests_.end()) std::rotate(requests_.begin(), queued, queued + 1);  // out of the expected order
  }
  return states_[unit.index].updated;
}

void UpdateQueue::finish() {
  MutexLock lock(mutex_);
  HOIST_ASSERT(!open_, "a step is to be carried out that is not decided");
  enqueue_rest();
  ahead_.reset();
  changed_.notify_all();
  changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return !step_ && !reading_ahead_; });
  if (failure_) std::rethrow_exception(failure_);
}

void UpdateQueue::enqueue(UnitId unit, std::byte* target) {
  states_[unit.index].stage = Stage::queued;
  requests_.push_back({unit, target});
  --unqueued_;
}

void UpdateQueue::enqueue_rest() {
  for (std::uint32_t u = 0; u < states_.size() && unqueued_ > 0; ++u)
    if (states_[u].stage == Stage::pending) enqueue(UnitId{u}, nullptr);
}

void UpdateQueue::run() {
  pipeline_.bind_thread();
  MutexLock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return step_ || ahead_ || stopping_; });
    if (step_) {
      const Step& step = *step_;  // how it ends may still be decided meanwhile, nothing else
      lock.unlock();
      carry_out(step);
      lock.lock();
      continue;
    }
    if (!ahead_) return;
    const Ahead ahead = *std::exchange(ahead_, std::nullopt);
    reading_ahead_ = true;
    lock.unlock();
    pipeline_.read_ahead(ahead.walk, ahead.units);
    lock.lock();
    reading_ahead_ = false;
    changed_.notify_all();
  }
}

void UpdateQueue::carry_out(const Step& step) {
  std::exception_ptr error;
  try {
    pipeline_.run(
        step.walk, step.work, [this](bool wait) { return next(wait); }, [this](UnitId unit) { unit_updated(unit); });
    const MutexLock lock(mutex_);
    if (unqueued_ > 0 || !requests_.empty() || open_)
      throw Error("the engine ended before its last step was carried out");
  } catch (...) {
    error = std::current_exception();
  }
  // Waiting threads get the error before this thread waits for other ranks.
  if (error) fail_pending(error);
  try {
    if (const Ended ended = conclusion()) ended(error);
  } catch (...) {
    if (!error) error = std::current_exception();
  }
  const MutexLock lock(mutex_);
  failure_ = error;
  step_.reset();
  open_ = false;
  changed_.notify_all();
}

// The result of the step; nothing when it was dropped before it was decided. A step that failed early waits for the
// decision.
UpdateQueue::Ended UpdateQueue::conclusion() {
  MutexLock lock(mutex_);
  changed_.wait(lock, [&]() HOIST_REQUIRES(mutex_) { return !open_ || stopping_; });
  return std::move(step_->ended);
}

// The unit to update next. If none is queued, waits for a request unless there is other work.
std::optional<UpdateRequest> UpdateQueue::next(bool wait) {
  MutexLock lock(mutex_);
  while (requests_.empty() || stopping_) {
    if (!wait || stopping_ || (unqueued_ == 0 && !open_)) return std::nullopt;
    if (open_)
      changed_.wait(lock);
    else if (!changed_.wait_for(lock, kIdleMax,
                                [&]() HOIST_REQUIRES(mutex_) { return !requests_.empty() || stopping_; }))
      enqueue_rest();
  }
  const UpdateRequest request = requests_.front();
  requests_.pop_front();
  return request;
}

void UpdateQueue::unit_updated(UnitId unit) {
  std::optional<Promise> promise;
  {
    const MutexLock lock(mutex_);
    states_[unit.index].stage = Stage::current;
    promise = std::exchange(states_[unit.index].promise, std::nullopt);
  }
  promise->complete();
}

void UpdateQueue::fail_pending(const std::exception_ptr& error) {
  std::vector<Promise> unfulfilled;
  {
    const MutexLock lock(mutex_);
    failure_ = error;
    for (UnitState& state : states_) {
      if (!state.promise) continue;
      unfulfilled.push_back(std::move(*state.promise));
      state.promise.reset();
      state.stage = Stage::queued;  // for ever: nobody can ask for it again
    }
    requests_.clear();
    unqueued_ = 0;
  }
  for (Promise& promise : unfulfilled) promise.fail(error);
}

}  // namespace hoist::detail
