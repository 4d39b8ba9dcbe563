// SPDX-License-Identifier: Apache-2.0
// tiers/store.hpp - one rank's records on NVMe, verified on every read and committed atomically.
//
// The store is a directory with, per rank, a data file (a pool of extents; each record lives in one of them; with
// several drives it is spread over a file on each) and a manifest file (superblock, then slots). The manifest of
// step t goes to the slot that does not hold the last committed step; docs/format.md describes the bytes and the
// protocol of commits.
//
// Threading  One thread at a time for begin_step/commit; reads, writes and verification from any thread.
// Memory     Extents are reserved on disk at creation, checksum tables and the manifest image in memory at open;
//            nothing is allocated per transfer but its completion.
// Errors     StoreError (another model's, locked, no commit), IoError, CorruptionError naming unit, file and offset.
//            After a failed commit, begin_step and commit throw its error again; the store must be reopened.
// Main path  begin_step -> write tiles -> commit: wait for writes, fdatasync, manifest, fdatasync; add_checkpoint: one
//            more manifest.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <hoist/aio/drive_queue.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/strong_id.hpp>
#include <hoist/core/trace.hpp>
#include <hoist/tiers/commit_header.hpp>
#include <hoist/tiers/durability.hpp>
#include <hoist/tiers/record_layout.hpp>

namespace hoist::tiers {

using RecordId = StrongId<struct RecordTag>;

// Identifies a run's model: compared as text, line by line, when a store is opened. It has one line per parameter, made
// by zero/; the store only stores and compares it, with world size and rank.
struct StoreIdentity {
  std::string layout;
  int rank = 0;
  int world_size = 1;
};

struct StoreRecord {
  std::string unit;  // for error messages
  RecordLayout layout;
};

struct StoreOptions {
  std::string directory;
  std::string directory_key{};  // the configuration key that names the directories; for errors about their space
  // Further drives, over which the data is spread; the manifest stays in `directory`.
  std::vector<std::string> stripe_directories{};
  // create(): each drive's share, `directory` first, 1 to 16; equal shares if empty. open() uses the store's own.
  std::vector<std::uint32_t> stripe_weights{};
  // create(): a block of aio's, so that a piece of the update covers several drives and a tile never more than two.
  std::uint64_t stripe_unit_bytes = kMiB;
  StoreIdentity identity;
  std::vector<StoreRecord> records;
  Durability durability = Durability::step;
  std::uint64_t caller_state_bytes_max = 64 * kKiB;
  // create(): the number of named checkpoints, each with another extent for every record. Durability step only. open()
  // uses the store's own number, and refuses if more are requested.
  std::uint32_t checkpoints_max = 0;
  // create(): the number of commits that hold() keeps readable at a time, 0 or 1; each takes the disk space of a named
  // checkpoint. Durability step only.
  std::uint32_t held_commits_max = 0;
  Nanoseconds lock_timeout = std::chrono::seconds(10);
  Trace* trace = nullptr;  // receives transfers and commits
  // Random if 0. Ranks of one run have consecutive numbers, so that files of two runs are not taken for one run's.
  std::uint64_t store_number = 0;
};

class Scratch;
class StoreReader;

// A part of a manifest that cannot be used.
struct ManifestDamage {
  std::string text;  // "commit slot 1 of <path> cannot be used: ..."
  // A slot's checkpoint is lost with it. With the slot of a commit no step is lost: the commit before it is used, as
  // after a kill inside of a commit.
  bool is_of_checkpoint = false;
  friend bool operator==(const ManifestDamage&, const ManifestDamage&) = default;
};

class Store {
 public:
  // The commits in a rank's manifest.
  struct Commits {
    std::vector<CommitHeader> commits;      // valid ones, newest first, without abandoned ones
    std::vector<CommitHeader> abandoned;    // see Store::commits_and_abandoned()
    std::vector<CommitHeader> checkpoints;  // named checkpoints, oldest first
    // Whether there is or was a commit, readable or not. Otherwise create() replaces the files.
    bool ever_committed = false;
    // Whether there was more than the commit that a store begins with: of step 0 or, where the store `took_over` from
    // another, of any step.
    bool has_more_than_first_commit(bool took_over) const;
    std::uint64_t newest_step() const;  // of all of these; 0 where there is none
    std::vector<CommitHeader> commits_and_abandoned() const;
  };
  // Describes what `directory` holds for this rank, without changing or locking anything; for people and for early
  // refusals. The commit to adopt is chosen from commits() of the opened store instead, because a process that still
  // runs, or whose last writes are still in flight, may commit in between. A manifest whose superblock cannot be read
  // counts as existing: what it held is unknown, so nothing may silently overwrite it. `damage` then says what is
  // wrong, and names commit slots that hold something unusable (after a crash that is normal: the commit it
  // interrupted).
  struct Found : Commits {
    bool exists = false;  // a manifest is there
    // No manifest is there, but a `.manifest-new`: the store is being made or removed, or that was interrupted.
    bool is_half_made = false;
    bool has_lost_manifest = false;         // it is under neither name, and there are data, which are later than it
    std::optional<StoreIdentity> identity;  // its owner, if the superblock can be read
    Durability durability = Durability::step;
    std::uint64_t store_number = 0;
    std::uint64_t data_bytes = 0;                   // reserved on disk, over all drives
    std::uint64_t tile_count = 0;                   // of all records
    std::vector<std::string> stripe_directories{};  // further drives, at their locations when the store was made
    std::uint32_t checkpoints_max = 0;
    std::uint64_t caller_state_bytes_max = 0;
    std::vector<ManifestDamage> damage;
  };
  static Found look(const std::string& directory, int rank);
  // The ranks that have a manifest in `directory`, ascending; none if there is no such directory.
  static std::vector<int> ranks_in(const std::string& directory);
  // The ranks whose data are in `directory`, and whose manifest is missing.
  static std::vector<int> ranks_without_manifest(const std::string& directory);
  // The holder of the lock of a rank's store, for people ("process 4711 on node3"); nullopt if there is none. Takes the
  // lock for a moment, shared; a trainer that starts in that moment tries again.
  static std::optional<std::string> holder(const std::string& directory, int rank);

