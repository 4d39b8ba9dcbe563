// SPDX-License-Identifier: Apache-2.0
// zero/passes/gatherer.hpp - weights on their way up: from where they are kept, by the executor, into device memory.
//
// Threading  The program's thread calls everything; fetches run on the executor, copies on the `up` stream (those of
//            new secondary shards on `down`), all-gathers on the communication stream.
// Errors     gather() throws what a fetch failed with; BudgetError when pinned units leave no room.
// Main path  gather -> FetchPlanner -> fetch (executor): [weight_reader] -> copy -> all-gather -> the caller's stream
//            waits.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <hoist/scheduler/executor.hpp>
#include <hoist/scheduler/fetch_planner.hpp>
#include <hoist/zero/memory/memory.hpp>
#include <hoist/zero/passes/streams.hpp>
#include <hoist/zero/passes/weight_reader.hpp>
#include <hoist/zero/ranks/abort_notifier.hpp>
#include <hoist/zero/update/update_queue.hpp>

namespace hoist::detail {

class Gatherer {
 public:
  // `gather_bytes`: as much of the gather memory as there is on every rank.
  Gatherer(Runtime& runtime, const EngineOptions& options, const UnitTable& table, const Memory& memory,
           std::uint64_t gather_bytes, scheduler::Executor& executor, Streams& streams, WeightReader* weight_reader,
           UpdateQueue& updates, AbortNotifier& abort_notifier, comm::Communicator* group);

  // `last`: the weights may change after this pass.
  void begin_pass(std::size_t kind, bool last);
  // Ends every lease that is still alive, as of the work enqueued so far on the stream it was gathered on. A complete
  // pass becomes the plan of its kind.
  void end_pass(bool complete);
  void gather(UnitId unit, StreamRef stream);  // and its tied owners
  // Ends one lease of gather(unit, gathered_on).
  void release(UnitId unit, StreamRef gathered_on, StreamRef stream);
  void finish(UnitId unit);               // a gradient collective takes its place in the order
  std::byte* address(UnitId unit) const;  // of gathered weights; null when not pinned

  // Returns when the device no longer reads anything that was gathered. Pre: executor drained.
  void quiesce() const;
  // Weights in memory or in the store have changed: nothing gathered is valid. Pre: quiesce().
  void invalidate();

  // The units that the next pass of a kind will fetch first, in order; empty before one was recorded.
  std::vector<UnitId> expected(std::size_t kind) const;
  // Starts staging for it, before it begins.
  void stage_for(std::size_t kind);

  const scheduler::FetchPlanner& planner() const { return planner_; }

 private:
  // Where a fetch comes from: this rank's shard and all others', or the secondary shards of its group.
  enum class Source : std::uint8_t {
    shards,
    shards_and_keep,  // and this rank's secondary shard is made of it
    secondary,
  };
  // One fetch, shared between the program's thread and the executor.
  struct Transfer {
    std::byte* target = nullptr;
    Source source = Source::shards;
    Completion submitted;
    platform::StreamEvent copied;  // set before `submitted`
    platform::StreamEvent gathered;
    platform::StreamEvent kept;  // the secondary shard
  };
  struct UnitState {
    std::vector<platform::Stream*> pins;      // of every live lease, the stream it was gathered on
    std::shared_ptr<Transfer> transfer;       // of the weights that are, or will be, at transfer->target
    std::vector<platform::StreamEvent> uses;  // ends of leases since that transfer, not reached when last looked at
    std::optional<scheduler::Place> place;    // in the gather memory, of that transfer
    bool valid_in_own_memory = false;
    bool secondary_current = false;  // the fetches issued so far leave the present weights' secondary shard
    // device_shard holds the present weights. The executor's, and invalidate()'s while the executor is idle.
    bool shard_current = false;
  };

  template <typename Access>
  void direct(Access access);
  std::vector<UnitId> reads_ahead(std::span<const scheduler::Fetch> first) const;
  // `order` without the units whose fetch needs no weights from below: valid in memory of their own, or with a current
  // secondary shard. `keeps`: the first fetch of a unit leaves a secondary shard.
  std::vector<UnitId> staged_in_order(std::vector<UnitId> order, bool keeps) const;
  void issue(std::span<const scheduler::Fetch> fetches);
  // The uses that must have ended before something is fetched into a range.
  struct FormerUse {
    std::vector<platform::StreamEvent> leases;
    std::vector<std::shared_ptr<Transfer>> transfers;
  };
  FormerUse vacate(const scheduler::Place& place, const UnitState& mover);
  void fetch(UnitId unit, std::byte* target, FormerUse former);
  void submit(UnitId unit, Transfer& transfer);
  void copy_up(UnitId unit, std::byte* target);
  bool is_fetched_again(UnitId unit) const;
  Source choose_source(UnitId unit);
  // part(segment, where it begins in the secondary shard, bytes) of each segment.
  template <typename Part>
  void for_secondary_parts(const Unit& unit, const Part& part) const;
  void copy_secondary_up(UnitId unit, std::byte* target);
  void keep_secondary(UnitId unit, Transfer& transfer);
  void copy_stored_up(UnitId unit, std::byte* target);
  void copy_piece(const Unit& unit, std::byte* target, const std::byte* source, const HostPiece& piece,
                  platform::CopyKind kind);
  void all_gather(const Unit& unit, std::byte* target, comm::Communicator& ranks, std::uint64_t shards);
  void pin(UnitId unit, StreamRef stream);
  void unpin(UnitId unit, StreamRef gathered_on, StreamRef stream);
  void drop_pins(UnitId unit);
  void await(UnitState& state, StreamRef stream);
  [[noreturn]] void no_room(UnitId unit) const;

  Runtime& runtime_;
  const EngineOptions& options_;
  const UnitTable& table_;
  const Memory& memory_;
  scheduler::Executor& executor_;
  Streams& streams_;
  WeightReader* weight_reader_;
  UpdateQueue& updates_;
  AbortNotifier& abort_notifier_;
  comm::Communicator* const group_;             // null where there are no groups
  bool training_ = false;                       // the pass under way
  bool last_ = false;                           // likewise
  std::vector<std::uint32_t> planned_fetches_;  // of each unit in it; empty while it is recorded
  scheduler::FetchPlanner planner_;
  std::vector<UnitState> states_;
  std::vector<scheduler::Item> gathered_together_;  // storage for gather()
};

}  // namespace hoist::detail
