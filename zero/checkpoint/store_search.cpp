// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <compare>
#include <filesystem>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/deadline.hpp>
#include <hoist/core/error.hpp>
#include <hoist/core/open_file.hpp>
#include <hoist/tiers/store_format.hpp>
#include <hoist/zero/checkpoint/store_search.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

namespace hoist::detail {

using tiers::CommitHeader;

// --- commits ---------------------------------------------------------------------------------------------------------

namespace {

// The lists of all ranks, by rank; the first kMax entries of each.
template <std::size_t kMax, typename Entry>
std::vector<std::vector<Entry>> lists_of_all(comm::Communicator& ranks, std::span<const Entry> listed) {
  struct List {
    std::uint64_t count = 0;
    std::array<Entry, kMax> entries{};
  };
  List mine;
  for (const Entry& entry : listed)
    if (mine.count < kMax) mine.entries[mine.count++] = entry;
  std::vector<std::vector<Entry>> lists;
  for (const List& list : comm::values_of_all(ranks, mine))
    lists.emplace_back(list.entries.data(), list.entries.data() + list.count);
  return lists;
}

std::vector<CommonCommit> common_to(comm::Communicator& ranks, std::span<const CommonCommit> listed) {
  const auto all = lists_of_all<tiers::kSlotCount + tiers::kCheckpointsMax + 1>(ranks, listed);
  std::vector<CommonCommit> common;
  for (const CommonCommit& candidate : all[0])
    if (std::ranges::all_of(all, [&](const auto& list) { return std::ranges::find(list, candidate) != list.end(); }))
      common.push_back(candidate);
  std::sort(common.rbegin(), common.rend());
  return common;
}

}  // namespace

// First within the sharding group, whose stores are of one run, then of what its groups have the whole job.
std::vector<CommonCommit> StoreSearch::common(std::span<const CommitHeader> commits, std::uint64_t store_number) const {
  const std::uint64_t run = store_number - static_cast<std::uint64_t>(ranks_.group().rank());
  std::vector<CommonCommit> listed;
  for (const CommitHeader& c : commits)
    listed.push_back({c.step, c.revision, run, c.checkpoint_serial, text_hash(c.name)});
  std::vector<CommonCommit> common = common_to(ranks_.group(), listed);
  if (!ranks_.has_several_groups()) return common;
  for (CommonCommit& c : common) c.run = job_part(c.run);
  return common_to(ranks_.job(), common);
}

bool StoreSearch::is_of_run(const CommonCommit& commit, std::uint64_t store_number) const {
  const std::uint64_t run = store_number - static_cast<std::uint64_t>(ranks_.group().rank());
  return commit.run == (ranks_.has_several_groups() ? job_part(run) : run);
}

// --- places ----------------------------------------------------------------------------------------------------------

namespace {

// A store's place, as ranks tell each other.
struct PlaceEntry {
  std::uint64_t order = 0;
  std::int64_t world_size = 0;
  friend auto operator<=>(const PlaceEntry&, const PlaceEntry&) = default;
};

// The numbers that any of the ranks lists, highest first.
std::vector<PlaceEntry> listed_by_any(comm::Communicator& ranks, std::span<const PlaceEntry> listed) {
  std::vector<PlaceEntry> entries;
  for (const auto& list : lists_of_all<32>(ranks, listed)) entries.insert(entries.end(), list.begin(), list.end());
  std::ranges::sort(entries, std::greater{});
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  return entries;
}

// Makes a group's list as long as the other groups' lists, so that entries correspond. This group gets an empty place
// where it has none.
std::vector<PlaceEntry> line_up(comm::Communicator& job, const std::vector<PlaceEntry>& of_group, int world_size) {
  // Downwards within their order, instead of by their world size. (Two of one order: files could not be reached once.)
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
std::vector<StoreDirectory> StoreSearch::directories() const {
  std::vector<PlaceEntry> mine;
  ranks_.run_in_job("look for stores", [&] {
    if (options_.store_directory.empty()) return;
    for (const StoreDirectory& p : store_directories(options_.store_directory)) mine.push_back({p.order, p.world_size});
  });
  std::vector<PlaceEntry> entries = listed_by_any(ranks_.group(), mine);
  if (ranks_.has_several_groups()) entries = line_up(ranks_.job(), entries, ranks_.group().size());
  std::vector<StoreDirectory> places;
  for (const PlaceEntry& entry : entries)
    places.push_back(entry.order == 0 ? StoreDirectory{}
                                      : new_store_directory(entry.order, static_cast<int>(entry.world_size)));
  return places;
}

// --- what is continued from ------------------------------------------------------------------------------------------

namespace {

// Looks at this rank's part of the store in a directory.
struct RankView {
  struct Answers {
    bool other_ranks = false;                 // another number of ranks made it
    bool no_room = false;                     // for what the configuration wants to keep and hold
    bool has_more_than_first_commit = false;  // the one that a new store begins with
    bool finds_none = false;                  // of its own files
    int finds_rank = -1;                      // whose files it finds instead
  };
  std::vector<CommitHeader> commits, abandoned, checkpoints;
  std::uint64_t store_number = 0;
  Answers answers;
};

// The named checkpoints that a run goes on with. A process that was killed while it saved one leaves one more, beside
// that which it was to replace.
std::size_t count_kept(const tiers::Store::Found& own) {
  std::set<std::string> names;
  for (const CommitHeader& checkpoint : own.checkpoints) names.insert(checkpoint.name);
  return std::min<std::size_t>(names.size(), own.checkpoints_max);
}

// `wanted`, `held`: the named checkpoints and held commits that the configuration asks room for.
RankView look_at_own_rank(const std::string& directory, int rank, std::uint32_t wanted, std::uint32_t held,
                          bool took_over) {
  tiers::Store::Found own = tiers::Store::look(directory, rank);
  bool has_more_than_first_commit = own.has_more_than_first_commit(took_over);
  int finds_rank = -1;
  if (!own.exists) {  // other ranks' files may be here: the hosts were swapped
    for (const int other : tiers::Store::ranks_in(directory)) {
      if (finds_rank < 0) finds_rank = other;
      has_more_than_first_commit =
          has_more_than_first_commit || tiers::Store::look(directory, other).has_more_than_first_commit(took_over);
    }
  }
  const bool no_room = own.checkpoints_max < std::max<std::size_t>(wanted, count_kept(own)) + held;
  return {.commits = std::move(own.commits),
          .abandoned = std::move(own.abandoned),
          .checkpoints = std::move(own.checkpoints),
          .store_number = own.store_number,
          .answers = {.no_room = no_room,
                      .has_more_than_first_commit = has_more_than_first_commit,
                      .finds_none = !own.exists,
                      .finds_rank = finds_rank}};
}

RankView look_at_all_ranks(const std::string& directory, int rank, bool took_over) {
  RankView view{.answers = {.other_ranks = true}};
  view.answers.finds_none = tiers::Store::ranks_in(directory).empty();
  if (view.answers.finds_none) return view;
  StoreSummary summary = look_at_one_store(directory);
  for (const StoreSummary::Rank& of : summary.ranks)
    if (of.has_more_than_first_commit(took_over)) view.answers.has_more_than_first_commit = true;
  view.store_number = summary.run + static_cast<std::uint64_t>(rank);
  view.commits = std::move(summary.commits);
  view.abandoned = std::move(summary.all_commits);
  view.checkpoints = std::move(summary.checkpoints);
  return view;
}

}  // namespace

int StoreSearch::agree_on_world_size(const std::string& directory) const {
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

RestoreSource StoreSearch::look(const StoreDirectory& where, const std::optional<std::string>& from) const {
  const std::string directory = where.in(options_.store_directory);
  RestoreSource source{.directory = where, .world_size = agree_on_world_size(directory)};
  RankView mine;
  ranks_.run_in_job("look at its store", [&] {
    const std::uint32_t held = options_.mirror.directory.empty() ? 0 : 1;
    const bool took_over = where.order > 0;
    mine = source.world_size == ranks_.group().size()
               ? look_at_own_rank(directory, ranks_.group().rank(), options_.keep_steps, held, took_over)
               : look_at_all_ranks(directory, ranks_.group().rank(), took_over);
  });
  using Answers = RankView::Answers;
  const std::vector<Answers> all = comm::values_of_all(ranks_.job(), mine.answers);
  source.same_ranks = std::ranges::none_of(all, &Answers::other_ranks);
  source.has_room = std::ranges::none_of(all, &Answers::no_room);
  source.has_more_than_first_commit = std::ranges::any_of(all, &Answers::has_more_than_first_commit);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].finds_none) continue;
    const std::string name = ranks_.name_in_job(static_cast<int>(rank));
    source.lacking.push_back(all[rank].finds_rank < 0 ? fmt::format("{} finds no files", name)
                                                      : fmt::format("{} finds none of its files, and those of rank {}",
                                                                    name, all[rank].finds_rank));
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

std::optional<RestoreSource> StoreSearch::find(const std::optional<std::string>& from, Incomplete incomplete) const {
  for (const StoreDirectory& where : directories()) {
    RestoreSource source = look(where, from);
    if (!source.commits.empty()) return source;
    // refuse_others() knows as much of the first one. A newer one that was only being made gives way to the one
    // before.
    if (incomplete == Incomplete::pass_over || !source.has_more_than_first_commit || where.name.empty()) continue;
    throw incomplete_store(source);
  }
  return std::nullopt;
}

std::string StoreSearch::made_by_other_ranks(const RestoreSource& source) const {
  const int ranks = source.world_size;
  if (ranks == 0 || ranks == ranks_.group().size()) return {};
  return fmt::format(
      "{} is of a run of {} ranks, whose files are not all readable by each of these {}: start {} ranks, or bring the "
      "files together",
      source.directory.in(options_.store_directory), ranks, ranks_.group().size(), ranks);
}

CommonStoreError StoreSearch::incomplete_store(const RestoreSource& source) const {
  constexpr std::size_t kNamedMax = 4;
  const auto named = std::span(source.lacking).first(std::min(kNamedMax, source.lacking.size()));
  const std::string lacking =
      source.lacking.empty()
          ? ""
          : fmt::format(" ({}{})", fmt::join(named, ", "), source.lacking.size() > kNamedMax ? ", and so on" : "");
  std::string why = made_by_other_ranks(source);
  if (!why.empty()) why += "; nothing was changed";
  if (why.empty())
    why = fmt::format(
        "files of it are missing, damaged, or on a machine that these ranks cannot reach or that was started as "
        "another rank's (`hoist inspect` says what a directory holds); nothing was changed: bring them back, or move "
        "the directory away to {}",
        source.directory.name.empty() ? "start anew" : "go back to the store before it");
  return CommonStoreError(fmt::format("the store in {} holds a training, but no commit that every rank has{}: {}",
                                      source.directory.in(options_.store_directory), lacking, why));
}

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

bool StoreSearch::has_lost_drives() const {
  std::vector<StoreDirectory> unfinished, others;
  for (const StoreDirectory& where : directories())
    (!where.name.empty() && look(where).is_unfinished() ? unfinished : others).push_back(where);
  bool lost = false;
  ranks_.run_in_job("look at its drives", [&] {
    const auto is_new = [&](const std::string& drive) { return holds_nothing_but(unfinished, drive); };
    if (std::ranges::none_of(options_.drive_directories(), is_new)) return;
    lost = is_new(options_.store_directory) || (!others.empty() && lacks_a_drive(others.front()));
  });
  return !ranks_.all_true_in_job(!lost);
}

bool StoreSearch::lacks_a_drive(const StoreDirectory& where) const {
  const std::string directory = where.in(options_.store_directory);
  const std::vector<std::string> further = where.in(options_.stripe_directories);
  const auto lacks = [&](int rank) { return tiers::Store::lacks_a_drive(directory, rank, further); };
  const int rank = ranks_.group().rank();
  const auto own = tiers::Store::look(directory, rank).identity;
  if (own && own->world_size == ranks_.group().size()) return lacks(rank);
  return std::ranges::any_of(tiers::Store::ranks_in(directory), lacks);
}

bool StoreSearch::has_more_than_first_commit() const {
  const std::vector<StoreDirectory> stores = directories();
  return std::ranges::any_of(stores,
                             [&](const StoreDirectory& where) { return look(where).has_more_than_first_commit; });
}

std::optional<std::uint64_t> StoreSearch::newest_step_of_any() const {
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

std::vector<NamedCheckpoint> StoreSearch::checkpoints_in(const StoreDirectory& where) const {
  std::vector<NamedCheckpoint> steps;
  const RestoreSource source = look(where, "");
  for (const CommitHeader& checkpoint : source.headers)
    if (std::ranges::any_of(source.commits, [&](const CommonCommit& c) { return c.is(checkpoint); }))
      steps.push_back({checkpoint.name, checkpoint.step});
  return steps;
}

std::vector<NamedCheckpoint> StoreSearch::find_checkpoints() const {
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

void StoreSearch::refuse_others() const {
  const auto source = find(std::nullopt);
  // Before any rank touches its own files: those that another rank lacks at the moment are useless without these.
  if (!source) {
    const RestoreSource first = look({});
    if (first.has_more_than_first_commit) throw incomplete_store(first);
  }
  if (!source || (source->directory.order == 0 && source->same_ranks)) return;  // create() sees it
  throw used_store(*source);
}

void StoreSearch::refuse_any() const {
  if (const auto source = find(std::nullopt)) throw used_store(*source);
}

void StoreSearch::refuse_newer(const StoreDirectory& opened) const {
  for (const StoreDirectory& newer : directories()) {
    if (newer.order <= opened.order) return;
    const std::string directory = newer.in(options_.store_directory);
    bool is_held = false;
    ranks_.run_in_job("look for newer stores", [&] {
      Deadline deadline(options_.lock_timeout);
      do {  // the last transfers of a process that was killed hold its lock for a moment
        if (is_held) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        is_held = false;
        for (int rank = 0; rank < newer.world_size && !is_held; ++rank)
          is_held = tiers::Store::holder(directory, rank).has_value();
      } while (is_held && !deadline.is_over());
    });
    if (ranks_.all_true_in_job(!is_held) && look(newer).commits.empty()) continue;
    throw CommonStoreError(fmt::format(
        "another process continues from the store in {}, in a new store in {}: wait for that process to end, "
        "and start again; nothing was changed",
        opened.in(options_.store_directory), directory));
  }
}

CommonStoreError StoreSearch::used_store(const RestoreSource& source) const {
  return CommonStoreError(
      fmt::format("the store in {} holds step {} of a run of {} ranks; continue it (Engine::restore(), hoist-gpt "
                  "--resume, resume=True in Python), or "
                  "remove the directory",
                  source.directory.in(options_.store_directory), source.commits.front().step, source.world_size));
}

std::uint64_t StoreSearch::newest_order() const {
  const std::vector<StoreDirectory> stores = directories();
  return stores.empty() ? 0 : stores.front().order;
}

// From what was found under the lock: whoever held it before may have committed meanwhile.
CommonCommit StoreSearch::choose(const tiers::Store& store, const std::string& from) const {
  std::vector<CommitHeader> candidates;
  if (from.empty()) {
    if (const auto shared = common(store.commits(), store.store_number()); !shared.empty()) return shared.front();
    candidates = store.commits_and_abandoned();
  } else {
    for (const CommitHeader& checkpoint : store.checkpoints())
      if (checkpoint.name == from) candidates.push_back(checkpoint);
  }
  const auto shared = common(candidates, store.store_number());
  if (shared.empty()) throw nothing_to_restore(from);
  return from.empty() ? shared.front() : *std::ranges::max_element(shared, {}, &CommonCommit::checkpoint_serial);
}

CommonStoreError StoreSearch::nothing_to_restore(const std::string& from) const {
  std::string others;
  for (const NamedCheckpoint& step : find_checkpoints())
    others += fmt::format("{}'{}' (step {})", others.empty() ? "it has " : ", ", step.name, step.step);
  if (!from.empty())
    return CommonStoreError(fmt::format("{} keeps no step '{}'{}", options_.store_directory, from,
                                        others.empty() ? ", nor any other" : "; " + others));
  std::string why;
  bool has_files = false;
  for (const StoreDirectory& where : directories()) {
    const std::string others_made = made_by_other_ranks(look(where));
    if (!others_made.empty()) why += "; " + others_made;
    ranks_.run_in_job("look at its store", [&] {
      has_files = has_files || !tiers::Store::ranks_in(where.in(options_.store_directory)).empty();
    });
  }
  if (ranks_.all_true_in_job(!has_files))
    return CommonStoreError(
        fmt::format("there is no run in {}: begin one with Engine::create(), or name the directory "
                    "of the run (nvme_path or hoist.checkpoint_path)",
                    options_.store_directory));
  const char* const whose = ranks_.has_several_groups() ? " of all sharding groups, which made it in one job," : "";
  return CommonStoreError(fmt::format("{} holds no commit that every rank{} has{}{}", options_.store_directory, whose,
                                      others.empty() ? "" : "; " + others, why));
}

}  // namespace hoist::detail
