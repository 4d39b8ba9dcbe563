// SPDX-License-Identifier: Apache-2.0
#include "watched.hpp"

#include <thread>
#include <vector>

#include <hoist/aio/file.hpp>
#include <hoist/tests/support/forwarding_communicator.hpp>
#include <hoist/tests/support/observed_backend.hpp>

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
class WatchedBackend final : public ObservedBackend {
 public:
  WatchedBackend(std::unique_ptr<aio::Backend> inner, WatchedRank& rank)
      : ObservedBackend(std::move(inner), {}, [&rank](const Block& done) { rank.kills.event(phase_of(done, rank)); }),
        rank_(rank) {}
  void submit(Block& block) override {
    if (is_manifest(block) && rank_.stage != Stage::creating && rank_.manifest_delay.count() > 0)
      std::this_thread::sleep_for(rank_.manifest_delay);
    const Phase phase = phase_of(block, rank_);
    rank_.kills.event(phase);
    ObservedBackend::submit(block);
    rank_.kills.event(phase);
  }

 private:
  WatchedRank& rank_;
};

// The first duplicate is the channel on which commits are agreed.
class WatchedCommunicator final : public ForwardingCommunicator {
 public:
  WatchedCommunicator(std::unique_ptr<comm::Communicator> inner, WatchedRank& rank, bool of_commits)
      : ForwardingCommunicator(std::move(inner)), rank_(rank), of_commits_(of_commits) {}
  void reduce_scatter(std::span<const comm::ReducePiece> pieces, platform::Stream& stream) override {
    stream.launch("reduce begins", [this] { rank_.kills.event(Phase::reduce); });
    inner().reduce_scatter(pieces, stream);
    stream.launch("reduce ends", [this] { rank_.kills.event(Phase::reduce); });
  }
  void exchange(std::span<const std::byte> mine, std::span<std::byte> all) override {
    const bool agreement = of_commits_ && rank_.stage != Stage::creating;
    if (agreement) rank_.kills.event(Phase::between_ranks);
    inner().exchange(mine, all);
    if (agreement) rank_.kills.event(Phase::between_ranks);
  }
  std::unique_ptr<comm::Communicator> duplicate() override {
    return std::make_unique<WatchedCommunicator>(inner().duplicate(), rank_, /*of_commits=*/true);
  }

 private:
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

// A store makes these calls only while it is created, except that its first commit flushes its directories, and that
// files are removed after another store has taken over.
bool WatchedSystemCalls::before(const SystemCall& call) {
  if (call.path.ends_with(".lock-info")) return true;  // information, for people
  using Kind = SystemCall::Kind;
  kills_.event(call.kind == Kind::sync ? Phase::initialize : call.kind == Kind::remove ? Phase::remove : Phase::create);
  return true;
}

void WatchedSystemCalls::after(const SystemCall& call, int) { static_cast<void>(before(call)); }

}  // namespace hoist::test
