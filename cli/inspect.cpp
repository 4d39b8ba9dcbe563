// SPDX-License-Identifier: Apache-2.0
// hoist inspect: shows what a store holds.
#include <algorithm>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <hoist/core/units.hpp>
#include <hoist/zero/checkpoint/stored_job.hpp>

#include "commands.hpp"
#include "output.hpp"
#include "store_directory.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;
using tiers::CommitHeader;

struct InspectArguments {
  std::vector<std::string> stores;
  std::string json;
};

// What inspect finds without reading any record.
struct Findings {
  StoreSummary store;
  std::optional<std::string> owner;
  std::optional<double> age_seconds;  // of the last commit; empty if none can be read

  std::uint64_t elements(bool trainable) const {
    std::uint64_t count = 0;
    for (const StoredParameter& parameter : store.parameters) {
      if (parameter.trainable == trainable) count += parameter.element_count();
    }
    return count;
  }
  std::uint64_t data_bytes() const {
    std::uint64_t bytes = 0;
    for (const StoreSummary::Rank& rank : store.ranks) bytes += rank.data_bytes;
    return bytes;
  }
  bool lost_a_rank = false;  // without a usable commit, or its data, a rank cannot be resumed
};

// --- for people ------------------------------------------------------------------------------------------------------

std::string age_text(double seconds) {
  if (seconds < 120) return fmt::format("{:.0f} seconds ago", seconds);
  if (seconds < 2 * 3600) return fmt::format("{:.0f} minutes ago", seconds / 60);
  if (seconds < 2 * 86400) return fmt::format("{:.0f} hours ago", seconds / 3600);
  return fmt::format("{:.0f} days ago", seconds / 86400);
}

std::string ranks_text(const StoreSummary& store) {
  if (!store.world_size) return "unknown: no manifest can be read";
  std::vector<int> here;
  for (const StoreSummary::Rank& rank : store.ranks) here.push_back(rank.rank);
  if (is_whole(store)) return fmt::format("{}", *store.world_size);
  return fmt::format("{}; here: rank {}; the other ranks' files are elsewhere or lost", *store.world_size,
                     fmt::join(here, ", "));
}

std::string model_text(const Findings& findings) {
  const std::uint64_t frozen = findings.elements(false);
  return fmt::format("{} in {} of {}{}", counted(findings.elements(true) + frozen, "parameter"),
                     counted(findings.store.parameters.size(), "tensor"), counted(findings.store.unit_count, "unit"),
                     frozen == 0 ? "" : fmt::format(", {} of them frozen", frozen));
}

std::string resume_text(const StoreSummary& store) {
  if (store.durability == tiers::Durability::none) return "nothing: made with durability \"none\", which never commits";
  if (!store.restorable().empty()) return fmt::format("step {}", store.restorable().front().step);
  if (store.world_size && !is_whole(store))
    return "unknown: the newest step that all ranks have, and some are not here";
  return "nothing: no step that every rank has";
}

std::string checkpoint_text(const CommitHeader& checkpoint) {
  return fmt::format("{} (step {})", checkpoint.name, checkpoint.step);
}

// The store does not say whether its run has a mirror, which uses one of the places.
std::string checkpoints_text(const StoreSummary& store) {
  const std::string room =
      fmt::format("room for {} ({} with a mirror)", store.checkpoints_max, store.checkpoints_max - 1);
  if (!is_whole(store)) return "unknown: those that all ranks have, and some are not here; " + room;
  const std::string text = listed(store.checkpoints, checkpoint_text);
  return fmt::format("{}; {}", text.empty() ? "none" : text, room);
}

// "step 3 (after restart 1, saved again 2 times)"
std::string commit_text(const CommitHeader& commit) {
  std::vector<std::string> remarks;
  if (commit.incarnation > 1) remarks.push_back(fmt::format("after restart {}", commit.incarnation - 1));
  if (commit.revision > 0) remarks.push_back("saved again " + counted(commit.revision, "time"));
  return fmt::format("step {}{}", commit.step, remarks.empty() ? "" : fmt::format(" ({})", fmt::join(remarks, ", ")));
}

