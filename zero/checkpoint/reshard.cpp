// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/reshard.hpp>
#include <hoist/zero/checkpoint/store_search.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist::detail {

namespace {

std::vector<std::string> drive_directories(const EngineOptions& options) {
  std::vector<std::string> directories{options.store_directory};
  directories.insert(directories.end(), options.stripe_directories.begin(), options.stripe_directories.end());
  return directories;
}

bool is_among(std::uint64_t order, const std::vector<std::uint64_t>& orders) {
  return std::ranges::find(orders, order) != orders.end();
}

// A store that was being made when its program died: not even its first commit is on all ranks, or, if it was passed
// over, on those of all groups.
bool is_unfinished(const std::string& directory, bool passed_over) {
  std::size_t committed = 0;
  int world_size = 1;
  for (const int rank : tiers::Store::ranks_in(directory)) {
    const tiers::Store::Found found = tiers::Store::look(directory, rank);
    if (!found.exists) continue;
    if (!found.identity || was_resumed(found.commits) || found.commits.size() > 1 || !found.checkpoints.empty())
      return false;
    world_size = found.identity->world_size;
    committed += found.commits.size();
  }
  return passed_over || committed < static_cast<std::size_t>(world_size);
}

// Of another number of ranks than `world_size`, and no rank whose files are here ever committed.
bool is_a_failed_start(const std::string& directory, int world_size) {
  bool of_others = false;
  for (const int rank : tiers::Store::ranks_in(directory)) {
    const tiers::Store::Found found = tiers::Store::look(directory, rank);
    if (!found.exists) continue;  // another rank is removing it
    if (!found.identity || !found.damage.empty() || !found.commits.empty() || !found.abandoned.empty() ||
        !found.checkpoints.empty())
      return false;
    of_others = of_others || found.identity->world_size != world_size;
  }
  return of_others;
}

bool is_whole_and_keeps_nothing(const std::string& directory) {
  const StoreSummary summary = look_at_one_store(directory);
  const bool whole = summary.world_size && summary.ranks.size() == static_cast<std::size_t>(*summary.world_size);
  return whole && std::ranges::none_of(summary.ranks, [](const StoreSummary::Rank& rank) {
           return !rank.checkpoints.empty() || rank.commits.empty();
         });
}

}  // namespace

void remove_unfinished_stores(const RankAgreement& ranks, const EngineOptions& options, std::uint64_t after,
                              const std::vector<std::uint64_t>& passed_over) {
  ranks.all_together("remove what an earlier attempt left", [&] {
    if (ranks.group().rank() != 0) return;
    for (const StoreDirectory& other : store_directories(options.store_directory)) {
      const std::string directory = other.in(options.store_directory);
      if (other.order <= after || !is_unfinished(directory, is_among(other.order, passed_over))) continue;
      if (!remove_store(drive_directories(options), other, options.lock_timeout))
        throw StoreError(
            fmt::format("another process is making the store in {} from this one; wait for it to end", directory));
    }
  });
}

void remove_never_committed(const RankAgreement& ranks, const EngineOptions& options) {
  ranks.all_together("remove what an earlier start left", [&] {  // each rank: directories may be the ranks' own
    if (options.store_directory.empty() || !is_a_failed_start(options.store_directory, ranks.group().size())) return;
    if (!remove_store(drive_directories(options), {}, options.lock_timeout))
      throw StoreError(
          fmt::format("another process is making a store of another number of ranks in {}; wait for it "
                      "to end",
                      options.store_directory));
  });
}

void remove_older_stores(const RankAgreement& ranks, const EngineOptions& options, const StoreDirectory& present,
                         const std::vector<std::uint64_t>& passed_over) {
  constexpr Nanoseconds kNow{0};
  ranks.all_together("remove the store it took over from", [&] {
    if (ranks.group().rank() != 0) return;
    for (const StoreDirectory& other : store_directories(options.store_directory)) {
      if (other.order == present.order) continue;
      const std::string directory = other.in(options.store_directory);
      const bool unfinished = !other.name.empty() && is_unfinished(directory, is_among(other.order, passed_over));
      const bool older = other.order < present.order && !tiers::Store::ranks_in(directory).empty();
      if (unfinished || (older && is_whole_and_keeps_nothing(directory)))
        remove_store(drive_directories(options), other, kNow);
    }
    if (present.order > 0 && tiers::Store::is_half_removed(options.store_directory))
      remove_store(drive_directories(options), {}, kNow);
  });
}

}  // namespace hoist::detail
