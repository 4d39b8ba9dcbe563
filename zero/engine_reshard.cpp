// SPDX-License-Identifier: Apache-2.0
// zero/engine_reshard.cpp - going on with another number of ranks: a new store beside the old one takes over its state,
// and the old one goes once the new one is committed everywhere. A crash at any moment leaves one of them whole.
#include <algorithm>
#include <mutex>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/detail/restore_source.hpp>

namespace hoist {

using tiers::CommitHeader;

tiers::Budget::Hold Engine::Impl::hold_for_reading(std::uint64_t bytes) const {
  tiers::Budget& budget = runtime.pinned_budget();
  const detail::MemoryPlan least(options, table, {detail::device_access(runtime.options()), 0, 0});
  const tiers::StoreOptions store =
      detail::store_options(options, table, detail::RecordMap(table), runtime.rank(), place, nullptr);
  const std::uint64_t least_bytes = least.bytes(detail::MemoryTier::pinned) + tiers::Store::cost(store).memory_bytes;
  const std::uint64_t need_bytes = round_up(budget.held_bytes() + least_bytes + bytes, kBlockAlignment);
  constexpr const char* kWhat = "the tables of the store that is taken over";
  if (need_bytes > budget.limit_bytes())
    throw BudgetError({.tier = budget.tier(),
                       .have_bytes = budget.limit_bytes(),
                       .need_bytes = need_bytes,
                       .key = budget.key(),
                       .detail = fmt::format("the engine with its smallest buffers and, until it runs, {}", kWhat)});
  return budget.take(bytes, kWhat);
}

// Into a new store, so that the old one is whole until this one is committed everywhere.
void Engine::Impl::reshard(const Source& source, const RestoreOptions& restore_options,
                           const std::vector<std::uint64_t>& passed_over) {
  if (nvme_placement() && !stores_steps())
    throw detail::CommonStoreError(
        fmt::format("the store in {} is of {} ranks, and its state would be taken over into one of durability "
                    "\"none\", which nothing outlives; use \"step\"",
                    source.place.in(options.store_directory), source.world_size));
  const CommonCommit chosen = restore_options.from.empty()
                                  ? source.commits.front()
                                  : *std::ranges::max_element(source.commits, {}, &CommonCommit::kept_serial);
  const std::string directory = source.place.in(options.store_directory);
  std::unique_ptr<StoredModel> stored;
  tiers::Budget::Hold reading;
  all_together("open the store it goes on from", [&] {
    const std::string layout = look_at_one_store(directory).layout;
    if (layout != table.identity())
      throw StoreError(fmt::format("the store in {} holds another model: {}", directory,
                                   tiers::first_difference(layout, table.identity())));
    StoredModelOptions which{.from = restore_options.from, .below = false};
    if (which.from.empty()) which.step = chosen.step;
    stored = std::make_unique<StoredModel>(directory, which);
    reading = hold_for_reading(stored->memory_bytes());
    const auto state = stored->caller_state(runtime.rank() < stored->world_size() ? runtime.rank() : 0);
    require_room_for(state);
    step_state = {.scaler = stored->loss_scaler(), .program = {state.begin(), state.end()}};
  });
  if (step_state.scaler) scaler.restore(*step_state.scaler);
  remove_unfinished_places(source.place.order, passed_over);
  place = detail::new_store_directory(agree_on_directories().front().order + 1, runtime.world_size());
  step_count = chosen.step;
  seal(/*create_store=*/true);
  const Ledger::Apart apart(runtime.ledger());
  all_together("take over the state", [&] {
    std::mutex one_at_a_time;
    const auto read = [&](ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
      const std::lock_guard lock(one_at_a_time);
      stored->read(parameter.index, state, first, out);
    };
    fill_homes([&](ParameterId parameter, std::uint64_t first,
                   std::span<float> out) { read(parameter, State::master, first, out); },
               read);
    stored.reset();
  });
  reading = {};
  if (!nvme_placement()) return;  // the next save() will be the new store's first commit
  step_state = commit_state(step_state.program);
  commit("", step_state);
  last_commit.wait();
}

std::vector<std::string> Engine::Impl::drive_directories() const {
  std::vector<std::string> directories{options.store_directory};
  directories.insert(directories.end(), options.stripe_directories.begin(), options.stripe_directories.end());
  return directories;
}

namespace {

// A store that was being made when its program died: not even its first commit is on all ranks, or, if it was
// `passed_over`, on those of all groups.
bool is_unfinished(const std::string& directory, bool passed_over) {
  std::size_t committed = 0;
  int world_size = 1;
  for (const int rank : tiers::Store::ranks_in(directory)) {
    const tiers::Store::Found found = tiers::Store::look(directory, rank);
    if (!found.exists) continue;
    if (!found.identity || detail::was_resumed(found.commits) || found.commits.size() > 1 || !found.kept.empty())
      return false;
    world_size = found.identity->world_size;
    committed += found.commits.size();
  }
  return passed_over || committed < static_cast<std::size_t>(world_size);
}

bool is_among(std::uint64_t order, const std::vector<std::uint64_t>& orders) {
  return std::ranges::find(orders, order) != orders.end();
}

}  // namespace

// What earlier attempts left.
void Engine::Impl::remove_unfinished_places(std::uint64_t after, const std::vector<std::uint64_t>& passed_over) const {
  all_together("remove what an earlier attempt left", [&] {
    if (runtime.rank() != 0) return;
    for (const detail::StoreDirectory& other : detail::store_directories(options.store_directory)) {
      const std::string directory = other.in(options.store_directory);
      if (other.order <= after || !is_unfinished(directory, is_among(other.order, passed_over))) continue;
      if (!detail::remove_store(drive_directories(), other, options.lock_timeout))
        throw StoreError(
            fmt::format("another process is making the store in {} from this one; wait for it to end", directory));
    }
  });
}

// Stores that this one has taken over from; those that keep steps, or are not whole, stay, and so, until the next
// start, does one that somebody reads.
void Engine::Impl::remove_older_places(const std::vector<std::uint64_t>& passed_over) const {
  if (!nvme_placement() && live.store->commits().empty()) return;  // not taken over yet
  constexpr Nanoseconds kNow{0};
  all_together("remove the store it took over from", [&] {
    if (runtime.rank() != 0) return;
    for (const detail::StoreDirectory& other : detail::store_directories(options.store_directory)) {
      if (other.order == place.order) continue;
      if (!other.name.empty() && is_unfinished(other.in(options.store_directory), is_among(other.order, passed_over))) {
        detail::remove_store(drive_directories(), other, kNow);
        continue;
      }
      if (other.order > place.order || tiers::Store::ranks_in(other.in(options.store_directory)).empty()) continue;
      const StoreSummary summary = look_at_one_store(other.in(options.store_directory));
      const bool whole = summary.world_size && summary.ranks.size() == static_cast<std::size_t>(*summary.world_size);
      const bool keeps = std::ranges::any_of(
          summary.ranks, [](const StoreSummary::Rank& rank) { return !rank.kept.empty() || rank.commits.empty(); });
      if (whole && !keeps) detail::remove_store(drive_directories(), other, kNow);
    }
  });
}

}  // namespace hoist
