// SPDX-License-Identifier: Apache-2.0
// cli/store_directory.hpp - finds the store that a command was given, and the process that uses it.
//
// Errors     UsageError for a path that holds no store.
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <hoist/zero/checkpoint/stored_job.hpp>

namespace CLI {
class App;
}

namespace hoist::cli {

// Adds STORE, of which a job with several sharding groups has several.
void add_stores(CLI::App& command, std::vector<std::string>& stores);
// Adds --step and --from, the commit that choose_commit() chooses.
void add_commit_options(CLI::App& command, std::string& step, std::string& from);

// The directory of the store: `path` itself, or its subdirectory "hoist", because people know the nvme_path of their
// configuration.
std::string find_store(const std::string& path);

// The holder of one of the store's ranks, for people ("process 4711 on node3"); nullopt if there is none. Takes each
// lock for a moment, shared; a trainer that starts in that moment tries again.
std::optional<std::string> store_owner(const StoreSummary& store);

// The stores of `paths`, as find_store() finds them, as one job. UsageError also if they are not one job.
StoredJob find_job(const std::vector<std::string>& paths, const std::string& from = {});

// The same, for a command that reports damage: see without_passing_damage().
StoredJob find_settled_job(const std::vector<std::string>& paths);

// Returns what `work` returns. For a command that reports damage, a store that cannot be read is a finding: prints a
// StoreError after the command's name, and returns kFailure. To other commands such a store is bad input.
int report_unreadable_store(const char* command, const std::function<int()>& work);

// The unusable parts of a store's manifests, a line each: "rank 0: commit slot 1 of ... cannot be used: ...".
std::vector<std::string> damage_lines(const StoreSummary& store);

// The commit that was asked for with --step or --from, of which at most one is not empty; the newest without both.
// Errors: UsageError when not every rank of every store has it; StoreError instead if a manifest is damaged.
StoredModelOptions choose_commit(const StoredJob& job, const std::string& step, const std::string& from);
// The value of --bytes-per-second; 0 without one. Errors: UsageError.
std::uint64_t rate_of(const std::string& text);
// The directories of the job's stores.
std::string names_of(const StoredJob& job);

// Stores of the same job's other sharding groups, where they are usually kept: in directories beside the one that
// find_store() returned, or beside the nvme_path that it is below. Never fails: unreadable directories are left out.
std::vector<std::string> other_groups(const std::string& path, const StoreSummary& store);

// Seconds since the newest manifest was written.
std::optional<double> store_age_seconds(const StoreSummary& store);

}  // namespace hoist::cli
