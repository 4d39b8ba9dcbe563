// SPDX-License-Identifier: Apache-2.0
#include "store_directory.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <system_error>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <sys/stat.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "storage.hpp"

namespace hoist::cli {

namespace fs = std::filesystem;

namespace {

// As docs/format.md names them.
std::string rank_file(const std::string& directory, int rank, const char* suffix) {
  return (fs::path(directory) / fmt::format("rank-{:05}.{}", rank, suffix)).string();
}

// Refuses a step or a checkpoint that was asked for. A damaged manifest may have held it.
[[noreturn]] void throw_not_held(const StoredJob& job, const std::string& sentence) {
  std::string damage;
  for (const StoreSummary& group : job.groups)
    for (const std::string& line : damage_lines(without_passing_damage(group))) damage += "; " + line;
  if (damage.empty()) throw UsageError(sentence);
  throw StoreError(sentence + damage);
}

// For an error: the checkpoints of stores before the newest; empty if there are none.
std::string checkpoints_before(const StoredJob& job) {
  std::string kept;
  for (const StoredJob& older : job.older)
    for (auto checkpoint = older.checkpoints.rbegin(); checkpoint != older.checkpoints.rend(); ++checkpoint)
      kept += fmt::format("{}--from {} (step {} of {})", kept.empty() ? "" : ", ", shell_quoted(checkpoint->name),
                          checkpoint->step, names_of(older));
  return kept;
}

// The commit of the requested step, which exists, also under a name; nullopt for the newest one of a single store.
std::optional<tiers::CommitHeader> chosen_commit(const std::string& text, const StoredJob& job) {
  const bool several = job.groups.size() > 1;
  const std::string before = checkpoints_before(job);
  if (const std::string gap = incomplete_text(job); text.empty() && !gap.empty())
    throw StoreError(gap + (before.empty() ? "" : "; or name a checkpoint: " + before));
  if (text.empty() && !several) return std::nullopt;
  if (text.empty() && !job.commits.empty()) return job.commits.front();
  if (text.empty()) throw StoreError("the stores have no commit in common");
  std::string held, last;
  for (const tiers::CommitHeader& commit : job.commits) {
    const std::string step = fmt::format("{}", commit.step);
    if (step == text) return commit;
    if (step == last) continue;  // the same step, saved again
    held += (held.empty() ? "" : ", ") + step;
    last = step;
  }
  for (auto checkpoint = job.checkpoints.rbegin(); checkpoint != job.checkpoints.rend(); ++checkpoint) {
    if (fmt::format("{}", checkpoint->step) == text) return *checkpoint;
    if (std::ranges::find(job.commits, checkpoint->step, &tiers::CommitHeader::step) != job.commits.end()) continue;
    held += fmt::format("{}{} ('{}')", held.empty() ? "" : ", ", checkpoint->step, checkpoint->name);
  }
  throw_not_held(job, fmt::format("--step {}: {} {} {}{}", text, names_of(job), several ? "have in common" : "holds",
                                  held.empty() ? "no step that every rank has" : "the steps " + held,
                                  before.empty() ? "" : "; older stores keep checkpoints: " + before));
}

tiers::CommitHeader chosen_checkpoint(const std::string& name, const StoredJob& job) {
  for (auto checkpoint = job.checkpoints.rbegin(); checkpoint != job.checkpoints.rend(); ++checkpoint)
    if (checkpoint->name == name) return *checkpoint;
  std::vector<tiers::CommitHeader> all = job.checkpoints;
  for (const StoredJob& older : job.older) std::ranges::copy(older.checkpoints, std::back_inserter(all));
  const auto held = listed(all, &tiers::CommitHeader::name);
  throw_not_held(job,
                 fmt::format("--from {}: {} {} {}", name, names_of(job), job.groups.size() > 1 ? "all have" : "has",
                             held.empty() ? "no named checkpoint" : "the named checkpoints " + held));
}

}  // namespace

std::string names_of(const StoredJob& job) { return listed(job.groups, &StoreSummary::directory); }

StoredModelOptions choose_commit(const StoredJob& job, const std::string& step, const std::string& from) {
  StoredModelOptions options{.below = false};
  const auto commit = from.empty() ? chosen_commit(step, job) : chosen_checkpoint(from, job);
  if (!commit) return options;
  if (commit->name.empty()) {
    options.step = commit->step;
    options.revision = commit->revision;
  } else {
    options.from = commit->name;
    options.serial = commit->checkpoint_serial;
  }
  return options;
}

std::uint64_t rate_of(const std::string& text) {
  return text.empty() ? 0 : parse_size_option("--bytes-per-second", text);
}

void add_stores(CLI::App& command, std::vector<std::string>& stores) {
  command
      .add_option("STORE", stores,
                  "The store's directory, or the nvme_path above it; for a job with several sharding groups, that of "
                  "each group")
      ->required()
      ->expected(-1);
}

void add_commit_options(CLI::App& command, std::string& step, std::string& from) {
  command
      .add_option("--step", step, "One of the newest store's steps, which `hoist inspect` lists; the newest by default")
      ->type_name("N");
  command.add_option("--from", from, "The checkpoint of this name instead")->excludes("--step")->type_name("NAME");
}

std::string find_store(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) throw UsageError(fmt::format("{}: {}", path, errno_text(errno)));
  if (!S_ISDIR(info.st_mode)) throw UsageError(fmt::format("{} is not a directory", path));
  const std::string below = (fs::path(path) / "hoist").string();
  for (const std::string& directory : {path, below})
    if (has_store(directory)) return directory;
  for (const std::string& directory : {path, below})  // only then, or a stray file would hide the store below
    if (has_data_without_manifest(directory)) return directory;
  throw UsageError(fmt::format("there is no store in {} (a store is the subdirectory hoist of nvme_path)", path));
}

