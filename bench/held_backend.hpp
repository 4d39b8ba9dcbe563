// SPDX-License-Identifier: Apache-2.0
// bench/held_backend.hpp - a drive slowed down to a known speed: holds each block back for as long as its model says,
// then hands it to a real one. Benches use it, and the tests that compare predicted times with real ones.
//
// Threading  As aio::Backend: one thread submits and reaps, and calls the model.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/clock.hpp>

namespace hoist::bench {

class HeldBackend final : public aio::Backend {
 public:
  // When a block that is submitted now may go on. Pre: of blocks that have to wait, none before one that came earlier.
  using Due = std::function<TimePoint(const aio::Block&)>;

  HeldBackend(std::unique_ptr<aio::Backend> inner, Due due) : inner_(std::move(inner)), due_(std::move(due)) {}
  std::string description() const override { return inner_->description(); }
  void submit(aio::Block& block) override {
    const TimePoint due = due_(block);
    if (due <= Clock::now()) {
      inner_->submit(block);
    } else {
      held_.push_back({&block, due});
    }
  }
  std::size_t reap(std::span<aio::Block*> done, Nanoseconds timeout) override {
    while (!held_.empty() && held_.front().due <= Clock::now()) {
      inner_->submit(*held_.front().block);
      held_.pop_front();
    }
    if (!held_.empty())
      timeout = std::min(timeout, std::max(Nanoseconds(0), Nanoseconds(held_.front().due - Clock::now())));
    return inner_->reap(done, timeout);
  }
  void wake_up() override { inner_->wake_up(); }

 private:
  struct Held {
    aio::Block* block;
    TimePoint due;
  };
  const std::unique_ptr<aio::Backend> inner_;
  const Due due_;
  std::deque<Held> held_;
};

// Moves so many bytes a second, one block after another, whichever way.
inline HeldBackend::Due at_speed(double bytes_per_second) {
  return [bytes_per_second, free_at = TimePoint{}](const aio::Block& block) mutable {
    const std::chrono::duration<double> takes(static_cast<double>(block.length_bytes) / bytes_per_second);
    return free_at = std::max(free_at, Clock::now()) + std::chrono::duration_cast<Nanoseconds>(takes);
  };
}

// Every flush takes so much longer, and nothing else does.
inline HeldBackend::Due with_flushes_of(Nanoseconds flush) {
  return [flush](const aio::Block& block) {
    return block.operation == aio::Operation::sync ? Clock::now() + flush : TimePoint{};
  };
}

}  // namespace hoist::bench
