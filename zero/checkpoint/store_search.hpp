// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_search.hpp - which store below the offload directory, and which of its commits, a run continues
// from: the newest that all ranks have. Refuses a fresh start that would overlook a training.
//
// Threading  The program's thread. Every function is [J]: all ranks of the job call it.
// Errors     CommonStoreError, on every rank; IoError and StoreError of one rank become CommErrors of the others.
// Main path  find_store -> open it -> refuse_newer_store -> choose_commit, or refuse_changed_source.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <hoist/core/error.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/store_survey.hpp>

namespace hoist::detail {

// A StoreError that every rank throws, because all of them exchanged what it is about.
class CommonStoreError : public StoreError {
 public:
  using StoreError::StoreError;
};

// Whether a store that has come further than its first commit, and has no commit that every rank has, is an error; also
// one of whose first commit a rank's part is out of reach, unless the run goes on from an older store's commit of the
// same step. `refuse` leaves a run's first store, whose directory has no name of its own, to refuse_other_stores().
enum class Incomplete : std::uint8_t { refuse, refuse_first_too, pass_over };
// The newest store that has a commit to continue from. `from`: as in StoreSurvey::look().
std::optional<RestoreSource> find_store(const RankAgreement& ranks, const EngineOptions& options,
                                        const std::optional<std::string>& from = std::nullopt,
                                        Incomplete incomplete = Incomplete::refuse);
// This rank's header of the commit, or named checkpoint, of the open store to continue from. Chosen under the store's
// lock: its last owner may have committed since find_store(). `from`: the name of a named checkpoint, or "".
tiers::CommitHeader choose_commit(const RankAgreement& ranks, const EngineOptions& options, const tiers::Store& store,
                                  const std::string& from);
CommonStoreError nothing_to_restore(const RankAgreement& ranks, const EngineOptions& options, const std::string& from);

// Refuses a fresh start that would overlook, or overwrite, a training: of another number of ranks, or one that only
// some ranks hold.
void refuse_other_stores(const RankAgreement& ranks, const EngineOptions& options);
// The same where a fresh start would make a store of its own: refuses if there is any commit.
void refuse_any_commit(const RankAgreement& ranks, const EngineOptions& options);
// Refuses if the store's commits are not the ones that were found before its lock was taken. `from`: as above.
void refuse_changed_source(const RankAgreement& ranks, const EngineOptions& options, const RestoreSource& source,
                           const std::string& from);
// The stores that are newer than one. Of those up to the order `known`, commits were seen before anything was locked.
struct NewerStores {
  StoreDirectory than;
  std::uint64_t known = 0;
  std::string own;  // the name of the one that this process has made; "": none
};
// Refuses if the run goes on, or may go on, in one of these stores: a process took over while this one waited for a
// lock, or is at work in one.
void refuse_newer_store(const RankAgreement& ranks, const EngineOptions& options, const NewerStores& which);

}  // namespace hoist::detail
