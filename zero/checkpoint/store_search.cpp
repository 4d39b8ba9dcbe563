// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <span>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/deadline.hpp>
#include <hoist/core/units.hpp>
#include <hoist/zero/checkpoint/store_search.hpp>

namespace hoist::detail {

using tiers::CommitHeader;

// --- errors ----------------------------------------------------------------------------------------------------------

namespace {

// Why `ranks` ranks cannot continue the store at `path`, if another number of ranks made it; otherwise empty.
std::string made_by_other_ranks(const RestoreSource& source, const std::string& path, int ranks) {
  if (source.world_size == 0 || source.world_size == ranks) return {};
  const std::string made_by = counted(source.world_size, "rank");
  return fmt::format(
      "{} is of a run of {}, whose files are not all readable by each of these {}: start {}, or bring the files "
      "together",
      path, made_by, ranks, made_by);
}

// `older_step`: of the newest store before it that has a commit.
CommonStoreError incomplete_store(const RestoreSource& source, const std::string& path, int ranks,
                                  std::optional<std::uint64_t> older_step) {
  constexpr std::size_t kNamedMax = 4;
  const auto named = std::span(source.lacking).first(std::min(kNamedMax, source.lacking.size()));
  const std::string lacking =
      source.lacking.empty()
          ? ""
          : fmt::format(" ({}{})", fmt::join(named, ", "), source.lacking.size() > kNamedMax ? ", and so on" : "");
  std::string why = made_by_other_ranks(source, path, ranks);
  if (!why.empty()) why += "; nothing was changed";
  if (why.empty())
    why = fmt::format(
        "files of it are missing, damaged, or on a machine that these ranks cannot reach or that was started as "
        "another rank's (`hoist inspect` says what a directory holds); nothing was changed: bring them back, or move "
        "the directory away to {}",
        older_step ? fmt::format("go back to step {} in the store before it", *older_step)
                   : "start anew; its training is then lost");
  return CommonStoreError(
      fmt::format("the store in {} holds a training, but no commit that every rank has{}: {}", path, lacking, why));
}

CommonStoreError used_store(const RestoreSource& source, const std::string& path) {
  return CommonStoreError(fmt::format(
      "the store in {} holds step {} of a run of {}; continue it (Engine::restore(), hoist-gpt --resume, resume=True "
      "in Python), or remove the directory",
      path, source.commits.front().step, counted(source.world_size, "rank")));
}

}  // namespace

CommonStoreError nothing_to_restore(const RankAgreement& ranks, const EngineOptions& options, const std::string& from) {
  const StoreSurvey survey(ranks, options);
  std::string others;
  for (const NamedCheckpoint& step : survey.checkpoints())
    others += fmt::format("{}'{}' (step {})", others.empty() ? "it has " : ", ", step.name, step.step);
  if (!from.empty())
    return CommonStoreError(fmt::format("{} has no named checkpoint '{}'{}", options.store_directory, from,
                                        others.empty() ? ", nor any other" : "; " + others));
  std::string why;
  bool has_manifest = false;
  for (const StoreDirectory& where : survey.directories()) {
    const RestoreSource source = survey.look(where);
    has_manifest = has_manifest || source.has_manifest;
    const std::string made_by = made_by_other_ranks(source, where.in(options.store_directory), ranks.group().size());
    if (!made_by.empty()) why += "; " + made_by;
  }
  if (!has_manifest)
    return CommonStoreError(
        fmt::format("there is no run in {}: begin one with Engine::create(), or name the directory of the run "
                    "(nvme_path or hoist.checkpoint_path)",
                    options.store_directory));
  const char* const whose = ranks.has_several_groups() ? " of all sharding groups, which made it in one job," : "";
  return CommonStoreError(fmt::format("{} holds no commit that every rank{} has{}{}", options.store_directory, whose,
                                      others.empty() ? "" : "; " + others, why));
}

// --- choosing a store and a commit -----------------------------------------------------------------------------------

std::optional<RestoreSource> find_store(const RankAgreement& ranks, const EngineOptions& options,
                                        const std::optional<std::string>& from, Incomplete incomplete) {
  const StoreSurvey survey(ranks, options);
  const std::vector<StoreDirectory> stores = survey.directories();
  const auto incomplete_error = [&](const RestoreSource& source) {
    std::optional<std::uint64_t> older_step;
    for (const StoreDirectory& where : stores) {
      if (where.order >= source.directory.order) continue;
      const RestoreSource older = survey.look(where);
      if (!older.commits.empty()) older_step = older.commits.front().step;
      if (older_step) break;
    }
    return incomplete_store(source, source.directory.in(options.store_directory), ranks.group().size(), older_step);
  };
  std::optional<RestoreSource> out_of_reach;  // the one with the newest step
  for (const StoreDirectory& where : stores) {
    RestoreSource source = survey.look(where, from);
    if (!source.commits.empty()) {
      if (out_of_reach && out_of_reach->newest_step != source.commits.front().step) break;
      return source;
    }
    if (incomplete == Incomplete::pass_over) continue;
    // A newer one that was only being made gives way to the one before, which usually holds its step; `out_of_reach`
    // remembers it where that may not be so. With nothing on NVMe, its first commit is the program's own save, of
    // another step.
    if (!source.has_more_than_first_commit) {
      if (source.step_out_of_reach() > (out_of_reach ? out_of_reach->newest_step : 0)) out_of_reach = std::move(source);
      continue;
    }
    // refuse_other_stores() knows as much of the first one.
    if (incomplete == Incomplete::refuse && where.name.empty()) continue;
    throw incomplete_error(source);
  }
  if (out_of_reach) throw incomplete_error(*out_of_reach);
  return std::nullopt;
}

CommitHeader choose_commit(const RankAgreement& ranks, const EngineOptions& options, const tiers::Store& store,
                           const std::string& from) {
  const StoreSurvey survey(ranks, options);
  std::vector<CommitHeader> candidates = store.checkpoints();
  if (from.empty())
    candidates.assign(store.commits().begin(), store.commits().end());
  else
    std::erase_if(candidates, [&](const CommitHeader& c) { return c.name != from; });
  std::vector<CommonCommit> common = survey.common(candidates, store.store_number());
  if (common.empty() && from.empty()) {
    candidates = store.commits_and_abandoned();
    common = survey.common(candidates, store.store_number());
  }
  if (common.empty()) throw nothing_to_restore(ranks, options, from);
  const CommonCommit& chosen =
      from.empty() ? common.front() : *std::ranges::max_element(common, {}, &CommonCommit::checkpoint_serial);
  return *std::ranges::find_if(candidates, [&](const CommitHeader& c) { return chosen.is(c); });
}

// --- fresh starts ----------------------------------------------------------------------------------------------------

void refuse_other_stores(const RankAgreement& ranks, const EngineOptions& options) {
  const auto source = find_store(ranks, options);
  // Before any rank touches its own files: those that another rank lacks at the moment are useless without these.
  if (!source) {
    const RestoreSource first = StoreSurvey(ranks, options).look({});
    if (first.has_more_than_first_commit)
      throw incomplete_store(first, options.store_directory, ranks.group().size(), {});
  }
  if (!source || (source->directory.order == 0 && source->same_ranks)) return;  // create() sees it
  throw used_store(*source, source->directory.in(options.store_directory));
}

void refuse_any_commit(const RankAgreement& ranks, const EngineOptions& options) {
  if (const auto source = find_store(ranks, options))
    throw used_store(*source, source->directory.in(options.store_directory));
}

void refuse_changed_source(const RankAgreement& ranks, const EngineOptions& options, const RestoreSource& source,
                           const std::string& from) {
  const StoreSurvey survey(ranks, options);
  const RestoreSource now =
      survey.look(source.directory, from.empty() ? std::nullopt : std::optional<std::string>(from));
  if (now.commits == source.commits) return;
  throw CommonStoreError(
      fmt::format("the store in {} has changed since this process looked: another process has trained here, or "
                  "trains; nothing was changed: start again when it has ended",
                  source.directory.in(options.store_directory)));
}

void refuse_newer_store(const RankAgreement& ranks, const EngineOptions& options, const NewerStores& which) {
  const StoreSurvey survey(ranks, options);
  for (const StoreDirectory& newer : survey.directories()) {
    if (newer.order <= which.than.order) return;
    const std::string directory = newer.in(options.store_directory);
    bool is_held = false;
    ranks.run_in_job("look for newer stores", [&] {
      if (newer.name == which.own) return;
      // Of two starts that have each made a store, and see the other's, one waits until the other has given way.
      Deadline deadline(!which.own.empty() && newer.name < which.own ? Nanoseconds{0} : options.lock_timeout);
      do {  // the last transfers of a process that was killed hold its lock for a moment
        if (is_held) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        is_held = false;
        for (int rank = 0; rank < newer.world_size && !is_held; ++rank)
          is_held = tiers::Store::holder(directory, rank).has_value();
      } while (is_held && !deadline.is_over());
    });
    const bool is_free = ranks.all_true_in_job(!is_held);
    const bool has_commit = !survey.look(newer).commits.empty();
    if (is_free && (newer.order <= which.known || !has_commit)) continue;
    throw CommonStoreError(fmt::format(
        "another process continues from the store in {}, in a new store in {}: wait for that process to end, "
        "and start again; nothing was changed",
        which.than.in(options.store_directory), directory));
  }
}

}  // namespace hoist::detail