void print_findings(const Findings& findings) {
  const StoreSummary& store = findings.store;
  std::vector<std::vector<std::string>> rows{{"model", model_text(findings)},
                                             {"world size", ranks_text(store)},
                                             {"resumes from", resume_text(store)},
                                             {"on disk", format_bytes(findings.data_bytes()) + " reserved"}};
  if (store.checkpoints_max > 0) rows.push_back({"checkpoints", checkpoints_text(store)});
  if (findings.age_seconds) rows.push_back({"last commit", age_text(*findings.age_seconds)});
  rows.push_back({"in use", findings.owner ? "by " + *findings.owner : "no"});
  say("{}\n\n{}\n", store.directory, columns(rows));

  rows = {{"rank", "commits, newest first"}};
  for (const StoreSummary::Rank& rank : store.ranks) {
    const auto commits = listed(rank.commits, commit_text);
    rows.push_back({fmt::format("{}", rank.rank), commits.empty() ? "none" : commits});
  }
  say("{}", columns(rows));
  for (const std::string& line : damage_lines(store)) say("{}\n", line);
}

// --- for programs ----------------------------------------------------------------------------------------------------

Json commit_json(const CommitHeader& commit) {
  return {{"step", commit.step}, {"incarnation", commit.incarnation}, {"revision", commit.revision}};
}

Json checkpoints_json(const std::vector<CommitHeader>& checkpoints) {
  Json json = Json::array();
  for (const CommitHeader& checkpoint : checkpoints)
    json.push_back({{"name", checkpoint.name}, {"step", checkpoint.step}});
  return json;
}

Json findings_json(const Findings& findings) {
  const StoreSummary& store = findings.store;
  Json json{{"store", store.directory},
            {"world_size", or_null(store.world_size)},
            {"durability", store.durability == tiers::Durability::step ? "step" : "none"},
            {"checkpoints", is_whole(store) ? checkpoints_json(store.checkpoints) : Json(nullptr)},
            {"checkpoints_max", store.checkpoints_max},
            {"resumes_from_step", store.restorable().empty() ? Json(nullptr) : Json(store.restorable().front().step)},
            {"units", store.unit_count},
            {"elements", findings.elements(true) + findings.elements(false)},
            {"frozen_elements", findings.elements(false)},
            {"data_bytes", findings.data_bytes()},
            {"age_seconds", or_null(findings.age_seconds)},
            {"in_use_by", or_null(findings.owner)},
            {"ranks", Json::array()},
            {"parameters", Json::array()}};
  for (const StoreSummary::Rank& rank : store.ranks) {
    Json commits = Json::array();
    for (const CommitHeader& commit : rank.commits) commits.push_back(commit_json(commit));
    Json damage = Json::array();
    for (const tiers::ManifestDamage& part : rank.damage) damage.push_back(part.text);
    json["ranks"].push_back(
        {{"rank", rank.rank}, {"commits", commits}, {"data_bytes", rank.data_bytes}, {"damage", damage}});
  }
  for (const StoredParameter& parameter : store.parameters) {
    json["parameters"].push_back({{"name", parameter.name},
                                  {"unit", parameter.unit},
                                  {"shape", parameter.shape},
                                  {"dtype", dtype_name(parameter.dtype)},
                                  {"trainable", parameter.trainable}});
  }
  return json;
}

Findings look_into(const StoreSummary& store) {
  Findings findings{.store = store, .owner = store_owner(store), .age_seconds = {}};
  for (StoreSummary::Rank& rank : findings.store.ranks) {
    findings.lost_a_rank = findings.lost_a_rank || (rank.commits.empty() && !rank.damage.empty());
    if (rank.commits.empty()) continue;  // its files may be in the making
    if (!findings.age_seconds) findings.age_seconds = store_age_seconds(store);
    for (const std::string& file : tiers::Store::wrong_data_files(store.directory, rank.rank)) {
      rank.damage.push_back({file});
      findings.lost_a_rank = true;
    }
  }
  return findings;
}

