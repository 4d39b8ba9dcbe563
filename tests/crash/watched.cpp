// SPDX-License-Identifier: Apache-2.0
#include "watched.hpp"

#include <thread>
#include <vector>

#include <hoist/aio/file.hpp>

namespace hoist::test {

namespace {

using aio::Block;
using aio::Operation;

bool is_manifest(const Block& block) { return block.file->path().find(".manifest") != std::string::npos; }

Phase phase_of(const Block& block, const WatchedRank& rank) {
  if (block.file->path().ends_with(".manifest-new")) return Phase::create;
  const Stage stage = rank.stage;
  if (stage == Stage::creating) return Phase::initialize;
  if (stage == Stage::restoring) return rank.reshards ? Phase::reshard : Phase::restore;
  if (is_manifest(block)) return Phase::manifest;
  if (block.operation == Operation::sync) return Phase::flush;
  if (stage == Stage::backward) return Phase::backward;
  return rank.defers ? Phase::forward_update : Phase::step_update;
}

// An event before a block is handed over, one when the kernel has it, one when it is done.
class WatchedBackend final : public aio::Backend {
 public:
  WatchedBackend(std::unique_ptr<aio::Backend> inner, WatchedRank& rank) : inner_(std::move(inner)), rank_(rank) {}
  std::string description() const override { return inner_->description(); }
  void submit(Block& block) override {
    if (is_manifest(block) && rank_.stage != Stage::creating && rank_.manifest_delay.count() > 0)
      std::this_thread::sleep_for(rank_.manifest_delay);
    const Phase phase = phase_of(block, rank_);
    rank_.kills.event(phase);
    inner_->submit(block);
    rank_.kills.event(phase);
  }
  std::size_t reap(std::span<Block*> done, Nanoseconds timeout) override {
    const std::size_t count = inner_->reap(done, timeout);
    for (std::size_t i = 0; i < count; ++i) rank_.kills.event(phase_of(*done[i], rank_));
    return count;
  }
  void wake_up() override { inner_->wake_up(); }

 private:
  const std::unique_ptr<aio::Backend> inner_;
  WatchedRank& rank_;
};

// The first duplicate is the channel on which commits are agreed.
class WatchedCommunicator final : public comm::Communicator {
 public:
  WatchedCommunicator(std::unique_ptr<comm::Communicator> inner, WatchedRank& rank, bool of_commits)
      : inner_(std::move(inner)), rank_(rank), of_commits_(of_commits) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string_view name() const override { return inner_->name(); }
  void all_gather(std::span<const comm::GatherPiece> pieces, platform::Stream& stream) override {
    inner_->all_gather(pieces, stream);
  }
  void reduce_scatter(std::span<const comm::ReducePiece> pieces, platform::Stream& stream) override {
    stream.launch("reduce begins", [this] { rank_.kills.event(Phase::reduce); });
    inner_->reduce_scatter(pieces, stream);
    stream.launch("reduce ends", [this] { rank_.kills.event(Phase::reduce); });
  }
  void all_reduce_sum(std::span<float> values, platform::Stream& stream) override {
    inner_->all_reduce_sum(values, stream);
  }
  void broadcast(std::span<std::byte> bytes, int root, platform::Stream& stream) override {
    inner_->broadcast(bytes, root, stream);
  }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    const bool agreement = of_commits_ && rank_.stage != Stage::creating;
    if (agreement) rank_.kills.event(Phase::between_ranks);
    inner_->exchange(mine, all);
    if (agreement) rank_.kills.event(Phase::between_ranks);
  }
  void broadcast_host(std::span<std::byte> bytes, int root) override { inner_->broadcast_host(bytes, root); }
  void barrier() override { inner_->barrier(); }
  std::unique_ptr<comm::Communicator> duplicate() override {
    return std::make_unique<WatchedCommunicator>(inner_->duplicate(), rank_, /*of_commits=*/true);
  }
  std::unique_ptr<comm::Communicator> split(int ranks) override { return inner_->split(ranks); }
  std::uint64_t sent_bytes() const override { return inner_->sent_bytes(); }
  void abort(std::string_view why) noexcept override { inner_->abort(why); }
  std::optional<std::string> broken() override { return inner_->broken(); }

 private:
  const std::unique_ptr<comm::Communicator> inner_;
  WatchedRank& rank_;
  const bool of_commits_;
};

}  // namespace

std::unique_ptr<aio::Backend> watch(std::unique_ptr<aio::Backend> backend, WatchedRank& rank) {
  return std::make_unique<WatchedBackend>(std::move(backend), rank);
}

std::unique_ptr<comm::Communicator> watch(std::unique_ptr<comm::Communicator> communicator, WatchedRank& rank) {
  return std::make_unique<WatchedCommunicator>(std::move(communicator), rank, /*of_commits=*/false);
}

// A store makes these calls only while it is made, but for the flush of its directories at its first commit, and what
// is removed when another has taken it over.
bool WatchedSystemCalls::before(const SystemCall& call) {
  if (call.path.ends_with(".lock-info")) return true;  // information, for people
  using Kind = SystemCall::Kind;
  kills_.event(call.kind == Kind::sync ? Phase::initialize : call.kind == Kind::remove ? Phase::remove : Phase::create);
  return true;
}

void WatchedSystemCalls::after(const SystemCall& call, int) { static_cast<void>(before(call)); }

}  // namespace hoist::test
