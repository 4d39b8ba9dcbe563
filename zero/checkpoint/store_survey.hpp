// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_survey.hpp - what the ranks of a job find below their offload directories: which stores there
// are, and which commits of each all ranks have. Changes nothing.
//
// Threading  The program's thread. Functions marked [J] are called by all ranks of the job.
// Errors     IoError and StoreError of one rank become CommErrors of the others.
// Main path  directories -> look at one of them -> commits that all ranks list.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>
#include <hoist/zero/types.hpp>

namespace hoist::detail {

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
  std::uint64_t store_number = 0;            // of this rank's part
  // For the whole job, however its groups differ:
  bool same_ranks = false;                  // every group has as many ranks as made its store
  bool has_room = false;                    // every store has room for the checkpoints and the caller state to come
  bool has_more_than_first_commit = false;  // some rank holds more than the commit that a new store begins with
  bool has_manifest = false;                // some rank finds a manifest, if only another rank's
  std::vector<std::string> lacking;         // which ranks find no manifest of theirs, as a part of a sentence each
  bool lacks_files = false;                 // a rank finds no manifest, under neither of its names
  std::uint64_t newest_step = 0;            // the newest step that some rank has, or had
  // An attempt that ended before all ranks had the store's first commit; it cannot be resumed.
  bool is_unfinished() const { return commits.empty() && !has_more_than_first_commit; }
  // All ranks make their files before any of them commits. If one rank has a step of training, and another finds no
  // files, these were there: on a drive that is not mounted, say. Returns that step; 0: it is not so.
  std::uint64_t step_out_of_reach() const { return commits.empty() && lacks_files ? newest_step : 0; }
  // The same as is_unfinished(), and no step is lost with it to a run that has a commit of `step`.
  bool is_unfinished_beside(std::uint64_t step) const { return is_unfinished() && step_out_of_reach() <= step; }
};

class StoreSurvey {
 public:
  StoreSurvey(const RankAgreement& ranks, const EngineOptions& options) : ranks_(ranks), options_(options) {}

  // [J] Every store that any rank sees, newest first. The n-th is of one attempt on all ranks.
  std::vector<StoreDirectory> directories() const;
  // [J] Of them, and of those of which only a further drive is left; 0 where there is none.
  std::uint64_t newest_order() const;
  // [J] What the ranks hold of one of them. `from`: nothing for a store's commits, "" for all its named checkpoints, or
  // the name of one.
  RestoreSource look(const StoreDirectory& where, const std::optional<std::string>& from = std::nullopt) const;
  // [J] The commits among these that every rank of the job lists, newest first. `store_number`: of the store that lists
  // them.
  std::vector<CommonCommit> common(std::span<const tiers::CommitHeader> commits, std::uint64_t store_number) const;
  // [J] Whether the newest store has no commit yet, but the files of all ranks, and is of the same run as this commit,
  // which an older store holds: the run has given that commit up, or was to continue in a store with more room.
  bool has_given_up(const CommonCommit& commit) const;
  // Whether the commit is of the run whose store on this rank has that number.
  bool is_of_run(const CommonCommit& commit, std::uint64_t store_number) const;

  std::vector<NamedCheckpoint> checkpoints_in(const StoreDirectory& where) const;  // [J]
  // [J] The newest of each name in all stores, those of older stores first.
  std::vector<NamedCheckpoint> checkpoints() const;

  // [J] Whether any rank holds more than the commit that a new store begins with.
  bool has_more_than_first_commit() const;
  // [J] The newest step that any rank's files have a commit of, whether or not the others have it.
  std::optional<std::uint64_t> newest_step_of_any() const;

  // [J] Whether a rank has lost its own directory, or a further drive of the newest store: the new drive's directory is
  // absent, or holds at most what an unfinished restore left there.
  bool has_lost_drives() const;
  // Whether a further drive is missing of this rank's store; of any rank's, where another number of ranks made it.
  bool lacks_a_drive(const StoreDirectory& where) const;

 private:
  int agree_on_world_size(const std::string& directory) const;  // of the store there; 0: no manifest can be read

  const RankAgreement& ranks_;
  const EngineOptions& options_;
};

// The stores of a sharding group, newest first, with an absent one wherever another group has one more of the same
// order: then the n-th is of one attempt in all groups. (Two of one order: files could not be reached once.)
// `orders_of_job`: those of each rank's group, by rank. `world_size`: for the name of an absent store.
std::vector<StoreDirectory> aligned(std::span<const StoreDirectory> own,
                                    std::span<const std::vector<std::uint64_t>> orders_of_job, int world_size);

}  // namespace hoist::detail
