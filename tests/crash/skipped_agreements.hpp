// SPDX-License-Identifier: Apache-2.0
// tests/crash/skipped_agreements.hpp - a communicator that answers some agreements by itself, as if all ranks had come
// as far as this one. Leaving out one agreement after another shows that a test of crashes would notice.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include <hoist/tests/support/forwarding_communicator.hpp>

namespace hoist::test {

class SkippedAgreements final : public ForwardingCommunicator {
 public:
  using Skips = std::function<bool()>;
  // `own`: of this communicator; `of_commits`: of its duplicates, on which commits are agreed.
  SkippedAgreements(std::unique_ptr<comm::Communicator> inner, Skips own, Skips of_commits)
      : ForwardingCommunicator(std::move(inner)), skips_(std::move(own)), of_commits_(std::move(of_commits)) {}

  // A rank that does not wait for the others has its own shard only.
  void all_gather(std::span<const comm::GatherPiece> pieces, platform::Stream& stream) override {
    if (!skips()) inner().all_gather(pieces, stream);
  }
  void reduce_scatter(std::span<const comm::ReducePiece> pieces, platform::Stream& stream) override {
    if (!skips()) inner().reduce_scatter(pieces, stream);
  }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    if (!skips()) return inner().exchange(mine, all);
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(size()); ++rank)
      std::memcpy(all.data() + rank * mine.size(), mine.data(), mine.size());
  }
  void barrier() override {
    if (!skips()) inner().barrier();
  }
  std::unique_ptr<comm::Communicator> duplicate() override {
    return std::make_unique<SkippedAgreements>(inner().duplicate(), of_commits_, Skips());
  }

 private:
  bool skips() const { return skips_ && skips_(); }

  const Skips skips_, of_commits_;
};

}  // namespace hoist::test
