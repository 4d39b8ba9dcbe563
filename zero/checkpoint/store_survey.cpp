// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <system_error>

#include <fmt/format.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/zero/checkpoint/commit_state.hpp>
#include <hoist/zero/checkpoint/store_survey.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist::detail {

using tiers::CommitHeader;

namespace {

// The lists of all ranks, by rank.
template <typename Entry>
std::vector<std::vector<Entry>> lists_of_all(comm::Communicator& ranks, std::vector<Entry> mine) {
  const auto counts = comm::values_of_all<std::uint64_t>(ranks, mine.size());
  const std::size_t longest = std::ranges::max(counts);
  mine.resize(longest);
  std::vector<Entry> all(counts.size() * longest);
  if (longest > 0) ranks.exchange(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  std::vector<std::vector<Entry>> lists;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    const auto list = std::span(all).subspan(rank * longest, counts[rank]);
    lists.emplace_back(list.begin(), list.end());
  }
  return lists;
}

// --- commits ---------------------------------------------------------------------------------------------------------

std::vector<CommonCommit> common_to(comm::Communicator& ranks, const std::vector<CommonCommit>& listed) {
  const auto all = lists_of_all(ranks, listed);
  std::vector<CommonCommit> common;
  for (const CommonCommit& candidate : all[0])
    if (std::ranges::all_of(all, [&](const auto& list) { return std::ranges::find(list, candidate) != list.end(); }))
      common.push_back(candidate);
  std::ranges::sort(common, std::greater{});
  return common;
}

std::uint64_t run_of(std::uint64_t store_number, const RankAgreement& ranks) {
  return store_number - static_cast<std::uint64_t>(ranks.group().rank());
}

}  // namespace

// First within the sharding group, whose stores are of one run; then all groups compare what each has in common.
std::vector<CommonCommit> StoreSurvey::common(std::span<const CommitHeader> commits, std::uint64_t store_number) const {
  std::vector<CommonCommit> listed;
  for (const CommitHeader& c : commits)
    listed.push_back({c.step, c.revision, run_of(store_number, ranks_), c.checkpoint_serial, text_hash(c.name)});
  std::vector<CommonCommit> common = common_to(ranks_.group(), listed);
  if (!ranks_.has_several_groups()) return common;
  for (CommonCommit& c : common) c.run = job_part(c.run);
  return common_to(ranks_.job(), common);
}

bool StoreSurvey::is_of_run(const CommonCommit& commit, std::uint64_t store_number) const {
  const std::uint64_t run = run_of(store_number, ranks_);
  return commit.run == (ranks_.has_several_groups() ? job_part(run) : run);
}

bool StoreSurvey::has_given_up(const CommonCommit& commit) const {
  const std::vector<StoreDirectory> stores = directories();
  if (stores.empty()) return false;
  const RestoreSource newest = look(stores.front());
  const bool awaits_commit = newest.is_unfinished() && newest.newest_step == 0 && !newest.lacks_files;
  const bool is_half_made = newest.store_number == 0;  // on this rank: a start was killed while it made the files anew
  const bool nowhere_made = ranks_.all_true_in_job(is_half_made);
  return ranks_.all_true_in_job(awaits_commit && (is_half_made || is_of_run(commit, newest.store_number))) &&
         !nowhere_made;
}

// --- directories -----------------------------------------------------------------------------------------------------

namespace {

StoreDirectory directory_of(std::uint64_t order, int world_size) {
  return order == 0 ? StoreDirectory{} : new_store_directory(order, world_size);
}

}  // namespace

std::vector<StoreDirectory> aligned(std::span<const StoreDirectory> own,
                                    std::span<const std::vector<std::uint64_t>> orders_of_job, int world_size) {
  std::map<std::uint64_t, std::ptrdiff_t, std::greater<>> most;  // stores of an order that one group has
  for (const std::vector<std::uint64_t>& orders : orders_of_job)
    for (const std::uint64_t order : orders) most[order] = std::max(most[order], std::ranges::count(orders, order));
  std::vector<StoreDirectory> stores;
  for (const auto& [order, count] : most) {
    const std::size_t first = stores.size();
    const auto is_of_order = [wanted = order](const StoreDirectory& store) { return store.order == wanted; };
    std::ranges::copy_if(own, std::back_inserter(stores), is_of_order);
    if (stores.size() == first) stores.push_back(directory_of(order, world_size));
    stores.resize(first + static_cast<std::size_t>(count), directory_of(order, 0));  // a name that no store has
  }
  return stores;
}

