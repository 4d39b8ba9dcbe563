// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_search.hpp - which store below the offload directory, and which of its commits, a run continues
// from: the newest that all ranks have.
//
// Threading  The program's thread.
// Errors     IoError and StoreError of one rank become CommErrors of the others; every rank throws CommonStoreError.
// Main path  find -> directories -> look at each, newest first -> commits that all ranks list.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/core/error.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>
#include <hoist/zero/types.hpp>

namespace hoist::detail {

// A StoreError that every rank throws, because all of them exchanged what it is about.
class CommonStoreError : public StoreError {
 public:
  using StoreError::StoreError;
};

// Identifies a commit: two ranks mean the same one if all fields are equal.
struct CommonCommit {
  std::uint64_t step = 0;
  std::uint64_t revision = 0;
  std::uint64_t run = 0;                // equal for the stores that ranks made together
  std::uint64_t checkpoint_serial = 0;  // of named checkpoints
  std::uint64_t name_hash = 0;
  friend auto operator<=>(const CommonCommit&, const CommonCommit&) = default;
  bool is(const tiers::CommitHeader& header) const {
    return step == header.step && revision == header.revision && checkpoint_serial == header.checkpoint_serial;
  }
};

// A store, and the commits in it that all ranks can continue from.
struct RestoreSource {
  StoreDirectory directory;
  int world_size = 0;                 // of the run that made this sharding group's store; 0: no readable manifest
  std::vector<CommonCommit> commits;  // newest first
  std::vector<tiers::CommitHeader> headers;  // of those, in no order, as this rank sees them
  // For the whole job, however its groups differ:
  bool same_ranks = false;                  // every group has as many ranks as made its store
  bool has_room = false;                    // every store has room for the checkpoints that are to stay
  bool has_more_than_first_commit = false;  // some rank holds more than the commit that a new store begins with
  std::vector<std::string> lacking;         // which ranks find no files of theirs, as a part of a sentence each
  // An attempt that ended before all ranks had the store's first commit; it cannot be resumed.
  bool is_unfinished() const { return commits.empty() && !has_more_than_first_commit; }
};

class StoreSearch {
 public:
  StoreSearch(const RankAgreement& ranks, const EngineOptions& options) : ranks_(ranks), options_(options) {}

  // Whether a store that has come further than its first commit, and has no commit that every rank has, is an error.
  enum class Incomplete : std::uint8_t { refuse, pass_over };
  // [J] The newest store that has a commit to continue from. `from`: nothing for a store's commits, "" for all steps it
  // keeps, or the name of one.
  std::optional<RestoreSource> find(const std::optional<std::string>& from,
                                    Incomplete incomplete = Incomplete::refuse) const;
  // [J] The newest of each name, those of older stores first.
  std::vector<NamedCheckpoint> find_checkpoints() const;
  std::vector<NamedCheckpoint> checkpoints_in(const StoreDirectory& where) const;  // [J]
  // [J] Every store that any rank sees, newest first.
  std::vector<StoreDirectory> directories() const;
  // [J] What the ranks hold of one of them; `from` as in find().
  RestoreSource look(const StoreDirectory& where, const std::optional<std::string>& from = std::nullopt) const;
  std::uint64_t newest_order() const;  // [J] of them; 0 where there is none
  // [J] CommonStoreError when a fresh start would overlook, or overwrite, a training: of another number of ranks, or
  // one that only some ranks hold.
  void refuse_others() const;
  // [J] The same where a fresh start would make a store of its own: CommonStoreError when there is a commit.
  void refuse_any() const;
  // [J] CommonStoreError if the run goes on, or may go on, in a newer store than the one that was opened: a process
  // took over from that one while this one waited for its lock.
  void refuse_newer(const StoreDirectory& opened) const;
  // [J] The commits among these that every rank of the job lists, newest first. `store_number`: of the store that lists
  // them.
  std::vector<CommonCommit> common(std::span<const tiers::CommitHeader> commits, std::uint64_t store_number) const;
  // [J] The commit of an open store to continue from, chosen under its lock: its last owner may have committed since
  // find(). `from`: the name of a named checkpoint, or "".
  CommonCommit choose(const tiers::Store& store, const std::string& from) const;
  CommonStoreError nothing_to_restore(const std::string& from) const;  // [J]
  // Whether the commit is of the run whose store on this rank has that number.
  bool is_of_run(const CommonCommit& commit, std::uint64_t store_number) const;
  // [J] Whether a rank has lost its own directory, or a further drive of the newest store: the new drive's directory is
  // absent, or holds at most what an unfinished restore left there.
  bool has_lost_drives() const;
  // Whether a further drive is missing of this rank's store; of any rank's, where another number of ranks made it.
  bool lacks_a_drive(const StoreDirectory& where) const;
  // [J] Whether any rank holds more than the commit that a new store begins with.
  bool has_more_than_first_commit() const;
  // [J] The newest step that any rank's files have a commit of, whether or not the others have it.
  std::optional<std::uint64_t> newest_step_of_any() const;

 private:
  // Why these ranks cannot continue it, if another number of ranks made it; otherwise empty.
  std::string made_by_other_ranks(const RestoreSource& source) const;
  CommonStoreError incomplete_store(const RestoreSource& source) const;
  CommonStoreError used_store(const RestoreSource& source) const;
  int agree_on_world_size(const std::string& directory) const;  // of the store there; 0: no manifest can be read

  const RankAgreement& ranks_;
  const EngineOptions& options_;
};

}  // namespace hoist::detail
