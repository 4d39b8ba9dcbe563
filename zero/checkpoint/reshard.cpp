// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/zero/checkpoint/reshard.hpp>
#include <hoist/zero/checkpoint/store_survey.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist::detail {

using tiers::CommitHeader;

namespace {

// Runs `part` on every rank, since directories may be the ranks' own. Rank 0 comes first, so that ranks with one
// directory do not wait for each other's locks.
void on_every_rank(const RankAgreement& ranks, const char* what, const std::function<void()>& part) {
  for (const bool first : {true, false}) {
    ranks.run_in_job(what, [&] {
      if ((ranks.group().rank() == 0) == first) part();
    });
  }
}

// The named checkpoints of the stores that are newer than the one that is looked at.
struct NewerCheckpoints {
  std::vector<NamedCheckpoint> list;
  std::uint32_t keep_steps = 0;
  bool hold(const std::string& name) const {
    return std::ranges::find(list, name, &NamedCheckpoint::name) != list.end();
  }
  // Whether they are as many as are to be kept, or there is one of each name.
  bool replace(const std::vector<CommitHeader>& kept) const {
    return (keep_steps > 0 && list.size() >= keep_steps) ||
           std::ranges::all_of(kept, [&](const CommitHeader& checkpoint) { return hold(checkpoint.name); });
  }
};

// Whether what this rank sees of the store is whole and keeps no named checkpoint that counts. Looks at this rank's own
// part if the store has as many ranks, and at all parts otherwise.
bool is_replaced(const std::string& directory, int rank, bool same_ranks, const NewerCheckpoints& newer) {
  const auto keeps_nothing = [&](const std::vector<CommitHeader>& commits, const std::vector<CommitHeader>& kept) {
    return !commits.empty() && newer.replace(kept);
  };
  if (same_ranks) {
    const tiers::Store::Found own = tiers::Store::look(directory, rank);
    return keeps_nothing(own.commits, own.checkpoints);
  }
  if (tiers::Store::ranks_in(directory).empty()) return false;
  const StoreSummary summary = look_at_one_store(directory);
  return is_whole(summary) && std::ranges::all_of(summary.ranks, [&](const StoreSummary::Rank& of) {
           return keeps_nothing(of.commits, of.checkpoints);
         });
}

// Whether a manifest here has a named checkpoint that newer ones do not replace, or may have one.
bool holds_what_counts(const std::string& directory, const NewerCheckpoints& newer) {
  return std::ranges::any_of(tiers::Store::ranks_in(directory), [&](int rank) {
    const tiers::Store::Found found = tiers::Store::look(directory, rank);
    return !found.identity || !newer.replace(found.checkpoints);
  });
}

void check_unfinished(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& store) {
  tiers::Store::check_unfinished(store.in(options.drive_directories()), ranks.group().size(),
                                 /*took_over=*/store.order > 0);
}

// Whether that check passes on every rank; a rank on which it does not says why in the log.
bool may_be_removed(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& store) {
  bool may_be = true;
  ranks.run_in_job("look at what an earlier attempt left", [&] {
    try {
      check_unfinished(ranks, options, store);
    } catch (const Error& error) {
      may_be = false;
      log_warning("the store in {} stays: {}", store.in(options.store_directory), error.what());
    }
  });
  return ranks.all_true_in_job(may_be);
}

// The same once more under the locks. If another process holds one, the store stays until the next start.
void remove_unfinished_now(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& store) {
  try {
    remove_store(options.drive_directories(), store, Nanoseconds{0}, [&] { check_unfinished(ranks, options, store); });
  } catch (const Error& error) {
    log_info("the store in {} stays: {}", store.in(options.store_directory), error.what());
  }
}

// Adds the store in the offload directory itself if it is not listed: it may have lost its last manifest.
std::vector<StoreDirectory> with_first(std::vector<StoreDirectory> stores) {
  if (stores.empty() || stores.back().order > 0) stores.push_back({});
  return stores;
}

}  // namespace