  // Whether a further drive of this rank's store is lost, or not mounted: no label of it is where it was when the store
  // was made, nor in one of `elsewhere`.
  static bool lacks_a_drive(const std::string& directory, int rank, std::span<const std::string> elsewhere);
  // The data files of this rank's store that are missing, or have another length, where it was made: a line for each.
  // Further drives may be mounted elsewhere now: what is not there is not wrong.
  static std::vector<std::string> wrong_data_files(const std::string& directory, int rank);

  // Whether the store in the directory was being made, removed or replaced, and the manifest of one of its ranks is not
  // there: the store cannot be used. A file of a rank that the store does not have is another, unfinished store's.
  static bool is_half_removed(const std::string& directory);
  // Removes the files of all ranks of a store from the directories of its drives, manifests first. Takes all their
  // locks first; if one is not available within `lock_timeout`, removes nothing, and returns false or, with a `check`,
  // throws StoreError naming the holder. `check` is called under the locks, and may throw.
  static bool remove(std::span<const std::string> directories, Nanoseconds lock_timeout,
                     const std::function<void()>& check = {});
  // For remove(): StoreError if somebody may still want a file of any rank in these directories. A store that its ranks
  // never all committed is wanted by nobody; the caller, who has asked all ranks, says that this is such a store, and
  // this call looks whether that is still so: it holds at most its first commit, no data without a manifest, and
  // no other store's data on a further drive. `world_size`: of the run that begins. Only one of as many ranks knows
  // that files that are missing here are missing everywhere. `took_over`: as in has_more_than_first_commit().
  static void check_unfinished(std::span<const std::string> directories, int world_size, bool took_over);
  // StoreError if a rank's data are in this directory, and their manifest is missing. So does making a store there.
  static void refuse_lost_manifest(const std::string& directory, int rank);