std::optional<std::string> store_owner(const StoreSummary& store) {
  for (const StoreSummary::Rank& rank : store.ranks) {
    if (auto owner = tiers::Store::holder(store.directory, rank.rank)) return owner;
  }
  return std::nullopt;
}

StoredJob find_job(const std::vector<std::string>& paths, const std::string& from) {
  std::vector<std::string> directories;
  for (const std::string& path : paths) directories.push_back(find_store(path));
  StoredJob job = look_at_job(directories);
  const auto keeps = [&](const StoredJob& stores) {
    return std::ranges::find(stores.checkpoints, from, &tiers::CommitHeader::name) != stores.checkpoints.end();
  };
  if (from.empty() || keeps(job)) return job;
  const auto older = std::ranges::find_if(job.older, keeps);
  return older == job.older.end() ? job : StoredJob(*older);
}

StoredJob find_settled_job(const std::vector<std::string>& paths) {
  StoredJob job = find_job(paths);
  for (StoreSummary& group : job.groups) group = without_passing_damage(std::move(group));
  for (StoredJob& older : job.older)
    for (StoreSummary& group : older.groups) group = without_passing_damage(std::move(group));
  return job;
}

int report_unreadable_store(const char* command, const std::function<int()>& work) {
  try {
    return work();
  } catch (const StoreError& error) {
    complain("hoist {}: {}\n", command, error.what());
    return kFailure;
  }
}

std::vector<std::string> damage_lines(const StoreSummary& store) {
  std::vector<std::string> lines;
  for (const StoreSummary::Rank& rank : store.ranks)
    for (const tiers::ManifestDamage& part : rank.damage)
      lines.push_back(fmt::format("rank {}: {}", rank.rank, part.text));
  return lines;
}

std::vector<std::string> other_groups(const std::string& path, const StoreSummary& store) {
  constexpr std::size_t kLookedAtMax = 1000;
  std::error_code failed;
  const fs::path own = fs::canonical(find_store(path), failed);
  std::vector<fs::path> places;
  const auto add_beside = [&](const fs::path& directory, const char* below) {
    for (fs::directory_iterator entry(directory.parent_path(), failed), end;
         !failed && entry != end && places.size() < kLookedAtMax; entry.increment(failed))
      places.push_back(*below != 0 ? entry->path() / below : entry->path());
  };
  if (!failed) add_beside(own, "");
  if (!failed && own.filename() == "hoist") add_beside(own.parent_path(), "hoist");
  std::vector<std::string> found;
  for (const fs::path& place : places) {
    try {
      if (place != own && has_store(place) && are_of_one_job(look_at_store(place), store)) found.push_back(place);
    } catch (const Error&) {
    }
  }
  std::ranges::sort(found);
  return found;
}

std::optional<double> store_age_seconds(const StoreSummary& store) {
  std::optional<fs::file_time_type> newest;
  for (const StoreSummary::Rank& rank : store.ranks) {
    std::error_code failed;
    const auto time = fs::last_write_time(rank_file(store.directory, rank.rank, "manifest"), failed);
    if (!failed) newest = newest ? std::max(*newest, time) : time;
  }
  if (!newest) return std::nullopt;
  const std::chrono::duration<double> age = fs::file_time_type::clock::now() - *newest;
  return std::max(age.count(), 0.0);
}

}  // namespace hoist::cli