std::vector<StoreDirectory> StoreSurvey::directories() const {
  struct Place {
    std::uint64_t order = 0;
    std::int64_t world_size = 0;
    auto operator<=>(const Place&) const = default;
  };
  std::vector<Place> mine;
  ranks_.run_in_job("look for stores", [&] {
    if (options_.store_directory.empty()) return;
    for (const StoreDirectory& p : store_directories(options_.store_directory)) mine.push_back({p.order, p.world_size});
  });
  std::set<Place, std::greater<>> of_group;
  for (const std::vector<Place>& list : lists_of_all(ranks_.group(), mine)) of_group.insert(list.begin(), list.end());
  std::vector<StoreDirectory> stores;
  std::vector<std::uint64_t> orders;
  for (const Place& place : of_group) {
    stores.push_back(directory_of(place.order, static_cast<int>(place.world_size)));
    orders.push_back(place.order);
  }
  if (!ranks_.has_several_groups()) return stores;
  return aligned(stores, lists_of_all(ranks_.job(), orders), ranks_.group().size());
}

std::uint64_t StoreSurvey::newest_order() const {
  const std::vector<StoreDirectory> stores = directories();
  std::int64_t mine = stores.empty() ? 0 : static_cast<std::int64_t>(stores.front().order);
  ranks_.run_in_job("look for stores on further drives", [&] {
    for (const std::string& drive : options_.stripe_directories)
      for (const StoreDirectory& part : store_directories(drive))
        mine = std::max(mine, static_cast<std::int64_t>(part.order));
  });
  return static_cast<std::uint64_t>(std::ranges::max(comm::values_of_all(ranks_.job(), mine)));
}

// --- stores ----------------------------------------------------------------------------------------------------------

namespace {

// What one rank finds of a store. `answers` is what it tells the other ranks.
struct RankView {
  struct Answers {
    bool other_ranks = false;                 // another number of ranks made the store
    bool no_room = false;                     // the store has no room for what the configuration keeps (Room)
    bool has_more_than_first_commit = false;  // a commit beside the one that a new store begins with
    bool finds_none = false;                  // no manifest of this rank; if other_ranks: no manifest at all
    bool lacks_files = false;                 // of this rank; if other_ranks: of any rank that made it
    int finds_rank = -1;                      // a rank whose manifest is here instead; -1: none
    int finds_data_of = -1;                   // a rank whose data are here without their manifest; -1: none
    std::uint64_t run = 0;                    // the part of its number that is the whole job's; 0: not known
    std::uint64_t newest_step = 0;            // of any commit that is here
    bool finds_manifest() const { return !finds_none || finds_rank >= 0; }
  };
  std::vector<CommitHeader> commits, abandoned, checkpoints;
  std::uint64_t store_number = 0;
  Answers answers;
};

// How many named checkpoints a resumed run keeps. A process that was killed while it saved one leaves the new one
// beside the one that it was to replace.
std::size_t count_kept(const tiers::Store::Found& own) {
  std::set<std::string> names;
  for (const CommitHeader& checkpoint : own.checkpoints) names.insert(checkpoint.name);
  return std::min<std::size_t>(names.size(), own.checkpoints_max);
}

// What the configuration asks room for in a store.
struct Room {
  std::uint32_t named_checkpoints = 0, held_commits = 0;
  std::uint64_t caller_state_bytes = 0;

