// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/core/log.hpp>
#include <hoist/zero/checkpoint/reshard.hpp>
#include <hoist/zero/checkpoint/store_search.hpp>
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

// Of another number of ranks than `world_size`, and no rank whose files are here ever committed.
bool is_a_failed_start(const std::string& directory, int world_size) {
  bool of_others = false;
  for (const int rank : tiers::Store::ranks_in(directory)) {
    const tiers::Store::Found found = tiers::Store::look(directory, rank);
    if (!found.exists) continue;  // another rank is removing it
    if (found.ever_committed) return false;
    of_others = of_others || found.identity->world_size != world_size;
  }
  return of_others;
}

// Whether what this rank sees of the store is whole and keeps no named checkpoint that counts: among the `newer` ones
// are as many as are to be kept, or one of each name. Of a store of as many ranks its own part is looked at, else all.
bool is_replaced(const std::string& directory, int rank, bool same_ranks, const std::vector<NamedCheckpoint>& newer,
                 std::uint32_t keep_steps) {
  const bool enough = keep_steps > 0 && newer.size() >= keep_steps;
  const auto keeps_nothing = [&](const std::vector<CommitHeader>& commits, const std::vector<CommitHeader>& kept) {
    return !commits.empty() &&
           (enough || std::ranges::all_of(kept, [&](const CommitHeader& checkpoint) {
              return std::ranges::find(newer, checkpoint.name, &NamedCheckpoint::name) != newer.end();
            }));
  };
  if (same_ranks) {
    const tiers::Store::Found own = tiers::Store::look(directory, rank);
    return keeps_nothing(own.commits, own.checkpoints);
  }
  if (tiers::Store::ranks_in(directory).empty()) return false;
  const StoreSummary summary = look_at_one_store(directory);
  const bool whole = summary.world_size && summary.ranks.size() == static_cast<std::size_t>(*summary.world_size);
  return whole && std::ranges::all_of(summary.ranks, [&](const StoreSummary::Rank& of) {
           return keeps_nothing(of.commits, of.checkpoints);
         });
}

}  // namespace

void remove_unfinished_stores(const RankAgreement& ranks, const EngineOptions& options, std::uint64_t first) {
  const StoreSearch search(ranks, options);
  std::vector<StoreDirectory> unfinished;
  for (const StoreDirectory& store : search.directories())
    if (store.order >= first && search.look(store).is_unfinished()) unfinished.push_back(store);
  if (unfinished.empty()) return;
  on_every_rank(ranks, "remove what an earlier attempt left", [&] {
    for (const StoreDirectory& store : unfinished) {
      if (remove_store(options.drive_directories(), store, options.lock_timeout)) continue;
      throw StoreError(
          fmt::format("another process uses the store in {}, which holds no commit yet; wait for it to end",
                      store.in(options.store_directory)));
    }
  });
}

void remove_never_committed(const RankAgreement& ranks, const EngineOptions& options) {
  ranks.run_in_job("remove what an earlier start left", [&] {  // each rank: directories may be the ranks' own
    if (options.store_directory.empty() || !is_a_failed_start(options.store_directory, ranks.group().size())) return;
    if (!remove_store(options.drive_directories(), {}, options.lock_timeout))
      throw StoreError(
          fmt::format("another process is making a store of another number of ranks in {}; wait for it "
                      "to end",
                      options.store_directory));
  });
}

void remove_older_stores(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& present,
                         std::span<const StoreDirectory> spared) {
  constexpr Nanoseconds kNow{0};
  const StoreSearch search(ranks, options);
  std::vector<NamedCheckpoint> newer = search.checkpoints_in(present);  // than the store that is looked at, by name
  std::vector<StoreDirectory> useless;
  std::vector<StoreDirectory> stores = search.directories();
  if (stores.empty() || stores.back().order > 0) stores.push_back({});  // it may have no manifest left
  for (const StoreDirectory& other : stores) {
    if (other.order == present.order) continue;
    const bool is_spared = std::ranges::find(spared, other.order, &StoreDirectory::order) != spared.end();
    const RestoreSource store = search.look(other);
    bool remove = !other.name.empty() && store.is_unfinished();
    if (!remove && other.order < present.order) {
      bool half_removed = false;  // by a process that was killed
      ranks.run_in_group("look at the store it took over from", [&] {
        const std::string directory = other.in(options.store_directory);
        half_removed = tiers::Store::is_half_removed(directory);
        remove = is_replaced(directory, ranks.group().rank(), store.world_size == ranks.group().size(), newer,
                             options.keep_steps) &&
                 !search.lacks_a_drive(other);
      });
      remove = ranks.smallest(remove ? 1 : 0) == 1 || ranks.smallest(half_removed ? 0 : 1) == 0;
    }
    remove = remove && !is_spared;
    if (remove) useless.push_back(other);
    if (other.order > present.order) continue;
    std::string names;
    for (const NamedCheckpoint& checkpoint : search.checkpoints_in(other)) {
      if (std::ranges::find(newer, checkpoint.name, &NamedCheckpoint::name) != newer.end()) continue;
      names += fmt::format("{}'{}'", names.empty() ? "" : ", ", checkpoint.name);
      newer.push_back(checkpoint);
    }
    if (!remove && !names.empty() && ranks.job().rank() == 0)
      log_info("the store in {} stays, with the named checkpoints {}", other.in(options.store_directory), names);
  }
  if (ranks.all_true_in_job(useless.empty())) return;  // one group may have lost its store
  on_every_rank(ranks, "remove the store it took over from", [&] {
    for (const StoreDirectory& store : useless) remove_store(options.drive_directories(), store, kNow);
  });
}

}  // namespace hoist::detail
