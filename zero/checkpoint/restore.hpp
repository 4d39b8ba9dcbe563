// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/restore.hpp - what a restore continues from: a commit of the store that these ranks made, or the
// state of one that another number of ranks made, or of the mirror.
//
// Threading  The program's thread. Every function is [J]: all ranks of the job call it.
// Errors     CommonStoreError, on every rank; StoreError, IoError and CorruptionError of one rank, which become
//            CommErrors of the others; BudgetError.
// Main path  plan_restore -> choose_commit -> verify_checkpoint -> adopt_commit, or FormerState -> read.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include <hoist/core/mutex.hpp>
#include <hoist/tiers/budget.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>
#include <hoist/zero/checkpoint/store_search.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist::detail {

struct RestorePlan {
  RestoreSource source;
  std::string directory;  // that the source is in, or below: the offload directory or the mirror
  bool from_mirror = false;
  bool given_up = false;  // a commit in the mirror, by a run that has gone back by a name
  // The store is continued. Otherwise a new one takes over its state.
  bool in_place = false;
  // Of the newest store in the offload directory that had a commit of all ranks; 0: none, or the first one.
  std::uint64_t newest_order = 0;
  // Newer stores in which no other process may train while this run takes over the source's state.
  NewerStores newer_stores() const { return {from_mirror ? StoreDirectory{} : source.directory, newest_order, ""}; }
};

// `from`: the name of a named checkpoint, or "" for the newest commit: of the store; or of the mirror, where a rank's
// drives are new, or no rank has come further than the commit that a store begins with. Changes nothing.
std::optional<RestorePlan> find_restore(const RankAgreement& ranks, const EngineOptions& options,
                                        const std::string& from);
// The same. Errors: also CommonStoreError when there is nothing.
RestorePlan plan_restore(const RankAgreement& ranks, const EngineOptions& options, const std::string& from);

// Refuses a mirror that is where the store is, by any name of the place (ConfigError of that rank), that holds another
// training than the one that is `continued` (null: a new one), or that has come further, unless the run goes back:
// `from` names a checkpoint, or did when it was started last.
void refuse_unfit_mirror(const RankAgreement& ranks, const EngineOptions& options, const RestorePlan* continued,
                         const std::string& from);

// Reads and verifies what the store has loaded, in `buffer` if that holds a tile. Errors: CorruptionError with a
// remedy.
void verify_checkpoint(const RankAgreement& ranks, const EngineOptions& options, tiers::Store& store,
                       std::span<std::byte> buffer);
// Makes `commit` the state of the open store, and gives up named checkpoints that some rank lacks.
void adopt_commit(const RankAgreement& ranks, const EngineOptions& options, tiers::Store& store,
                  const tiers::CommitHeader& commit);

// The remedy for damage: the named checkpoints that do not share the damaged bytes, as far as they are found below this
// rank's directory. Empty when there are none.
std::string remedy_for(const EngineOptions& options, const tiers::Store& store, const CorruptionError::Where& damage);

// The state of a store of another number of ranks, or with room for fewer named checkpoints, or of a mirror, until a
// new store has taken it over. Holds its share of the pinned budget.
class FormerState {
 public:
  // Errors: also StoreError for another model, BudgetError unless the new engine with its smallest buffers fits beside
  // the tables.
  FormerState(Runtime& runtime, const EngineOptions& options, const UnitTable& table, const RankAgreement& ranks,
              const RestorePlan& plan, const std::string& from);

  std::uint64_t step() const { return step_; }
  const CommitState& commit_state() const { return commit_state_; }
  // Any thread.
  void read(ParameterId parameter, State state, std::uint64_t first, std::span<float> out);

 private:
  std::uint64_t step_ = 0;
  CommitState commit_state_;
  Mutex one_at_a_time_;
  tiers::Budget::Hold tables_;
  std::unique_ptr<StoredModel> stored_;
};

}  // namespace hoist::detail
