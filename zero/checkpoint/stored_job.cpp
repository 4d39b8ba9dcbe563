// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>
#include <hoist/zero/ranks/rank_agreement.hpp>

namespace hoist {

using tiers::CommitHeader;

namespace {

// Why these are not a job's groups; empty when they are.
std::string objection(std::span<const StoreSummary> groups) {
  for (std::size_t b = 1; b < groups.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (groups[a].run == groups[b].run)
        return fmt::format("{} and {} hold the same group's store", groups[a].directory, groups[b].directory);
      if (!are_of_one_job(groups[a], groups[b]))
        return fmt::format("{} and {} are stores of different jobs", groups[a].directory, groups[b].directory);
    }
  }
  return {};
}

// The stores of one place below each directory.
struct Place {
  StoredJob job;          // with the groups that have it
  std::string objection;  // why these are not a job's groups
  std::string gap;        // which group lacks it
  bool is_whole() const { return objection.empty() && gap.empty(); }
  // If no commit is on all ranks. As in RestoreSource:
  bool is_unfinished = true;
  std::uint64_t step_out_of_reach = 0;
};

bool has_manifest(const StoreSummary& store, int rank) {
  return std::ranges::find(store.ranks, rank, &StoreSummary::Rank::rank) != store.ranks.end();
}

bool lacks_files(const StoreSummary& store) {
  for (int rank = 0; rank < store.world_size.value_or(0); ++rank)
    if (!has_manifest(store, rank) && !tiers::Store::look(store.directory, rank).is_half_made) return true;
  return false;
}

Place look_at_place_once(std::span<const std::string> directories, std::uint64_t order) {
  Place found;
  std::string has, lacks;
  for (const std::string& directory : directories) {
    const auto places = detail::readable_stores(directory);
    const auto place = std::ranges::find(places, order, &detail::StoreDirectory::order);
    if (place == places.end()) {
      lacks = directory;
      continue;
    }
    has = place->in(directory);
    found.job.groups.push_back(look_at_one_store(has));
  }
  if (!lacks.empty())
    found.gap = fmt::format("the store in {} holds a training, and {} has no store that was made with it", has, lacks);
  const std::span<const StoreSummary> groups(found.job.groups);
  if (groups.empty()) return found;  // removed meanwhile
  found.objection = objection(groups);
  if (found.is_whole()) {
    found.job.commits = detail::common_commits(groups, &StoreSummary::commits);
    found.job.checkpoints = detail::common_commits(groups, &StoreSummary::checkpoints);
  }
  if (!found.job.commits.empty()) return found;
  std::uint64_t newest_step = 0;
  bool lacking = !lacks.empty();
  for (const StoreSummary& group : groups) {
    lacking = lacking || lacks_files(group);
    if (!tiers::Store::ranks_without_manifest(group.directory).empty()) found.is_unfinished = false;
    for (const StoreSummary::Rank& rank : group.ranks) {
      if (rank.has_more_than_first_commit(/*took_over=*/order > 0)) found.is_unfinished = false;
      newest_step = std::max(newest_step, rank.newest_step());
    }
  }
  if (lacking) found.step_out_of_reach = newest_step;
  return found;
}

// Ranks are looked at one after the other: what a running program makes or commits in between seems to be incomplete.
Place look_at_place(std::span<const std::string> directories, std::uint64_t order) {
  constexpr int kLooks = 3;
  Place found = look_at_place_once(directories, order);
  for (int look = 1; look < kLooks; ++look) {
    if (!found.job.commits.empty() || (found.is_unfinished && found.step_out_of_reach == 0)) break;
    found = look_at_place_once(directories, order);
  }
  // As StoreSurvey::look().
  const std::span<const StoreSummary> groups(found.job.groups);
  if (found.job.commits.empty() && !groups.empty() && found.is_whole())
    found.job.commits = detail::common_commits(groups, &StoreSummary::all_commits);
  return found;
}

// The job of a place that holds a training, if only in part.
StoredJob job_of(Place place) {
  if (!place.objection.empty()) throw UsageError(place.objection);
  if (!place.gap.empty()) throw StoreError(place.gap + ": bring it back, or move the first one away");
  return std::move(place.job);
}

std::string missing_in(const StoreSummary& store) {
  std::vector<std::string> missing;
  for (int rank = 0; rank < store.world_size.value_or(0); ++rank)
    if (!has_manifest(store, rank)) missing.push_back(fmt::format("no files of rank {} are here", rank));
  for (const StoreSummary::Rank& rank : store.ranks)
    for (const tiers::ManifestDamage& part : rank.damage) missing.push_back(part.text);
  return fmt::to_string(fmt::join(missing, "; "));
}

}  // namespace

