// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/mirror.hpp - copies of finished commits in EngineOptions::mirror, made by a thread beside training.
//
// The mirror's directory holds a store like the engine's own, of one drive, whose newest commit is the one that was
// copied last. A copy counts once it is durable on every rank of the job; until then the one before it is whole.
// Records that have not changed since the last copy are not copied again.
//
// Threading  The program's thread makes it, asks it and claims it; start() and drop() are called by the thread that
//            made the commit. The copy runs on a thread of its own. Beside it a thread meets the other ranks, because
//            the drive may hang for longer than they wait; at the copy's end the thread of the mirror's store does.
// Memory     Two buffers of a few MiB and the tables of the mirror's store; those of the commit are the store's
//            (Store::hold). store_cost() counts all of it.
// Errors     An error of a copy, on any rank, fails that copy everywhere and is logged; training goes on, and the next
//            copy opens the mirror's store anew. A drive that stops answering is given up while the process lives,
//            because the system may still write to the store's files, and so these stay locked.
// Main path  claim -> (commit) -> start -> Store::hold -> copy_records -> commit -> barrier -> done.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/comm/communicator.hpp>
#include <hoist/core/clock.hpp>
#include <hoist/core/completion.hpp>
#include <hoist/core/mutex.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/store_search.hpp>
#include <hoist/zero/layout/record_map.hpp>

namespace hoist::detail {

class Mirror {
 public:
  // [J] Opens this rank's store in the mirror, or makes one. `store_number`: of the engine's store. `step`: where the
  // training stands. Where older copies leave no space for a new store, copies fail until there is; a run that goes
  // back is refused. Pre: refuse_unfit_mirror(). Errors: IoError, StoreError; BudgetError where there are no older
  // copies.
  Mirror(const EngineOptions& options, const UnitTable& table, const RecordMap& records, const RankAgreement& ranks,
         std::uint64_t store_number, std::uint64_t step);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  // Waits for the copy under way.
  void end() noexcept;

  // [J] Whether the commit of this step is to be copied: the last copy is of `every` steps ago, or more, and done on
  // every rank, and no rank has given up the mirror's drive. The first commit of a run that is continued is to be
  // copied if there is no copy of that run.
  bool is_due(std::uint64_t step) const;
  // The copy of a commit to come; start() or drop() follows. Waits for the copy under way. Pre: start() or drop() has
  // followed the claim before.
  Completion claim(std::uint64_t step);
  // The commit has landed; it is the store's last.
  void start(tiers::Store& store);
  // There will be no such commit, on any rank.
  void drop(const std::exception_ptr& error);

  // Of the newest whole copy, as far as this rank knows: the others hear of a loss when all have opened their stores.
  std::optional<std::uint64_t> step() const;
  std::uint64_t copied_bytes() const { return copied_bytes_; }    // by this rank, of copies that failed as well
  std::uint64_t store_bytes_read() const { return bytes_read_; }  // from the engine's store, to be copied
  // The engine has failed: the copy under way is given up, and the other ranks are told.
  void abandon();
  // The other ranks cannot be reached, or have the error in another way: they are told nothing any more.
  void close_barrier() { barrier_.close(); }

 private:
  struct Copied {
    std::uint64_t step = 0;
    std::uint32_t revision = 0;
    bool is(const tiers::CommitHeader& commit) const { return commit.step == step && commit.revision == revision; }
  };

  void open(std::uint64_t store_number, std::uint64_t step);  // [J]
  void open_store();                                          // [J]
  // [J] `given_up_step`: of the copy that is there, if the run goes back behind it.
  void make_store(std::optional<std::uint64_t> given_up_step);
  // Done beside a thread that meets the other ranks. Throws on all of them if it fails on one.
  void on_all_ranks(const std::function<void()>& work);
  std::uint32_t open_anew();
  std::uint32_t reopen();
  void give_space_back() noexcept;
  void note_loss();
  void copy(tiers::StoreReader& commit);
  // Returns false if the copy of another rank has failed.
  bool keep_pace(TimePoint not_before, const MeetingThread& meetings);
  void remove_others() noexcept;
  void conclude(const std::exception_ptr& error);
  std::unique_ptr<Promise> take_promise();
  void join();

  const EngineOptions options_;  // those of a store in the mirror
  const MirrorOptions mirror_;
  const UnitTable& table_;
  const RecordMap& records_;
  const RankAgreement& ranks_;
  JobBarrier barrier_;  // of copies
  StoreDirectory directory_;
  tiers::StoreOptions store_options_;
  std::string mount_point_;         // of the drive that it was opened on; "" on the root's
  std::uint64_t claimed_step_ = 0;  // the last that was claimed
  std::uint64_t due_step_ = 0;      // the first one that is_due()

  // The copy's thread uses these alone.
  const std::unique_ptr<aio::DriveQueue> io_;
  const std::array<aio::DriveQueue*, 1> drives_{io_.get()};
  std::unique_ptr<tiers::Store> store_;      // null, or not to be used, after a copy has failed
  bool has_failed_ = false;                  // the last copy, on all ranks
  bool lacks_store_ = false;                 // there was no space for it yet
  std::optional<Copied> newest_;             // the newest commit in it that all ranks have, or had
  bool has_lost_newest_ = false;             // on this rank: it is in the log
  bool has_said_given_up_ = false;           // its drive has been given up
  std::vector<std::uint64_t> fingerprints_;  // of the records that the mirror holds; 0 where that is unknown
  bool says_next_ = true;                    // the first copy, and the first one after a failure, are in the log
  bool has_others_ = false;                  // other stores lie beside this one

  std::atomic<std::uint64_t> copied_bytes_{0}, bytes_read_{0};
  mutable Mutex mutex_;
  ConditionVariable wake_;
  bool abandoned_ HOIST_GUARDED_BY(mutex_) = false;
  std::thread thread_ HOIST_GUARDED_BY(mutex_);
  Completion under_way_ HOIST_GUARDED_BY(mutex_);
  std::unique_ptr<Promise> promise_ HOIST_GUARDED_BY(mutex_);  // of under_way_
  std::optional<std::uint64_t> step_ HOIST_GUARDED_BY(mutex_);
};

}  // namespace hoist::detail
