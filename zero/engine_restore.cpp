// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <compare>
#include <mutex>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/aio/transfer_memory.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/detail/engine_impl.hpp>
#include <hoist/zero/stored_model.hpp>

namespace hoist {

using tiers::CommitHeader;
using tiers::Region;

namespace {

// A store's place, as ranks tell each other.
struct PlaceEntry {
  std::uint64_t order = 0;
  std::int64_t world_size = 0;
  friend auto operator<=>(const PlaceEntry&, const PlaceEntry&) = default;
};

}  // namespace

// --- continuing ------------------------------------------------------------------------------------------------------

// What two ranks mean by the same commit.
struct Engine::Impl::CommonCommit {
  std::uint64_t step = 0;
  std::uint64_t revision = 0;
  std::uint64_t run = 0;          // equal for the stores that ranks made together
  std::uint64_t kept_serial = 0;  // of steps kept under a name
  std::uint64_t name_digest = 0;
  friend auto operator<=>(const CommonCommit&, const CommonCommit&) = default;
  bool is(const CommitHeader& header) const {
    return step == header.step && revision == header.revision && kept_serial == header.kept_serial;
  }
};

std::vector<Engine::Impl::CommonCommit> Engine::Impl::common_to(comm::Communicator& ranks,
                                                                std::span<const CommonCommit> listed) {
  struct List {
    std::uint64_t count = 0;
    std::array<CommonCommit, tiers::kSlotCount + tiers::kKeptStepsMax + 1> commits{};
    bool holds(const CommonCommit& c) const {
      const auto end = commits.begin() + static_cast<std::ptrdiff_t>(count);
      return std::find(commits.begin(), end, c) != end;
    }
  };
  List mine;
  for (const CommonCommit& c : listed)
    if (mine.count < mine.commits.size()) mine.commits[mine.count++] = c;
  std::vector<List> all(static_cast<std::size_t>(ranks.size()));
  ranks.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  std::vector<CommonCommit> common;
  for (std::size_t i = 0; i < all[0].count; ++i) {
    const CommonCommit& candidate = all[0].commits[i];
    if (std::all_of(all.begin(), all.end(), [&](const List& rank) { return rank.holds(candidate); }))
      common.push_back(candidate);
  }
  std::sort(common.rbegin(), common.rend());
  return common;
}

// First within the sharding group, whose stores are of one run, then of what its groups have the whole job.
std::vector<Engine::Impl::CommonCommit> Engine::Impl::agree_on_commits(std::span<const CommitHeader> commits,
                                                                       std::uint64_t store_number) const {
  const std::uint64_t run = store_number - static_cast<std::uint64_t>(runtime.rank());
  std::vector<CommonCommit> listed;
  for (const CommitHeader& c : commits) listed.push_back({c.step, c.revision, run, c.kept_serial, name_digest(c.name)});
  std::vector<CommonCommit> common = common_to(runtime.communicator(), listed);
  if (!runtime.has_several_groups()) return common;
  for (CommonCommit& c : common) c.run = detail::job_part(c.run);
  return common_to(job(), common);
}

// A store, and what of it all ranks can continue from.
struct Engine::Impl::Source {
  detail::StorePlace place;
  int world_size = 0;                 // of this sharding group's; 0: no manifest can be read
  std::vector<CommonCommit> commits;  // newest first
  std::vector<CommitHeader> headers;  // of those, in no order, as this rank sees them
  // Of the whole job, however its groups differ:
  bool same_ranks = false;    // every group has as many ranks as made its store
  bool has_room = false;      // likewise, for the steps that are to be kept
  bool came_further = false;  // some rank holds more than the commit that a new store begins with
  // With several groups, newer places that came to nothing: no commit is all of theirs, and nobody went on from one.
  std::vector<std::uint64_t> passed_over;
};

namespace {

// What any of the ranks lists, highest first.
std::vector<PlaceEntry> listed_by_any(comm::Communicator& ranks, std::span<const PlaceEntry> listed) {
  struct List {
    std::uint64_t count = 0;
    std::array<PlaceEntry, 32> entries{};
  };
  List mine;
  for (const PlaceEntry& entry : listed)
    if (mine.count < mine.entries.size()) mine.entries[mine.count++] = entry;
  std::vector<List> all(static_cast<std::size_t>(ranks.size()));
  ranks.exchange(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
  std::vector<PlaceEntry> entries;
  for (const List& list : all)
    entries.insert(entries.end(), list.entries.begin(), list.entries.begin() + static_cast<std::ptrdiff_t>(list.count));
  std::ranges::sort(entries, std::greater{});
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  return entries;
}

// What a group lists, made as long as the other groups' lists: entry by entry they are of one order. Where this group
// has none, it gets a place in which nothing is.
std::vector<PlaceEntry> line_up(comm::Communicator& job, const std::vector<PlaceEntry>& of_group, int world_size) {
  // Downwards within their order, instead of by their world size. (Two of one order: files were out of sight once.)
  std::vector<PlaceEntry> numbered = of_group;
  for (std::size_t i = 0; i < numbered.size(); ++i)
    numbered[i].world_size = i > 0 && of_group[i].order == of_group[i - 1].order ? numbered[i - 1].world_size - 1 : 0;
  std::vector<PlaceEntry> all = listed_by_any(job, numbered);
  for (PlaceEntry& entry : all) {
    const auto here = std::ranges::find(numbered, entry);
    const std::int64_t of_none = entry.order > 0 && entry.world_size == 0 ? world_size : 0;
    entry = here == numbered.end() ? PlaceEntry{entry.order, of_none}
                                   : of_group[static_cast<std::size_t>(here - numbered.begin())];
  }
  return all;
}

}  // namespace

// All that any rank sees, newest first.
std::vector<detail::StorePlace> Engine::Impl::agree_on_places() const {
  std::vector<PlaceEntry> mine;
  all_together("look for stores", [&] {
    if (options.store_directory.empty()) return;
    for (const detail::StorePlace& p : detail::store_places(options.store_directory))
      mine.push_back({p.order, p.world_size});
  });
  std::vector<PlaceEntry> entries = listed_by_any(runtime.communicator(), mine);
  if (runtime.has_several_groups()) entries = line_up(job(), entries, runtime.world_size());
  std::vector<detail::StorePlace> places;
  for (const PlaceEntry& entry : entries)
    places.push_back(entry.order == 0 ? detail::StorePlace{}
                                      : detail::new_place(entry.order, static_cast<int>(entry.world_size)));
  return places;
}

// `from`: nothing for its commits, "" for all steps it keeps, or one's name.
Engine::Impl::Source Engine::Impl::agree_on_source(const detail::StorePlace& where,
                                                   const std::optional<std::string>& from) const {
  Source source{.place = where};
  const std::string directory = where.in(options.store_directory);
  std::int64_t world_size = 0;
  all_together("look at its store", [&] {
    for (const int rank : tiers::Store::ranks_in(directory)) {
      const auto identity = tiers::Store::look(directory, rank).identity;
      if (identity) world_size = identity->world_size;
      if (identity) break;
    }
  });
  std::vector<std::int64_t> all(static_cast<std::size_t>(runtime.world_size()));
  runtime.communicator().exchange(std::as_bytes(std::span(&world_size, 1)), std::as_writable_bytes(std::span(all)));
  source.world_size = static_cast<int>(*std::ranges::max_element(all));

  std::vector<CommitHeader> commits, abandoned, kept;
  std::uint64_t number = 0;
  constexpr std::byte kFurther{1}, kOtherRanks{2}, kNoRoom{4};
  std::byte found_here{0};
  const auto note = [&](const std::vector<CommitHeader>& last, std::size_t others, bool unreadable) {
    const bool resumed = std::ranges::any_of(last, [](const CommitHeader& c) { return c.incarnation > 1; });
    if (unreadable || resumed || last.size() + others > 1) found_here |= kFurther;
  };
  all_together("look at its store", [&] {
    if (source.world_size == runtime.world_size()) {
      tiers::Store::Found own = tiers::Store::look(directory, runtime.rank());
      number = own.store_number;
      if (own.kept_steps_max < options.keep_steps) found_here |= kNoRoom;
      note(own.commits, own.abandoned.size() + 2 * own.kept.size(), own.exists && !own.identity);
      abandoned = std::move(own.abandoned);
      commits = std::move(own.commits);
      kept = std::move(own.kept);
      return;
    }
    found_here |= kOtherRanks;
    if (!tiers::Store::ranks_in(directory).empty()) {
      StoreSummary summary = look_at_one_store(directory);
      number = summary.run + static_cast<std::uint64_t>(runtime.rank());
      for (const StoreSummary::Rank& rank : summary.ranks)
        note(rank.commits, 2 * rank.kept.size(), rank.commits.empty() && !rank.damage.empty());
      commits = std::move(summary.commits);
      kept = std::move(summary.kept);
    }
  });
  std::vector<std::byte> found(static_cast<std::size_t>(job().size()));
  job().exchange(std::span(&found_here, 1), found);
  const auto anywhere = [&](std::byte what) {
    return std::ranges::any_of(found, [&](std::byte rank) { return (rank & what) != std::byte{0}; });
  };
  source.came_further = anywhere(kFurther);
  source.same_ranks = !anywhere(kOtherRanks);
  source.has_room = !anywhere(kNoRoom);
  source.headers = from ? std::move(kept) : std::move(commits);
  if (from && !from->empty()) std::erase_if(source.headers, [&](const CommitHeader& c) { return c.name != *from; });
  source.commits = agree_on_commits(source.headers, number);
  if (source.commits.empty() && !from) {
    source.headers.insert(source.headers.end(), abandoned.begin(), abandoned.end());
    source.commits = agree_on_commits(source.headers, number);
  }
  return source;
}

std::optional<Engine::Impl::Source> Engine::Impl::find_source(const std::optional<std::string>& from,
                                                              bool strict) const {
  std::vector<std::uint64_t> passed_over;
  for (const detail::StorePlace& where : agree_on_places()) {
    Source source = agree_on_source(where, from);
    if (!source.commits.empty()) {
      source.passed_over = std::move(passed_over);
      return source;
    }
    if (runtime.has_several_groups() && !source.came_further) passed_over.push_back(where.order);
    // Of the first one, create() knows as much. A newer one that was only being made gives way to the one before it.
    if (!strict || !source.came_further || where.name.empty()) continue;
    throw detail::CommonStoreError(fmt::format(
        "the store in {} holds a training, but no commit that every rank has: files of it are missing, damaged, "
        "or out of sight (`hoist inspect` says which); bring them back, or move the directory away to go "
        "back to the store before it",
        where.in(options.store_directory)));
  }
  return std::nullopt;
}

std::optional<std::uint64_t> Engine::Impl::find_commit() const {
  const auto source = find_source(std::nullopt);
  return source ? std::optional(source->commits.front().step) : std::nullopt;
}

std::vector<Engine::KeptStep> Engine::Impl::find_kept() const {
  std::vector<KeptStep> steps;
  std::vector<detail::StorePlace> places = agree_on_places();
  std::ranges::reverse(places);
  for (const detail::StorePlace& where : places) {
    const Source source = agree_on_source(where, "");
    for (const CommitHeader& kept : source.headers)
      if (std::ranges::any_of(source.commits, [&](const CommonCommit& c) { return c.is(kept); }))
        steps.push_back({kept.name, kept.step});
  }
  return steps;
}

// A fresh start must not pass over a store that another number of ranks has committed to.
void Engine::Impl::refuse_resharded() const {
  const auto source = find_source(std::nullopt);
  if (!source || (source->place.order == 0 && source->same_ranks)) return;  // create() sees it
  throw detail::CommonStoreError(
      fmt::format("the store in {} holds step {} of a run of {} ranks; continue it (restore(); hoist-gpt --resume), or "
                  "remove the directory",
                  source->place.in(options.store_directory), source->commits.front().step, source->world_size));
}

// From what was found under the lock: whoever held it before may have committed meanwhile.
Engine::Impl::CommonCommit Engine::Impl::choose_commit(const std::string& from) const {
  std::vector<CommitHeader> candidates;
  if (from.empty()) {
    const auto commits = live.store->commits();
    candidates.assign(commits.begin(), commits.end());
    if (const auto common = agree_on_commits(candidates, live.store->store_number()); !common.empty())
      return common.front();
    const auto abandoned = live.store->abandoned();
    candidates.insert(candidates.end(), abandoned.begin(), abandoned.end());
  } else {
    for (const CommitHeader& kept : live.store->kept())
      if (kept.name == from) candidates.push_back(kept);
  }
  const auto common = agree_on_commits(candidates, live.store->store_number());
  if (common.empty()) throw nothing_to_restore(from);
  return from.empty() ? common.front() : *std::ranges::max_element(common, {}, &CommonCommit::kept_serial);
}

detail::CommonStoreError Engine::Impl::nothing_to_restore(const std::string& from) const {
  std::string kept;
  for (const KeptStep& step : find_kept())
    kept += fmt::format("{}'{}' (step {})", kept.empty() ? "it keeps " : ", ", step.name, step.step);
  if (!from.empty())
    return detail::CommonStoreError(fmt::format("{} keeps no step '{}'{}", options.store_directory, from,
                                                kept.empty() ? ", nor any other" : "; " + kept));
  std::string why;
  for (const detail::StorePlace& where : agree_on_places()) {
    const int ranks = agree_on_source(where, std::nullopt).world_size;
    if (ranks > 0 && ranks != runtime.world_size())
      why += fmt::format(
          "; {} is of a run of {} ranks, whose files are not all in sight of every one of these {}: "
          "start {} ranks, or bring the files together",
          where.in(options.store_directory), ranks, runtime.world_size(), ranks);
  }
  const char* const whose = runtime.has_several_groups() ? " of all sharding groups, which made it in one job," : "";
  return detail::CommonStoreError(fmt::format("{} holds no commit that every rank{} has{}{}", options.store_directory,
                                              whose, kept.empty() ? "" : "; " + kept, why));
}

RestoreReport Engine::Impl::restore(const RestoreOptions& restore_options) {
  return enliven([&] {
    compare_groups();
    if (options.store_directory.empty()) {
      throw UsageError(
          "nothing can be restored: the configuration names no store (nvme_path or hoist.checkpoint_path)");
    }
    agree_on_model("restore()");
    const auto newest = find_source(std::nullopt, /*strict=*/restore_options.from.empty());
    const auto source = restore_options.from.empty() ? newest : find_source(restore_options.from, /*strict=*/false);
    if (!source) throw nothing_to_restore(restore_options.from);
    const bool in_place =
        source->same_ranks && source->has_room && (!newest || newest->place.order == source->place.order);
    const std::vector<std::uint64_t> passed_over = newest ? newest->passed_over : std::vector<std::uint64_t>();
    if (in_place) {
      place = source->place;
      restore_in_place(restore_options);
    } else {
      reshard(*source, restore_options, passed_over);
    }
    committed_step = static_cast<std::int64_t>(step_count);
    remove_older_places(passed_over);
    book_io();
    return RestoreReport{.step = step_count, .caller_state = step_state.program, .world_size = source->world_size};
  });
}

void Engine::Impl::restore_in_place(const RestoreOptions& restore_options) {
  seal(/*create_store=*/false);
  const Ledger::Apart apart(runtime.ledger());
  const CommonCommit chosen = choose_commit(restore_options.from);
  all_together("adopt the commit", [&] {
    std::vector<CommitHeader> all = live.store->kept();
    const auto commits = live.store->commits();
    all.insert(all.end(), commits.begin(), commits.end());
    const auto abandoned = live.store->abandoned();
    all.insert(all.end(), abandoned.begin(), abandoned.end());
    live.store->adopt(*std::ranges::find_if(all, [&](const CommitHeader& c) { return chosen.is(c); }));
  });
  forget_what_others_lack();
  all_together("read the commit", [&] {
    try {
      for (std::uint32_t u = 0; u < table.units().size(); ++u) load_homes(UnitId{u});
    } catch (const CorruptionError& error) {
      throw CorruptionError(error.where, remedy_for(error.where));
    }
    auto state = detail::decode(live.store->caller_state());
    if (!state) throw StoreError(fmt::format("the commit in {} was not made by this engine", options.store_directory));
    step_state = std::move(*state);
  });
  if (step_state.scaler) scaler.restore(*step_state.scaler);
  step_count = chosen.step;
}

tiers::Budget::Hold Engine::Impl::hold_for_reading(std::uint64_t bytes) const {
  tiers::Budget& budget = runtime.pinned_budget();
  const detail::PinnedNeeds needs(options, table, detail::homes_are_apart(runtime.options(), options));
  const tiers::StoreOptions store =
      detail::store_options(options, table, detail::RecordMap(table), runtime.rank(), place, nullptr);
  const std::uint64_t least_bytes = needs.bytes(needs.choose(0)) + tiers::Store::cost(store).memory_bytes;
  const std::uint64_t need_bytes = round_up(budget.held_bytes() + least_bytes + bytes, kBlockAlignment);
  constexpr const char* kWhat = "the tables of the store that is taken over";
  if (need_bytes > budget.limit_bytes())
    throw BudgetError({.tier = budget.tier(),
                       .have_bytes = budget.limit_bytes(),
                       .need_bytes = need_bytes,
                       .key = budget.key(),
                       .detail = fmt::format("what the engine needs at least and, until it runs, {}", kWhat)});
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
  place = detail::new_place(agree_on_places().front().order + 1, runtime.world_size());
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
    const bool resumed =
        std::ranges::any_of(found.commits, [](const CommitHeader& commit) { return commit.incarnation > 1; });
    if (!found.identity || resumed || found.commits.size() > 1 || !found.kept.empty()) return false;
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
    for (const detail::StorePlace& other : detail::store_places(options.store_directory)) {
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
    for (const detail::StorePlace& other : detail::store_places(options.store_directory)) {
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

// A crash while a step was being kept leaves it on some ranks only, or beside the one it was to replace.
void Engine::Impl::forget_what_others_lack() {
  const std::vector<CommitHeader> kept = live.store->kept();
  auto common = agree_on_commits(kept, live.store->store_number());
  std::ranges::sort(common, std::greater{}, &CommonCommit::kept_serial);
  all_together("give up kept steps", [&] {
    std::vector<std::string> names;
    for (auto k = kept.rbegin(); k != kept.rend(); ++k) {  // newest first
      const bool shared = std::ranges::any_of(common, [&](const CommonCommit& c) { return c.is(*k); });
      const bool replaced = std::ranges::find(names, k->name) != names.end();
      if (shared && !replaced && names.size() < live.store->kept_steps_max())
        names.push_back(k->name);
      else
        live.store->forget(k->kept_serial);
    }
  });
}

std::string Engine::Impl::remedy_for(const CorruptionError::Where& damage) const {
  if (!live.store || live.store->kept().empty()) return {};
  std::vector<std::string> names;
  for (const CommitHeader& kept : live.store->kept_apart_from(damage))
    names.push_back(fmt::format("'{}' (step {})", kept.name, kept.step));
  if (names.empty()) return "every kept step holds the same bytes: none of them is whole";
  return fmt::format(
      "kept steps that do not hold these bytes: {}; when `hoist inspect --verify` has found one whole, go back to it "
      "with --resume --from NAME",
      fmt::join(names, ", "));
}

// State that lives in memory comes back from the store, verified.
void Engine::Impl::load_homes(UnitId id) {
  const detail::Unit& unit = table.unit(id);
  const detail::UnitHome& home = live.memory->home(id);
  const auto load = [&](std::optional<tiers::RecordId> record, std::span<const tiers::Tile> tiles, Region region,
                        std::byte* target) {
    if (!record || target == nullptr || tiles.empty()) return;
    const tiers::Tile& last = tiles.back();
    const std::span bytes(target,
                          region == Region::weights ? last.w_offset + last.w_bytes : last.s_offset + last.s_bytes);
    if (bytes.empty()) return;
    const auto count = static_cast<std::uint32_t>(tiles.size());
    const bool apart = live.memory->apart(id);
    const aio::TransferMemory scratch(apart ? bytes.size() : 0);
    const std::span<std::byte> here = apart ? scratch.first(bytes.size()) : bytes;
    live.store->read(*record, region, 0, count, here, aio::Priority::foreground).wait();
    live.store->verify(*record, region, 0, count, here);
    if (apart) live.updater->write_home(target, here);
  };
  load(live.records->trainable(id), unit.trainable.tiles(), Region::weights, home.weights);
  load(live.records->trainable(id), unit.trainable.tiles().first(home.state_tiles), Region::state, home.state);
  load(live.records->frozen(id), unit.frozen.tiles(), Region::weights,
       home.weights == nullptr ? nullptr : home.weights + unit.frozen_offset());
}

std::vector<Engine::KeptStep> Engine::find_kept() { return impl_->find_kept(); }
RestoreReport Engine::restore(const RestoreOptions& options) { return impl_->restore(options); }

}  // namespace hoist