  bool is_in(const tiers::Store::Found& own) const {
    return own.checkpoints_max >= std::max<std::size_t>(named_checkpoints, count_kept(own)) + held_commits &&
           own.caller_state_bytes_max >= caller_state_bytes;
  }
};

// The part of a store's number that all ranks of the job have alike.
std::uint64_t job_part_of(std::uint64_t store_number, int rank) {
  return job_part(store_number - static_cast<std::uint64_t>(rank));
}

RankView look_at_own_rank(const std::string& directory, int rank, const Room& wanted, bool took_over) {
  tiers::Store::Found own = tiers::Store::look(directory, rank);
  bool has_more_than_first_commit = own.has_more_than_first_commit(took_over);
  std::uint64_t newest_step = own.newest_step();
  int finds_rank = -1;
  if (!own.exists) {  // other ranks' manifests may be here: the hosts were swapped
    for (const int rank_here : tiers::Store::ranks_in(directory)) {
      if (finds_rank < 0) finds_rank = rank_here;
      const tiers::Store::Found other = tiers::Store::look(directory, rank_here);
      has_more_than_first_commit = has_more_than_first_commit || other.has_more_than_first_commit(took_over);
      newest_step = std::max(newest_step, other.newest_step());
    }
  } else if (own.identity && own.identity->rank != rank) {  // the names of two files were swapped
    finds_rank = own.identity->rank;
    own = {};
  }
  const bool no_room = !wanted.is_in(own);
  return {.commits = std::move(own.commits),
          .abandoned = std::move(own.abandoned),
          .checkpoints = std::move(own.checkpoints),
          .store_number = own.store_number,
          .answers = {.no_room = no_room,
                      .has_more_than_first_commit = has_more_than_first_commit || own.has_lost_manifest,
                      .finds_none = !own.exists,
                      .lacks_files = !own.exists && !own.is_half_made,
                      .finds_rank = finds_rank,
                      .finds_data_of = own.has_lost_manifest ? rank : -1,
                      .run = own.identity ? job_part_of(own.store_number, rank) : 0,
                      .newest_step = newest_step}};
}

RankView look_at_all_ranks(const std::string& directory, int rank, int world_size, bool took_over) {
  RankView view{.answers = {.other_ranks = true}};
  for (const int of : tiers::Store::ranks_without_manifest(directory)) {
    if (world_size > 0 && of >= world_size) continue;  // another, unfinished store's
    if (view.answers.finds_data_of < 0) view.answers.finds_data_of = of;
    view.answers.has_more_than_first_commit = true;
  }
  const std::vector<int> made = tiers::Store::ranks_in(directory);
  view.answers.finds_none = made.empty();
  view.answers.lacks_files = view.answers.finds_none;
  if (view.answers.finds_none) return view;
  StoreSummary summary = look_at_one_store(directory);
  for (const StoreSummary::Rank& of : summary.ranks) {
    if (of.has_more_than_first_commit(took_over)) view.answers.has_more_than_first_commit = true;
    view.answers.newest_step = std::max(view.answers.newest_step, of.newest_step());
  }
  for (int of = 0; of < summary.world_size.value_or(0); ++of)
    if (!std::ranges::binary_search(made, of) && !tiers::Store::look(directory, of).is_half_made)
      view.answers.lacks_files = true;
  if (summary.world_size) view.answers.run = job_part(summary.run);
  view.store_number = summary.run + static_cast<std::uint64_t>(rank);
  view.commits = std::move(summary.commits);
  view.abandoned = std::move(summary.all_commits);
  view.checkpoints = std::move(summary.checkpoints);
  return view;
}

// What a rank finds that lacks its manifest, as a part of a sentence; `name`: the rank's.
std::string lack_of(const RankView::Answers& answers, const std::string& name) {
  if (answers.finds_rank >= 0)
    return fmt::format("{} finds none of its files, and those of rank {}", name, answers.finds_rank);
  if (answers.finds_data_of >= 0)
    return fmt::format("{} finds data of rank {}, and not their manifest", name, answers.finds_data_of);
  return name + " finds no files";
}

}  // namespace

int StoreSurvey::agree_on_world_size(const std::string& directory) const {
  std::int64_t mine = 0;
  ranks_.run_in_job("look at its store", [&] {
    for (const int rank : tiers::Store::ranks_in(directory)) {
      const auto identity = tiers::Store::look(directory, rank).identity;
      if (identity) mine = identity->world_size;
      if (identity) break;
    }
  });
  return static_cast<int>(std::ranges::max(comm::values_of_all(ranks_.group(), mine)));
}

RestoreSource StoreSurvey::look(const StoreDirectory& where, const std::optional<std::string>& from) const {
  const std::string directory = where.in(options_.store_directory);
  RestoreSource source{.directory = where, .world_size = agree_on_world_size(directory)};
  RankView mine;
  ranks_.run_in_job("look at its store", [&] {
    const Room wanted{.named_checkpoints = options_.keep_steps,
                      .held_commits = options_.mirror.directory.empty() ? 0u : 1u,
                      .caller_state_bytes = options_.caller_state_bytes_max + kCommitHeadBytes};
    const bool took_over = where.order > 0;
    mine = source.world_size == ranks_.group().size()
               ? look_at_own_rank(directory, ranks_.group().rank(), wanted, took_over)
               : look_at_all_ranks(directory, ranks_.group().rank(), source.world_size, took_over);
  });
  using Answers = RankView::Answers;
  const std::vector<Answers> all = comm::values_of_all(ranks_.job(), mine.answers);
  source.same_ranks = std::ranges::none_of(all, &Answers::other_ranks);
  source.has_room = std::ranges::none_of(all, &Answers::no_room);
  source.has_manifest = std::ranges::any_of(all, &Answers::finds_manifest);
  source.has_more_than_first_commit = std::ranges::any_of(all, &Answers::has_more_than_first_commit);
  source.lacks_files = std::ranges::any_of(all, &Answers::lacks_files);
  source.newest_step = std::ranges::max(all, {}, &Answers::newest_step).newest_step;
  source.store_number = mine.store_number;
  std::uint64_t run = 0;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (run != 0 && all[rank].run != 0 && all[rank].run != run) source.lacks_files = true;  // of one of the two
    if (run == 0) run = all[rank].run;
    if (all[rank].finds_none || all[rank].finds_data_of >= 0)
      source.lacking.push_back(lack_of(all[rank], ranks_.name_in_job(static_cast<int>(rank))));
  }

  source.headers = from ? std::move(mine.checkpoints) : std::move(mine.commits);
  if (from && !from->empty()) std::erase_if(source.headers, [&](const CommitHeader& c) { return c.name != *from; });
  source.commits = common(source.headers, mine.store_number);
  if (source.commits.empty() && !from) {
    source.headers.insert(source.headers.end(), mine.abandoned.begin(), mine.abandoned.end());
    source.commits = common(source.headers, mine.store_number);
  }
  return source;
}

