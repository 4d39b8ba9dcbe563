// SPDX-License-Identifier: Apache-2.0
// support/counting_backend.hpp - a drive that counts the bytes read from, or written to, a store's data files.
//
// Threading  As aio::Backend; the count may be looked at from any thread.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include <hoist/aio/engine.hpp>

namespace hoist::test {

class CountingBackend final : public aio::Backend {
 public:
  CountingBackend(std::unique_ptr<aio::Backend> inner, aio::Operation counted, std::atomic<std::uint64_t>& bytes)
      : inner_(std::move(inner)), counted_(counted), bytes_(bytes) {}
  std::string description() const override { return inner_->description(); }
  void submit(aio::Block& block) override {
    if (block.operation == counted_ && block.file->path().ends_with(".data")) bytes_ += block.length_bytes;
    inner_->submit(block);
  }
  std::size_t reap(std::span<aio::Block*> done, Nanoseconds timeout) override { return inner_->reap(done, timeout); }
  void wake_up() override { inner_->wake_up(); }

 private:
  const std::unique_ptr<aio::Backend> inner_;
  const aio::Operation counted_;
  std::atomic<std::uint64_t>& bytes_;
};

}  // namespace hoist::test