bool are_of_one_job(const StoreSummary& a, const StoreSummary& b) {
  return a.world_size && b.world_size && a.run != b.run && detail::job_part(a.run) == detail::job_part(b.run);
}

std::vector<StoreSummary> all_stores(const StoredJob& job) {
  std::vector<StoreSummary> stores = job.groups;
  for (const StoredJob& older : job.older) std::ranges::copy(older.groups, std::back_inserter(stores));
  return stores;
}

const StoredJob* StoredJob::readable_before() const {
  if (!commits.empty()) return nullptr;
  const auto readable = std::ranges::find_if(older, [](const StoredJob& job) { return !job.commits.empty(); });
  return readable == older.end() ? nullptr : &*readable;
}

std::string incomplete_text(const StoredJob& job) {
  const StoredJob* const before = job.readable_before();
  if (!before) return {};
  std::string missing;
  for (const StoreSummary& group : job.groups) {
    const std::string of_group = missing_in(group);
    if (!of_group.empty()) missing += (missing.empty() ? "" : "; ") + of_group;
  }
  const bool has_all_ranks = std::ranges::all_of(job.groups, is_whole);
  return fmt::format(
      "the newest store, in {}, holds a training, but no commit that every rank has{}: bring its files back{}; move it "
      "away only to give its steps up, and go back to the store before it, which holds step {}",
      job.groups.front().directory, missing.empty() ? "" : " (" + missing + ")",
      has_all_ranks ? "" : ", or, if these ranks have their files on other hosts, run this there",
      before->commits.front().step);
}

StoredJob look_at_job(std::span<const std::string> directories) {
  if (directories.empty()) throw UsageError("a job has at least one store");
  std::set<std::uint64_t, std::greater<>> orders;
  for (const std::string& directory : directories)
    for (const detail::StoreDirectory& place : detail::readable_stores(directory)) orders.insert(place.order);
  // Passes over the newer stores that restore() passes over. One that it refuses is the job, and so is one whose ranks
  // are not all here, which restore() may find on their hosts.
  StoredJob job;
  std::optional<Place> out_of_reach;  // the one with the newest step
  std::set<std::string> names;        // of the checkpoints in newer stores
  const auto add = [&](StoredJob here) {
    std::erase_if(here.checkpoints, [&](const CommitHeader& c) { return names.contains(c.name); });
    for (const CommitHeader& checkpoint : here.checkpoints) names.insert(checkpoint.name);
    const bool is_readable = job.commits.empty() && !job.readable_before() && !here.commits.empty();
    if (job.groups.empty())
      job = std::move(here);
    else if (is_readable || !here.checkpoints.empty() || std::ranges::any_of(here.groups, lost_a_checkpoint))
      job.older.push_back(std::move(here));
  };
  for (const std::uint64_t order : orders) {
    Place place;
    try {
      place = look_at_place(directories, order);
    } catch (const Error&) {
      if (job.groups.empty()) throw;  // no usable store was found yet; later, only an older one is lost
      continue;
    }
    if (place.job.groups.empty() || (!job.groups.empty() && !place.is_whole())) continue;
    if (job.groups.empty() && place.job.commits.empty()) {
      if (!place.is_unfinished) {
        add(job_of(std::move(place)));
      } else if (place.step_out_of_reach > (out_of_reach ? out_of_reach->step_out_of_reach : 0)) {
        out_of_reach = std::move(place);
      }
      continue;
    }
    if (job.groups.empty() && out_of_reach && out_of_reach->step_out_of_reach > place.job.commits.front().step)
      add(job_of(*std::move(out_of_reach)));
    add(std::move(place.job));
  }
  if (job.groups.empty() && out_of_reach) add(job_of(*std::move(out_of_reach)));
  if (!job.groups.empty()) return job;
  for (const std::string& directory : directories) {
    const auto places = detail::readable_stores(directory);
    job.groups.push_back(look_at_one_store(places.empty() ? directory : places.back().in(directory)));
  }
  if (const std::string problem = objection(job.groups); !problem.empty()) throw UsageError(problem);
  job.checkpoints = detail::common_commits(std::span<const StoreSummary>(job.groups), &StoreSummary::checkpoints);
  return job;
}

StoreSummary look_at_store(const std::string& directory) {
  return std::move(look_at_job(std::array{directory}).groups.front());
}

}  // namespace hoist