std::vector<NamedCheckpoint> StoreSurvey::checkpoints_in(const StoreDirectory& where) const {
  std::vector<NamedCheckpoint> steps;
  const RestoreSource source = look(where, "");
  for (const CommitHeader& checkpoint : source.headers)
    if (std::ranges::any_of(source.commits, [&](const CommonCommit& c) { return c.is(checkpoint); }))
      steps.push_back({checkpoint.name, checkpoint.step});
  return steps;
}

std::vector<NamedCheckpoint> StoreSurvey::checkpoints() const {
  std::vector<NamedCheckpoint> checkpoints;
  std::vector<StoreDirectory> oldest_first = directories();
  std::ranges::reverse(oldest_first);
  for (const StoreDirectory& where : oldest_first) {
    for (const NamedCheckpoint& newer : checkpoints_in(where)) {
      std::erase_if(checkpoints, [&](const NamedCheckpoint& older) { return older.name == newer.name; });
      checkpoints.push_back(newer);
    }
  }
  return checkpoints;
}

bool StoreSurvey::has_more_than_first_commit() const {
  const std::vector<StoreDirectory> stores = directories();
  return std::ranges::any_of(stores,
                             [&](const StoreDirectory& where) { return look(where).has_more_than_first_commit; });
}

std::optional<std::uint64_t> StoreSurvey::newest_step_of_any() const {
  std::int64_t mine = -1;
  ranks_.run_in_job("look at its store", [&] {
    for (const StoreDirectory& where : store_directories(options_.store_directory)) {
      const auto found = tiers::Store::look(where.in(options_.store_directory), ranks_.group().rank());
      for (const CommitHeader& commit : found.commits) mine = std::max(mine, static_cast<std::int64_t>(commit.step));
    }
  });
  const std::int64_t newest = std::ranges::max(comm::values_of_all(ranks_.job(), mine));
  return newest < 0 ? std::nullopt : std::optional(static_cast<std::uint64_t>(newest));
}

// --- drives ----------------------------------------------------------------------------------------------------------

namespace {

// Whether the drive's directory is absent, or holds nothing but these stores.
bool holds_nothing_but(const std::vector<StoreDirectory>& stores, const std::string& drive) {
  std::error_code failed;
  for (std::filesystem::directory_iterator entry(drive, failed), end; !failed && entry != end; entry.increment(failed))
    if (std::ranges::find(stores, entry->path().filename().string(), &StoreDirectory::name) == stores.end())
      return false;
  if (failed && !is_absent(failed))
    throw IoError({"list", drive, 0, 0, failed.value()}, "what is in it cannot be known");
  return true;
}

}  // namespace

bool StoreSurvey::has_lost_drives() const {
  std::vector<StoreDirectory> unfinished, others;
  for (const StoreDirectory& where : directories()) {
    const RestoreSource store = look(where);
    (!where.name.empty() && store.is_unfinished_beside(0) ? unfinished : others).push_back(where);
  }
  bool lost = false;
  ranks_.run_in_job("look at its drives", [&] {
    const auto is_new = [&](const std::string& drive) { return holds_nothing_but(unfinished, drive); };
    if (std::ranges::none_of(options_.drive_directories(), is_new)) return;
    lost = is_new(options_.store_directory) || (!others.empty() && lacks_a_drive(others.front()));
  });
  return !ranks_.all_true_in_job(!lost);
}

bool StoreSurvey::lacks_a_drive(const StoreDirectory& where) const {
  const std::string directory = where.in(options_.store_directory);
  const std::vector<std::string> further = where.in(options_.stripe_directories);
  const auto lacks = [&](int rank) { return tiers::Store::lacks_a_drive(directory, rank, further); };
  const int rank = ranks_.group().rank();
  const auto own = tiers::Store::look(directory, rank).identity;
  if (own && own->world_size == ranks_.group().size()) return lacks(rank);
  return std::ranges::any_of(tiers::Store::ranks_in(directory), lacks);
}

}  // namespace hoist::detail
