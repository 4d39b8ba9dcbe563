// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <exception>
#include <vector>

#include <hoist/core/assert.hpp>
#include <hoist/core/completion.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/core/owning_process.hpp>

namespace hoist {

struct detail::CompletionState {
  const OwningProcess process;
  Mutex mutex;
  ConditionVariable changed;
  std::atomic<bool> done{false};  // written under the mutex; read without it by done()
  std::exception_ptr error;       // constant once done
  // Hardly any operation has a second one.
  Completion::Continuation first_continuation HOIST_GUARDED_BY(mutex);
  std::vector<Completion::Continuation> more_continuations HOIST_GUARDED_BY(mutex);
};

Completion Completion::failed(std::exception_ptr error) {
  Promise promise;
  Completion completion = promise.completion();
  promise.fail(std::move(error));
  return completion;
}

bool Completion::done() const noexcept { return !state_ || state_->done.load(std::memory_order_acquire); }

void Completion::wait() const {
  if (!state_) return;
  if (!done()) {
    state_->process.require_this("what is waited for");
    MutexLock lock(state_->mutex);
    state_->changed.wait(lock, [&] { return state_->done.load(std::memory_order_relaxed); });
  }
  if (state_->error) std::rethrow_exception(state_->error);
}

void Completion::wait_quietly() const noexcept {
  try {
    wait();
  } catch (...) {
  }
}

bool Completion::wait_for(std::chrono::nanoseconds timeout) const {
  if (!done()) {
    state_->process.require_this("what is waited for");
    MutexLock lock(state_->mutex);
    if (!state_->changed.wait_for(lock, timeout, [&] { return state_->done.load(std::memory_order_relaxed); }))
      return false;
  }
  if (state_ && state_->error) std::rethrow_exception(state_->error);
  return true;
}

std::exception_ptr Completion::error() const noexcept { return state_ && done() ? state_->error : nullptr; }

void Completion::then(Continuation continuation) const {
  if (state_) {
    MutexLock lock(state_->mutex);
    if (!state_->done.load(std::memory_order_relaxed)) {
      if (!state_->first_continuation) {
        state_->first_continuation = std::move(continuation);
      } else {
        state_->more_continuations.push_back(std::move(continuation));
      }
      return;
    }
  }
  continuation(error());
}

Promise::Promise() : state_(std::make_shared<detail::CompletionState>()) {}

Promise& Promise::operator=(Promise&& other) noexcept {
  HOIST_ASSERT(!state_ || state_->done, "a promise was overwritten before it was fulfilled");
  state_ = std::move(other.state_);
  return *this;
}

Promise::~Promise() {
  if (!state_ || state_->done) return;
  HOIST_ASSERT(std::uncaught_exceptions() > 0, "a promise was destroyed before it was fulfilled");
  try {
    throw Error("an exception dropped what was to complete this");
  } catch (...) {  // or what lacks the memory for that error
    fail(std::current_exception());
  }
}

void Promise::settle(std::exception_ptr error) noexcept {
  HOIST_ASSERT(state_ != nullptr, "a promise was fulfilled after it had been moved away");
  Completion::Continuation first;
  std::vector<Completion::Continuation> more;
  const std::shared_ptr<detail::CompletionState> state = state_;  // outlives a continuation that drops this promise
  {
    MutexLock lock(state->mutex);
    HOIST_ASSERT(!state->done.load(std::memory_order_relaxed), "a promise was fulfilled twice");
    state->error = error;
    state->done.store(true, std::memory_order_release);
    first.swap(state->first_continuation);
    more.swap(state->more_continuations);
    state->changed.notify_all();
  }
  if (first) first(error);
  for (auto& continuation : more) continuation(error);
}

namespace {

// The parts of a joined completion report here. The last part deletes it: a plain pointer fits into a continuation
// without memory of its own.
class Join {
 public:
  explicit Join(std::size_t count) : pending_(count), first_(count) {}
  Completion completion() const { return promise_.completion(); }
  void ended(std::size_t part, std::exception_ptr error) {
    {
      const MutexLock lock(mutex_);
      if (error && part < first_) {
        error_ = std::move(error);
        first_ = part;
      }
      if (--pending_ > 0) return;
    }
    promise_.settle(error_);
    delete this;
  }

 private:
  Promise promise_;
  Mutex mutex_;
  std::size_t pending_ HOIST_GUARDED_BY(mutex_);
  std::size_t first_ HOIST_GUARDED_BY(mutex_);  // part that failed
  std::exception_ptr error_;                    // its error; constant when none is pending
};

// One operation after another. Deleted when the second has ended, or is not begun.
class Sequence {
 public:
  explicit Sequence(std::function<Completion()> next) : next_(std::move(next)) {}
  Completion completion() const { return promise_.completion(); }
  void begin_next(std::exception_ptr error) {
    if (error) return end(std::move(error));
    try {
      next_().then([this](std::exception_ptr of_next) { end(std::move(of_next)); });
    } catch (...) {
      end(std::current_exception());
    }
  }

 private:
  void end(std::exception_ptr error) {
    promise_.settle(std::move(error));
    delete this;
  }

  Promise promise_;
  std::function<Completion()> next_;
};

}  // namespace

Completion when_all(std::span<const Completion> parts) {
  // Most often all but one have succeeded already, or there is no more than one.
  const Completion* undecided = nullptr;
  std::size_t undecided_count = 0;
  for (const Completion& part : parts) {
    if (part.done() && !part.error()) continue;
    undecided = &part;
    ++undecided_count;
  }
  if (undecided_count == 0) return {};
  if (undecided_count == 1) return *undecided;
  auto* const join = new Join(parts.size());
  const Completion result = join->completion();
  for (std::size_t i = 0; i < parts.size(); ++i)
    parts[i].then([join, i](std::exception_ptr error) { join->ended(i, std::move(error)); });
  return result;
}

Completion detail::followed_by_pending(const Completion& first, std::function<Completion()> next) {
  auto* const sequence = new Sequence(std::move(next));
  const Completion result = sequence->completion();
  first.then([sequence](std::exception_ptr error) { sequence->begin_next(std::move(error)); });
  return result;
}

}  // namespace hoist