  // Makes a new store: directory (0700), files (0600), space reserved. Refuses with StoreError if a store with a commit
  // is there, or was and is unreadable now, and with BudgetError{tier "nvme"} if the file system is too small; then no
  // file remains. A store that never reached its first commit is replaced, and so is one of durability none. `queues`:
  // one for each directory, in their order; the first also carries the manifest.
  using Queues = std::span<aio::DriveQueue* const>;
  static std::unique_ptr<Store> create(const StoreOptions& options, Queues queues);
  // Opens the store of the same model and locks it. The commits it holds are in commits(); one is chosen by adopt().
  // Refuses one of durability none, of another rank, world size or layout, and files that were cut off. A store made
  // with room for more caller state than asked for keeps its room.
  static std::unique_ptr<Store> open(const StoreOptions& options, Queues queues);
  // Memory the store keeps for its tables and manifest image, and bytes on disk, for a plan.
  struct Cost {
    std::uint64_t memory_bytes = 0;
    std::uint64_t disk_bytes = 0;
  };
  static Cost cost(const StoreOptions& options);

  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  // Removes what create() made of a store that has no commit: files, and the directories unless something else is in
  // them. The store can only be destroyed then.
  virtual void remove_new() noexcept = 0;
  // Where one of its files has lost its name, and no other has it, removes the others, which are worth nothing without
  // it, under this store's lock; create() can then make them anew. Returns whether it did. The store can only be
  // destroyed then.
  virtual bool remove_remains() noexcept = 0;

  // As open() found them, newest first: by incarnation, then by step, then by revision. A commit of an older
  // incarnation that lies beyond the newest one's was abandoned and is not listed. Empty after create().
  virtual std::span<const CommitHeader> commits() const = 0;
  // Also those that commits() leaves out, at the end. They can be adopted until a step begins. If ranks were returning
  // to an earlier step and some died before they had adopted it, these are the commits that all have in common.
  virtual std::vector<CommitHeader> commits_and_abandoned() const = 0;
  // Named checkpoints, oldest first, without those of an unfinished add_checkpoint().
  virtual std::vector<CommitHeader> checkpoints() const = 0;
  // The checkpoints of checkpoints() that this damage, found by verify(), does not affect: their copy of that tile is
  // elsewhere.
  virtual std::vector<CommitHeader> checkpoints_apart_from(const CorruptionError::Where& damage) const = 0;
  // Unusable parts that open() found, as Found::damage; for a warning.
  virtual std::span<const ManifestDamage> damage() const = 0;
  // Reads the tables and the caller state of a commit or named checkpoint, so that it can be looked at before adopt().
  virtual void load(const CommitHeader& commit) = 0;
  // Reads all records of the loaded commit and verifies them, piece by piece in `buffer`, which holds at least one
  // tile, while `go_on`, called before each piece, returns true. Errors: CorruptionError, naming the first wrong tile.
  virtual void verify_records(std::span<std::byte> buffer, const std::function<bool()>& go_on) = 0;
  // Makes the given commit or named checkpoint the current state. It first writes a durable manifest of the next
  // incarnation, so that a later abandoned step can never be resumed; that manifest replaces a commit that was not
  // chosen. With several ranks no rank may begin a step before all have adopted. Once, before the first begin_step. The
  // manifest's checksum and every extent in it are checked here (StoreError), the records themselves when they are
  // read.
  virtual void adopt(const CommitHeader& commit) = 0;
  virtual std::span<const std::byte> caller_state() const = 0;  // of the loaded or adopted commit

  // --- reading -------------------------------------------------------------------------------------------------------
  // Reads tiles [first, first + count) of a record's region, contiguous as on disk. The bytes are not verified yet:
  // call verify() on them before any use. Sees the current step's writes once write() has started them, tile by tile; a
  // tile that was not rewritten yet comes from the commit before (with two transfers then). The caller waits for a
  // write's completion before reading the same tiles. Reading a tile that was never written is a bug.
  virtual Completion read(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                          std::span<std::byte> target, aio::Priority priority) = 0;
  // Throws CorruptionError, naming the first wrong tile, unless `bytes` are the last ones written there.
  virtual void verify(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                      std::span<const std::byte> bytes) const = 0;