void remove_unfinished_stores(const RankAgreement& ranks, const EngineOptions& options, StoreOrders orders,
                              std::uint64_t continued) {
  const StoreSurvey survey(ranks, options);
  std::vector<StoreDirectory> unfinished;
  for (const StoreDirectory& store : with_first(survey.directories())) {
    if (store.order < orders.first || store.order > orders.last) continue;
    const RestoreSource found = survey.look(store);
    if (!found.is_unfinished_beside(continued)) continue;
    unfinished.push_back(store);
    if (found.newest_step > continued && ranks.job().rank() == 0)
      log_warning(
          "the store in {} is removed: it was being made, and not all ranks had reached its first commit, step {}",
          store.in(options.store_directory), found.newest_step);
  }
  if (unfinished.empty()) return;
  const std::vector<std::string> drives = options.drive_directories();
  const auto check = [&](const StoreDirectory& store) { check_unfinished(ranks, options, store); };
  // On all ranks before anything is removed on one of them: directories may be the ranks' own.
  ranks.run_in_job("look at what an earlier attempt left", [&] { std::ranges::for_each(unfinished, check); });
  on_every_rank(ranks, "remove what an earlier attempt left", [&] {
    for (const StoreDirectory& store : unfinished)
      remove_store(drives, store, options.lock_timeout, [&] { check(store); });
  });
}

void remove_replaced_stores(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& present,
                            std::span<const StoreDirectory> spared) {
  constexpr Nanoseconds kNow{0};
  struct Useless {
    StoreDirectory store;
    bool is_unfinished = false;
  };
  const StoreSurvey survey(ranks, options);
  const RestoreSource continued = survey.look(present);
  const std::uint64_t step = continued.commits.empty() ? 0 : continued.commits.front().step;
  NewerCheckpoints newer{survey.checkpoints_in(present), options.keep_steps};
  std::vector<Useless> useless;
  for (const StoreDirectory& other : with_first(survey.directories())) {
    if (other.order == present.order) continue;
    const bool is_spared = std::ranges::find(spared, other.order, &StoreDirectory::order) != spared.end();
    const RestoreSource store = survey.look(other);
    const bool is_unfinished = !other.name.empty() && store.is_unfinished_beside(step);
    bool remove = is_unfinished && may_be_removed(ranks, options, other);
    if (!is_unfinished && other.order < present.order) {
      bool half_removed = false, is_kept = false;  // by a process that was killed; for a named checkpoint
      ranks.run_in_group("look at the store it took over from", [&] {
        const std::string directory = other.in(options.store_directory);
        half_removed = tiers::Store::is_half_removed(directory);
        is_kept = holds_what_counts(directory, newer);
        remove = is_replaced(directory, ranks.group().rank(), store.world_size == ranks.group().size(), newer) &&
                 !survey.lacks_a_drive(other);
      });
      remove = ranks.smallest(remove ? 1 : 0) == 1 ||
               (ranks.smallest(half_removed ? 0 : 1) == 0 && ranks.smallest(is_kept ? 0 : 1) == 1);
    }
    remove = remove && !is_spared;
    if (remove) useless.push_back({other, is_unfinished});
    if (other.order > present.order) continue;
    std::string names;
    for (const NamedCheckpoint& checkpoint : survey.checkpoints_in(other)) {
      if (newer.hold(checkpoint.name)) continue;
      names += fmt::format("{}'{}'", names.empty() ? "" : ", ", checkpoint.name);
      newer.list.push_back(checkpoint);
    }
    if (!remove && !names.empty() && ranks.job().rank() == 0)
      log_info("the store in {} stays, with the named checkpoints {}", other.in(options.store_directory), names);
  }
  if (ranks.all_true_in_job(useless.empty())) return;  // one group may have lost its store
  on_every_rank(ranks, "remove the store it took over from", [&] {
    for (const auto& [store, is_unfinished] : useless) {
      if (is_unfinished)
        remove_unfinished_now(ranks, options, store);
      else
        remove_store(options.drive_directories(), store, kNow);
    }
  });
}

}  // namespace hoist::detail
