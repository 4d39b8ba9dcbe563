// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/checkpointer.hpp - commits of steps, and the steps that save() asks for.
//
// With state on NVMe every step that is due is committed, and save() keeps such a commit under a name. With all state
// in memory only save() writes: a thread copies the state to the store under the next pass.
//
// A commit counts once it is durable on every rank of the job: each rank tells the others what became of its own
// (JobBarrier). A mirror then copies some of the commits.
//
// Threading  The program's thread makes every call, with two exceptions: the update thread, too, calls commit() and
//            fail(); in update mode `backward` the thread that hands gradients on calls open_step(). Barriers run on
//            the store's commit thread, saves of state in memory on a thread of their own.
// Errors     A commit that fails anywhere fails its Completion, and every later call that waits for it.
// Main path  open_step -> (update) -> decide -> commit -> [store: flush, manifest] -> JobBarrier -> done.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <hoist/core/completion.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>
#include <hoist/zero/checkpoint/mirror.hpp>
#include <hoist/zero/checkpoint/state_access.hpp>
#include <hoist/zero/options.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>
#include <hoist/zero/update/update_queue.hpp>

namespace hoist::detail {

class Checkpointer {
 public:
  // `store` is null where the options name none. `channel`: over all ranks of the job, for commit barriers alone.
  Checkpointer(const EngineOptions& options, const RankAgreement& ranks, tiers::Store* store,
               std::unique_ptr<comm::Communicator> channel, StateAccess& state_access, UpdateQueue& updates);
  ~Checkpointer();
  void use_mirror(std::unique_ptr<Mirror> mirror) { mirror_ = std::move(mirror); }
  // Waits for the commit, the save and the copy to the mirror under way. The store is ended before this object: its
  // commit thread uses it.
  void end() noexcept;

  // --- the rules
  bool on_nvme() const { return options_.uses_nvme(); }
  bool stores_steps() const { return options_.commits_steps(); }
  // Whether the step's writes end in a commit. Without durability those of every step do: a read after the step waits
  // for that commit, which nothing outlives.
  bool is_due(std::uint64_t step) const { return !stores_steps() || step % options_.commit_every == 0; }

  // --- commits of steps
  // Begins a step of the store; waits for the last commit, whose extents and memory are free after it.
  void open_step(std::uint64_t step);
  void await_last() const { last_commit_.wait(); }
  Completion last() const { return last_commit_; }

  // A step that was decided: commit() or fail() follows, on any thread.
  struct Decided {
    std::uint64_t step = 0;
    CommitState state;
    bool due = false;
    bool mirrored = false;
  };
  Decided decide(std::uint64_t step, CommitState state);
  // The step's writes are started. Done when the step is durable; at once when it is not to be committed.
  Completion commit(const Decided& decided);
  // The step will never be committed.
  void fail(const Decided& decided, const std::exception_ptr& error);

  // With state on NVMe commits the open step, beside the steps' own commits: the first state, a change by write().
  // Waits for it. `state`: what this and later commits hold beside the records.
  void commit_open(CommitState state, std::uint64_t step);
  // Opens the store's step once more, to change records of it. State in memory that no commit holds yet is written, so
  // that the commit is complete.
  void reopen_step(std::uint64_t step);
  // Waits for writes that no commit waits for yet, and for the named step under way.
  void settle(std::uint64_t step);

  // --- what a commit holds beside the records
  const CommitState& state() const { return state_; }
  void set_state(CommitState state) { state_ = std::move(state); }

  // --- saves
  // UsageError for what every rank passes alike.
  void check_save(const std::string& name, const SaveOptions& options) const;
  // The work that must end before save(): none; that of streams; or every update and commit, on all ranks.
  enum class SaveNeeds : std::uint8_t { nothing, drained_streams, settled_engine };
  SaveNeeds save_needs(const std::string& name, const SaveOptions& options) const;
  // [J] Pre: check_save(), room for the program's state on every rank, and what save_needs() says, which is `needs`.
  Completion save(const std::string& name, CommitState state, std::uint64_t step, const SaveOptions& options,
                  SaveNeeds needs);
  void state_changed() { changed_since_save_ = true; }
  // What saves between commits have written in all; done when the next step of the store is opened.
  std::uint64_t bytes_written_by_saves() const { return bytes_written_by_saves_; }

  std::optional<std::uint64_t> committed_step() const;
  const Mirror* mirror() const { return mirror_.get(); }  // null without one
  void restored(std::uint64_t step) { committed_step_ = static_cast<std::int64_t>(step); }
  // The other ranks cannot be reached, or have this error in another way: no barrier is entered any more.
  void close_barriers();
  // The engine has failed: what is being copied to the mirror is given up.
  void abandon_copy();

 private:
  struct PendingSave {
    std::string name;
    CommitState state;
    Promise promise;
  };
  // A save of state that lives in memory; the thread saver_ writes it.
  struct BackgroundSave {
    std::string name;
    std::vector<std::byte> encoded;
    std::uint64_t step = 0;
    bool changed = true;  // since the last save
    bool mirrored = false;
    bool barrier_ahead = true;  // the other ranks are still to be told
    Promise promise{};
  };
  bool keeps(const std::string& name) const { return options_.keep_steps > 0 && !name.empty(); }
  bool is_durable() const { return !on_nvme() || stores_steps(); }
  Completion commit_as(const std::string& name, const CommitState& state, std::uint64_t step, bool mirrored);
  Completion keep_step(const std::string& name, const CommitState& state) HOIST_REQUIRES(mutex_);
  Completion add_checkpoint(const std::string& name, const CommitState& state) HOIST_REQUIRES(mutex_);
  Completion save_in_background(const std::string& name, std::uint64_t step, bool mirrored);
  void write_save(BackgroundSave& save);  // on saver_
  void give_up(BackgroundSave& save, const std::exception_ptr& error);

  const EngineOptions& options_;
  const RankAgreement& ranks_;
  tiers::Store* const store_;
  JobBarrier barrier_;  // of commits
  StateAccess& state_access_;
  UpdateQueue& updates_;
  std::unique_ptr<Mirror> mirror_;  // null without one

  CommitState state_;  // as of the last step that was applied, or of the save() that committed it
  Completion last_commit_;
  bool uncommitted_ = false;  // steps were taken that no commit holds, and none is on its way
  std::uint64_t bytes_written_by_saves_ = 0;
  std::atomic<bool> changed_since_save_{true};  // state that lives in memory
  std::atomic<std::int64_t> committed_step_{-1};
  std::thread saver_;  // writes state that lives in memory; last_commit_ is its end

  Mutex mutex_;
  bool commit_ahead_ HOIST_GUARDED_BY(mutex_) = false;               // a step was decided whose commit is still to come
  std::exception_ptr decided_error_ HOIST_GUARDED_BY(mutex_);        // why the decided step will never be committed
  std::vector<PendingSave> pending_saves_ HOIST_GUARDED_BY(mutex_);  // that wait for its commit
  Completion last_checkpoint_ HOIST_GUARDED_BY(mutex_);
};

}  // namespace hoist::detail
