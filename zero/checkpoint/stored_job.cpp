// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <iterator>
#include <set>
#include <string>

#include <fmt/format.h>

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

// The stores of one place below each directory, where all have it.
std::vector<StoreSummary> at_place(std::span<const std::string> directories, std::uint64_t order) {
  std::vector<StoreSummary> groups;
  for (const std::string& directory : directories) {
    const auto places = detail::readable_stores(directory);
    const auto place = std::ranges::find(places, order, &detail::StoreDirectory::order);
    if (place == places.end()) return {};
    groups.push_back(look_at_one_store(place->in(directory)));
  }
  return groups;
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

StoredJob look_at_job(std::span<const std::string> directories) {
  if (directories.empty()) throw UsageError("a job has at least one store");
  std::set<std::uint64_t, std::greater<>> orders;
  for (const std::string& directory : directories)
    for (const detail::StoreDirectory& place : detail::readable_stores(directory)) orders.insert(place.order);
  // As restore() does, passes over a newer store that not all groups have, or that holds no commit that all of them
  // have.
  StoredJob job;
  std::set<std::string> names;  // of the checkpoints in newer stores
  for (const std::uint64_t order : orders) {
    std::vector<StoreSummary> groups;
    try {
      groups = at_place(directories, order);
    } catch (const Error&) {
      if (job.groups.empty()) throw;  // no usable store was found yet; later, only an older one is lost
    }
    if (groups.empty() || !objection(groups).empty()) continue;
    StoredJob here{
        .commits = detail::common_commits(std::span<const StoreSummary>(groups), &StoreSummary::commits),
        .checkpoints = detail::common_commits(std::span<const StoreSummary>(groups), &StoreSummary::checkpoints)};
    here.groups = std::move(groups);
    if (job.groups.empty() && here.commits.empty()) continue;
    std::erase_if(here.checkpoints, [&](const CommitHeader& c) { return names.contains(c.name); });
    for (const CommitHeader& checkpoint : here.checkpoints) names.insert(checkpoint.name);
    if (job.groups.empty())
      job = std::move(here);
    else if (!here.checkpoints.empty() || std::ranges::any_of(here.groups, lost_a_checkpoint))
      job.older.push_back(std::move(here));
  }
  if (!job.groups.empty()) return job;
  for (const std::string& directory : directories) job.groups.push_back(look_at_store(directory));
  if (const std::string problem = objection(job.groups); !problem.empty()) throw UsageError(problem);
  job.checkpoints = detail::common_commits(std::span<const StoreSummary>(job.groups), &StoreSummary::checkpoints);
  return job;
}

}  // namespace hoist
