// SPDX-License-Identifier: Apache-2.0
// tests/support/forgetful_backend.hpp - a backend that claims flushes which it never made. Taking one flush away after
// another shows that a test of crashes would notice.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <hoist/aio/backend.hpp>
#include <hoist/aio/file.hpp>

namespace hoist::test {

class ForgetfulBackend final : public aio::Backend {
 public:
  // Whether the n-th flush of a path (from 0) is left out.
  using Drops = std::function<bool(const std::string& path, std::uint64_t nth_of_path)>;
  ForgetfulBackend(std::unique_ptr<aio::Backend> inner, Drops drops)
      : inner_(std::move(inner)), drops_(std::move(drops)) {}

  std::string description() const override { return "forgetful over " + inner_->description(); }
  void submit(aio::Block& block) override {
    if (block.operation == aio::Operation::sync && drops_ && drops_(block.file->path(), syncs_[block.file->path()]++)) {
      block.result = 0;
      ready_.push_back(&block);
      return;
    }
    inner_->submit(block);
  }
  std::size_t reap(std::span<aio::Block*> done, Nanoseconds timeout) override {
    if (ready_.empty()) return inner_->reap(done, timeout);
    done[0] = ready_.back();
    ready_.pop_back();
    return 1;
  }
  void wake_up() override { inner_->wake_up(); }

 private:
  const std::unique_ptr<aio::Backend> inner_;
  const Drops drops_;
  std::map<std::string, std::uint64_t> syncs_;
  std::vector<aio::Block*> ready_;
};

}  // namespace hoist::test
