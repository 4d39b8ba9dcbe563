// SPDX-License-Identifier: Apache-2.0
// zero/checkpoint/store_search.hpp - which store below the offload directory, and which of its commits, a run continues
// from: the newest that all ranks have. Refuses a fresh start that would overlook a training.
//
// Threading  The program's thread. Every function is [J]: all ranks of the job call it.
// Errors     CommonStoreError, on every rank; IoError and StoreError of one rank become CommErrors of the others.
// Main path  find_store -> open it -> refuse_newer_store -> choose_commit.
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
// one of whose first commit a rank's part is out of reach, unless an older store holds as late a step. `refuse` leaves
// a run's first store, whose directory has no name of its own, to refuse_other_stores().
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
// Refuses if the run goes on, or may go on, in a newer store than the one that was opened: a process took over from
// that one while this one waited for its lock.
void refuse_newer_store(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& opened);

}  // namespace hoist::detail