  // --- writing -------------------------------------------------------------------------------------------------------
  // Opens step `step`, not before the last commit's; the same step again is its next revision. From now on every
  // written record goes to an extent that no commit uses. Waits for the commit before it and throws its error. A step
  // that will not be committed ends with the store. Durability none: one endless step is enough; commits are optional.
  // While a step is open, goes on to a later one without a commit between them: waits for the writes of the open one;
  // its records are then rewritten where they are, and the commit to come is of both. `revision`: at least this one.
  virtual void begin_step(std::uint64_t step, std::uint32_t revision) = 0;
  void begin_step(std::uint64_t step) { begin_step(step, 0); }
  // The checksum of one tile for write(); compute it while the tile is in cache. It includes the record's next extent,
  // so it is valid for the current step only, and the record counts as touched.
  virtual std::uint64_t checksum(RecordId record, Region region, std::uint32_t tile,
                                 std::span<const std::byte> bytes) = 0;
  // Writes tiles of the current step. `source` stays valid and unchanged until done. Durability step: before
  // commit(), all tiles of both regions of a touched record must have been written.
  virtual Completion write(RecordId record, Region region, std::uint32_t first, std::uint32_t count,
                           std::span<const std::byte> source, std::span<const std::uint64_t> checksums,
                           aio::Priority priority) = 0;
  // Starts the commit of the current step and returns at once; a thread of the store waits for the writes, flushes,
  // writes the manifest and flushes again. `agree` (optional) then runs on that thread: the exchange with the other
  // participants, which passes them this one's error (null: none); an exception from it fails the commit. The extents
  // of the step before are reused only after that. Throws StoreError, and the step stays open, if a touched record was
  // not completely rewritten or, at the first commit, a record was never written; UsageError if the caller state is too
  // long. A step in which nothing was written may be committed. Durability none: waits for writes only, agree does not
  // run.
  using Agree = std::function<void(std::exception_ptr problem)>;
  virtual Completion commit(std::span<const std::byte> caller_state, Agree agree = {}) = 0;

  // Makes the last commit again, even if it is unfinished, with another caller state: its next revision. No data moves.
  // Returns at once. Pre: no step is open; durability step. Errors: UsageError for too long a state.
  virtual Completion recommit(std::span<const std::byte> caller_state, Agree agree = {}) = 0;

  // --- named checkpoints ---------------------------------------------------------------------------------------------
  // Makes the last commit, even if it is unfinished, a checkpoint named `name`, until newer checkpoints need its place.
  // No data moves; its extents are not reused. A checkpoint of the same name is replaced. Returns at once; the store's
  // thread writes and flushes a manifest, then runs `agree`, and only then removes an older checkpoint.
  // Pre: no step is open; checkpoints_max > 0. Errors: UsageError for a name (checkpoint_name_problem), or too long a
  // state.
  virtual Completion add_checkpoint(const std::string& name, std::span<const std::byte> caller_state,
                                    Agree agree = {}) = 0;
  // Removes a named checkpoint; its space is reused. Waits for the drive. Pre: no step is open.
  virtual void remove_checkpoint(std::uint64_t checkpoint_serial) = 0;
  virtual std::uint32_t checkpoints_max() const = 0;  // without the places that hold() needs
  // The last commit, to be read beside later steps: its extents are not reused while the reader lives, which ends
  // before the store. Reads its tables from the drive. Nothing of it outlives the process. Pre: no step is open and no
  // commit under way but the one whose completion calls this; held_commits_max is 1, and no other commit is held.
  virtual std::unique_ptr<StoreReader> hold() = 0;

  // Space beside the data, on the same drives, under this store's lock. `queues`: as of create() or open().
  virtual std::unique_ptr<Scratch> make_scratch(std::uint64_t bytes, Queues queues) const = 0;

  virtual std::vector<std::string> data_paths() const = 0;  // one for each drive
  virtual std::uint64_t store_number() const = 0;

 protected:
  Store() = default;

 private:
  class Impl;
};

}  // namespace hoist::tiers