// Prints and records everything about one store. Returns false if a rank of it is lost.
bool inspect_store(const StoreSummary& store, Json& json) {
  const Findings findings = look_into(store);
  json = findings_json(findings);
  print_findings(findings);
  return !findings.lost_a_rank;
}

// Stores of earlier numbers of ranks, which stay for their named checkpoints, or because the newest is incomplete; no
// row above counts their bytes. Returns whether the newest is complete.
bool inspect_older(const StoredJob& job, Json& json) {
  json["older_stores"] = Json::array();
  for (const StoredJob& older : job.older) {
    for (const StoreSummary& store : older.groups) {
      const Findings findings{.store = store, .owner = {}, .age_seconds = {}};
      json["older_stores"].push_back({{"store", store.directory},
                                      {"checkpoints", checkpoints_json(older.checkpoints)},
                                      {"data_bytes", findings.data_bytes()}});
      std::string kept = listed(older.checkpoints, checkpoint_text);
      if (!kept.empty()) kept = " stays for its checkpoints, " + kept;
      if (&older == job.readable_before())
        kept = fmt::format(" holds step {}{}", older.commits.front().step, kept.empty() ? "" : ", and" + kept);
      say("\n{}{}: {} reserved\n", store.directory, kept, format_bytes(findings.data_bytes()));
    }
  }
  const std::string gap = incomplete_text(job);
  if (!gap.empty()) say("\n{}\n", gap);
  return gap.empty();
}

// The stores of several sharding groups: each as if it were alone, then the step that the whole job would resume from.
int inspect_job(const StoredJob& job, const InspectArguments& arguments) {
  const auto commit = job.commits.empty() ? std::nullopt : std::optional(job.commits.front());
  const bool whole = std::ranges::all_of(job.groups, is_whole);
  Json json{{"resumes_from_step", commit ? Json(commit->step) : Json(nullptr)},
            {"checkpoints", whole ? checkpoints_json(job.checkpoints) : Json(nullptr)},
            {"groups", Json::array()}};
  bool sound = true;
  for (const StoreSummary& group : job.groups) {
    Json of_group;
    sound = inspect_store(group, of_group) && sound;
    json["groups"].push_back(std::move(of_group));
    say("\n");
  }
  say("the job of these {} groups resumes from {}\n", job.groups.size(),
      commit  ? fmt::format("step {}", commit->step)
      : whole ? "nothing: no step that every group has"
              : "unknown: the newest step that all groups have, and some ranks are not here");
  sound = inspect_older(job, json) && sound;
  write_json(arguments.json, json);
  return sound ? kOk : kFailure;
}

int inspect(const InspectArguments& arguments) {
  check_json(arguments.json);
  const StoredJob job = find_settled_job(arguments.stores);
  if (job.groups.size() == 1) {
    Json json;
    const std::vector<std::string> others = other_groups(arguments.stores.front(), job.groups.front());
    bool sound = inspect_store(job.groups.front(), json);
    json["other_groups"] = others;
    if (!others.empty())
      say("\nthis is one sharding group's part of a job; name {} as well to see what the job resumes from\n",
          fmt::join(others, " "));
    sound = inspect_older(job, json) && sound;
    write_json(arguments.json, json);
    return sound ? kOk : kFailure;
  }
  return inspect_job(job, arguments);
}

}  // namespace

Command add_inspect(CLI::App& app) {
  CLI::App* command = app.add_subcommand("inspect", "Show what a store holds; changes nothing");
  auto arguments = std::make_shared<InspectArguments>();
  add_stores(*command, arguments->stores);
  command->add_option("--json", arguments->json, "Write the results as JSON to this file");
  command->footer(
      "Example: hoist inspect /local_nvme/hoist\n"
      "Exit code 1: a rank's manifest cannot be used, a data file is missing or has another length, the newest store\n"
      "is incomplete and an older one is not, or the files are not those of one run. `hoist verify` reads and checks "
      "everything.");
  return {command, [arguments] { return report_unreadable_store("inspect", [&] { return inspect(*arguments); }); }};
}

}  // namespace hoist::cli
