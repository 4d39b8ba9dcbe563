// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iterator>

#include <fmt/format.h>
#include <sys/stat.h>

#include <hoist/core/error.hpp>
#include <hoist/core/units.hpp>
#include <hoist/tiers/detail/manifest_view.hpp>
#include <hoist/tiers/detail/store_drives.hpp>
#include <hoist/tiers/detail/store_files.hpp>
#include <hoist/tiers/store.hpp>

namespace hoist::tiers {

using detail::StorePaths;

namespace {

bool is_there(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

}  // namespace

bool Store::Commits::has_more_than_first_commit(bool took_over) const {
  const bool is_at_first = commits.size() == 1 && abandoned.empty() && checkpoints.empty() &&
                           commits.front().incarnation == 1 && (took_over || commits.front().step == 0);
  return ever_committed && !is_at_first;
}

std::uint64_t Store::Commits::newest_step() const {
  std::uint64_t newest = 0;
  for (const auto& list : {commits, abandoned, checkpoints})
    for (const CommitHeader& commit : list) newest = std::max(newest, commit.step);
  return newest;
}

std::vector<CommitHeader> Store::Commits::commits_and_abandoned() const {
  std::vector<CommitHeader> all = commits;
  all.insert(all.end(), abandoned.begin(), abandoned.end());
  return all;
}

Store::Found Store::look(const std::string& directory, int rank) {
  const StorePaths paths(directory, rank);
  const detail::ManifestView view = detail::view_manifest(paths.manifest);
  Found found{detail::commits_in(view.slots), view.exists};
  found.is_half_made = !found.exists && is_there(paths.manifest_new);
  found.has_lost_manifest = !found.exists && !found.is_half_made && detail::has_lost_manifest(paths);
  if (!view.damage.empty()) {
    found.ever_committed = true;  // or not: that cannot be known
    found.damage.push_back({fmt::format("{} cannot be used: {}", paths.manifest, view.damage)});
  }
  if (view.superblock) {
    found.identity = {.layout = view.superblock->layout,
                      .rank = static_cast<int>(view.superblock->rank),
                      .world_size = static_cast<int>(view.superblock->world_size)};
    found.durability = view.superblock->durability;
    found.data_bytes = view.superblock->data_bytes;
    found.tile_count = view.superblock->tile_count;
    try {
      found.stripe_directories = detail::decode_stripes(view.superblock->stripes, paths.manifest).directories;
    } catch (const StoreError& error) {
      found.damage.push_back({error.what()});
    }
    found.store_number = view.superblock->store_number;
    found.checkpoints_max = view.superblock->checkpoints_max;
    found.caller_state_bytes_max = view.superblock->caller_state_bytes_max;
  }
  std::ranges::move(detail::damaged_slots(view.slots, paths.manifest), std::back_inserter(found.damage));
  return found;
}

std::vector<int> Store::ranks_in(const std::string& directory) { return detail::ranks_in(directory); }

std::vector<int> Store::ranks_without_manifest(const std::string& directory) {
  return detail::ranks_without_manifest(directory);
}

std::optional<std::string> Store::holder(const std::string& directory, int rank) {
  return detail::holder(StorePaths(directory, rank));
}

bool Store::lacks_a_drive(const std::string& directory, int rank, std::span<const std::string> elsewhere) {
  const Found found = look(directory, rank);
  const auto drive_count = static_cast<unsigned>(found.stripe_directories.size()) + 1;
  try {
    for (unsigned d = 1; d < drive_count; ++d)
      if (!detail::find_drive(found.stripe_directories[d - 1], elsewhere, rank,
                              {found.store_number, d, drive_count, directory}))
        return true;
  } catch (const StoreError&) {  // the drive there belongs to another store
    return true;
  }
  return false;
}

std::vector<std::string> Store::wrong_data_files(const std::string& directory, int rank) {
  const StorePaths home(directory, rank);
  const detail::ManifestView view = detail::view_superblock(home.manifest);
  if (!view.superblock) return {};
  detail::Stripes stripes;
  try {
    stripes = detail::decode_stripes(view.superblock->stripes, home.manifest);
  } catch (const StoreError&) {
    return {};  // look() says so
  }
  const unsigned drive_count = stripes.layout.drive_count();
  std::vector<std::string> wrong;
  for (unsigned d = 0; d < drive_count; ++d) {
    const std::string made_in = d == 0 ? directory : stripes.directories[d - 1];
    const StorePaths drive(made_in, rank);
    const std::uint64_t bytes = stripes.layout.drive_bytes(d, view.superblock->data_bytes);
    struct stat status {};
    if (::lstat(drive.data.c_str(), &status) != 0) {
      if (d == 0 || errno != ENOENT) wrong.push_back(fmt::format("{}: {}", drive.data, std::strerror(errno)));
    } else if (static_cast<std::uint64_t>(status.st_size) != bytes) {
      wrong.push_back(fmt::format("{} is {} bytes long and should be {}", drive.data, status.st_size, bytes));
    } else if (d > 0) {
      try {
        if (!detail::find_drive(made_in, {}, rank, {view.superblock->store_number, d, drive_count, directory}))
          wrong.push_back(fmt::format("{} belongs to another store, or has lost its label", drive.data));
      } catch (const Error& error) {
        wrong.emplace_back(error.what());
      }
    }
  }
  return wrong;
}

bool Store::is_half_removed(const std::string& directory) {
  std::optional<int> world_size;
  for (const int rank : ranks_in(directory))
    if (const auto identity = look(directory, rank).identity) world_size = identity->world_size;
  return std::ranges::any_of(detail::given_up_ranks_in(directory),
                             [&](int rank) { return !world_size || rank < *world_size; });
}

bool Store::remove(std::span<const std::string> directories, Nanoseconds lock_timeout,
                   const std::function<void()>& check) {
  return detail::remove_store(directories, lock_timeout, check);
}

void Store::check_unfinished(std::span<const std::string> directories, int world_size, bool took_over) {
  const std::string& home = directories.front();
  for (const int rank : detail::ranks_with_files(directories)) {
    const Found found = look(home, rank);
    if (found.has_more_than_first_commit(took_over))
      throw StoreError(fmt::format(
          "the store in {} cannot be replaced: rank {} has more than a first commit there{}; nothing was "
          "changed. Continue that run, bring the files of its ranks together, or remove the directory",
          home, rank, found.identity ? ", in a run of " + counted(found.identity->world_size, "rank") : ""));
    const auto drives = detail::drive_paths(home, directories.subspan(1), rank);
    // A removal that was killed may have left data without their labels.
    const auto given_up = detail::view_superblock(drives.front().manifest_new).superblock;
    const bool half_removed = !found.exists && given_up;
    const detail::Stripes stripes = half_removed ? detail::decode_stripes(given_up->stripes, home) : detail::Stripes{};
    const std::uint64_t number = half_removed ? given_up->store_number : found.store_number;
    for (const StorePaths& drive : drives) {
      const bool is_its_own = std::ranges::find(stripes.directories, drive.directory) != stripes.directories.end();
      if (!is_its_own || std::filesystem::exists(drive.label))
        detail::refuse_foreign_data(drive, drives.front().directory, number);
    }
    if (took_over || !found.ever_committed || found.identity->world_size == world_size) continue;
    const std::size_t seen = ranks_in(home).size() + detail::given_up_ranks_in(home).size();
    if (seen < static_cast<std::size_t>(found.identity->world_size))
      throw StoreError(
          fmt::format("the store in {0} holds the first commit of rank {1} of a run of {2} ranks, and not the files of "
                      "all its ranks; nothing was changed: start {2} ranks, bring the files together, or remove the "
                      "directory",
                      home, rank, found.identity->world_size));
  }
}

void Store::refuse_lost_manifest(const std::string& directory, int rank) {
  detail::refuse_data_without_manifest(StorePaths(directory, rank));
}

}  // namespace hoist::tiers
