// SPDX-License-Identifier: Apache-2.0
// tests/support/forwarding_communicator.hpp - a communicator that passes every call on to another one. Base of test
// communicators that change or observe some calls. duplicate() and split() return the inner communicator's, which are
// not wrapped.
//
// Threading  As comm::Communicator.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <hoist/comm/communicator.hpp>

namespace hoist::test {

class ForwardingCommunicator : public comm::Communicator {
 public:
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string_view name() const override { return inner_->name(); }
  void all_gather(std::span<const comm::GatherPiece> pieces, platform::Stream& stream) override {
    inner_->all_gather(pieces, stream);
  }
  void reduce_scatter(std::span<const comm::ReducePiece> pieces, platform::Stream& stream) override {
    inner_->reduce_scatter(pieces, stream);
  }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override { inner_->exchange(mine, all); }
  void broadcast_host(std::span<std::byte> bytes, int root) override { inner_->broadcast_host(bytes, root); }
  void barrier() override { inner_->barrier(); }
  std::unique_ptr<comm::Communicator> duplicate() override { return inner_->duplicate(); }
  std::unique_ptr<comm::Communicator> split(int ranks) override { return inner_->split(ranks); }
  std::uint64_t sent_bytes() const override { return inner_->sent_bytes(); }
  void abort(std::string_view why) noexcept override { inner_->abort(why); }
  std::optional<std::string> broken() override { return inner_->broken(); }

 protected:
  explicit ForwardingCommunicator(std::unique_ptr<comm::Communicator> inner) : inner_(std::move(inner)) {}
  comm::Communicator& inner() { return *inner_; }

 private:
  const std::unique_ptr<comm::Communicator> inner_;
};

}  // namespace hoist::test
