// SPDX-License-Identifier: Apache-2.0
// tests/support/observed_backend.hpp - a backend that shows a test every block on its way to the drive, and back.
//
// Threading  As aio::Backend: the observers run on the drive's I/O thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <hoist/aio/backend.hpp>
#include <hoist/aio/file.hpp>

namespace hoist::test {

class ObservedBackend : public aio::Backend {
 public:
  using Observer = std::function<void(const aio::Block&)>;
  // `on_submit` runs before the block is handed over, `on_done` when it has ended. Either may be null.
  ObservedBackend(std::unique_ptr<aio::Backend> inner, Observer on_submit, Observer on_done = {})
      : inner_(std::move(inner)), on_submit_(std::move(on_submit)), on_done_(std::move(on_done)) {}

  std::string description() const override { return inner_->description(); }
  void submit(aio::Block& block) override {
    if (on_submit_) on_submit_(block);
    inner_->submit(block);
  }
  std::size_t reap(std::span<aio::Block*> done, Nanoseconds timeout) override {
    const std::size_t count = inner_->reap(done, timeout);
    if (on_done_)
      for (std::size_t i = 0; i < count; ++i) on_done_(*done[i]);
    return count;
  }
  void wake_up() override { inner_->wake_up(); }

 private:
  const std::unique_ptr<aio::Backend> inner_;
  const Observer on_submit_, on_done_;
};

}  // namespace hoist::test
