// SPDX-License-Identifier: Apache-2.0
// core/completion.hpp - something the host can see finish: a disk transfer, a CPU task, a polled event.
//
// Threading  Any thread may wait, test, or attach a continuation; exactly one thread fulfils a Promise, once.
// Memory     One small shared block per promise; handles are reference counted. The first continuation is in it.
// Errors     A failed operation stores its exception; every wait() rethrows it. UsageError from waiting for a pending
//            operation of the process that this one was forked from.
// Main path  Promise::complete -> continuations, in the order they were attached, on the completing thread.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <span>

namespace hoist {

namespace detail {
struct CompletionState;
}

class Completion {
 public:
  // Null is success. Continuations must not block and must not throw.
  using Continuation = std::function<void(std::exception_ptr)>;

  Completion() = default;  // already complete, without error
  static Completion failed(std::exception_ptr error);

  bool done() const noexcept;
  void wait() const;
  // Ignores an error: for callers that do not need it, or have received it before.
  void wait_quietly() const noexcept;
  // False if the time-out passes first.
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds timeout) const;
  // Null while pending and after success.
  std::exception_ptr error() const noexcept;
  // Runs `continuation` on the completing thread, or at once if it is already done.
  void then(Continuation continuation) const;

 private:
  friend class Promise;
  explicit Completion(std::shared_ptr<detail::CompletionState> state) : state_(std::move(state)) {}
  std::shared_ptr<detail::CompletionState> state_;
};

// The producing end. Destroying an unfulfilled promise is a bug; while an exception unwinds, it fails.
class Promise {
 public:
  Promise();
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&&) noexcept;
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;
  ~Promise();

  Completion completion() const { return Completion(state_); }
  void complete() noexcept { settle(nullptr); }
  void fail(std::exception_ptr error) noexcept { settle(std::move(error)); }
  // Null is success.
  void settle(std::exception_ptr error) noexcept;

 private:
  std::shared_ptr<detail::CompletionState> state_;
};

// Done when all are done; fails with the first error in the order of `parts`.
Completion when_all(std::span<const Completion> parts);

namespace detail {
Completion followed_by_pending(const Completion& first, std::function<Completion()> next);
}

// Done when what `next` starts is done. `next` runs when `first` is done: at once, or as a continuation of it. If
// `first` fails, `next` does not run, and the result fails with the same error.
template <typename Next>  // Completion()
Completion followed_by(const Completion& first, Next next) {
  if (!first.done()) return detail::followed_by_pending(first, std::move(next));
  if (first.error()) return first;
  try {
    return next();
  } catch (...) {
    return Completion::failed(std::current_exception());
  }
}

}  // namespace hoist
