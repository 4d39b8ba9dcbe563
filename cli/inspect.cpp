// SPDX-License-Identifier: Apache-2.0
// hoist inspect: what a store holds, without changing or locking it.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>

#include <fmt/format.h>

#include <hoist/core/error.hpp>
#include <hoist/tiers/store.hpp>

#include "commands.hpp"
#include "output.hpp"

namespace hoist::cli {

namespace {

using Json = nlohmann::ordered_json;
using tiers::CommitHeader;
using tiers::Store;

struct RankFound {
  int rank = 0;
  Store::Found found;
};

// Each rank's files name the rank, so all that could be there are looked for; parts of a store may lie on other hosts.
std::vector<RankFound> look_at_all(const std::string& directory) {
  constexpr int kRankMax = 4096;
  std::vector<RankFound> ranks;
  for (int rank = 0; rank < kRankMax; ++rank) {
    Store::Found found = Store::look(directory, rank);
    if (found.exists) ranks.push_back({rank, std::move(found)});
  }
  return ranks;
}

// The newest step every rank found here has; what restore() would take, were these all ranks.
std::optional<CommitHeader> common_commit(const std::vector<RankFound>& ranks) {
  for (const CommitHeader& candidate : ranks.front().found.commits) {
    const bool everywhere = std::ranges::all_of(ranks, [&](const RankFound& other) {
      return std::ranges::any_of(other.found.commits, [&](const CommitHeader& c) { return c.step == candidate.step; });
    });
    if (everywhere) return candidate;
  }
  return std::nullopt;
}

void print_found(const std::string& directory, const std::vector<RankFound>& ranks) {
  fmt::print("{}\n\n", directory);
  std::vector<std::vector<std::string>> rows{{"rank", "commits (step, incarnation), newest first"}};
  for (const RankFound& rank : ranks) {
    std::string commits;
    for (const CommitHeader& commit : rank.found.commits) {
      commits += fmt::format("{}step {} ({})", commits.empty() ? "" : ", ", commit.step, commit.incarnation);
    }
    rows.push_back({fmt::format("{}", rank.rank), commits.empty() ? "none" : commits});
  }
  fmt::print("{}\n", columns(rows));
  for (const RankFound& rank : ranks) {
    for (const std::string& damage : rank.found.damage) fmt::print("rank {}: {}\n", rank.rank, damage);
  }
  if (const auto common = common_commit(ranks)) {
    fmt::print("resumes from step {}{}\n", common->step,
               ranks.size() == 1 ? "" : ", the newest that all of these ranks have");
  } else {
    fmt::print("no step that every rank has: nothing to resume from\n");
  }
}

Json found_json(const std::string& directory, const std::vector<RankFound>& ranks) {
  Json json{{"store", directory}, {"ranks", Json::array()}};
  for (const RankFound& rank : ranks) {
    Json commits = Json::array();
    for (const CommitHeader& commit : rank.found.commits) {
      commits.push_back({{"step", commit.step}, {"incarnation", commit.incarnation}});
    }
    json["ranks"].push_back({{"rank", rank.rank}, {"commits", commits}, {"damage", rank.found.damage}});
  }
  const auto common = common_commit(ranks);
  json["resumes_from_step"] = common ? Json(common->step) : Json(nullptr);
  return json;
}

int inspect(std::string directory, const std::string& json) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::is_directory(directory, ignored)) {
    fmt::print(stderr, "hoist inspect: {} is not a directory\n", directory);
    return kBadInput;
  }
  std::vector<RankFound> ranks = look_at_all(directory);
  // People know the nvme_path of their configuration; the store is its subdirectory.
  const std::string below = (fs::path(directory) / "hoist").string();
  if (ranks.empty() && fs::is_directory(below, ignored)) {
    directory = below;
    ranks = look_at_all(directory);
  }
  if (ranks.empty()) {
    fmt::print(stderr, "hoist inspect: there is no store in {} (a store is the subdirectory hoist of nvme_path)\n",
               directory);
    return kBadInput;
  }
  write_json(json, found_json(directory, ranks));
  print_found(directory, ranks);
  const bool lost = std::ranges::any_of(
      ranks, [](const RankFound& rank) { return rank.found.commits.empty() && !rank.found.damage.empty(); });
  return lost ? kFailure : kOk;
}

}  // namespace

Command add_inspect(CLI::App& app) {
  struct Arguments {
    std::string store;
    std::string json;
  };
  CLI::App* command = app.add_subcommand("inspect", "Say what a store holds; changes and locks nothing");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("STORE", arguments->store, "The store's directory, or the nvme_path above it")->required();
  command->add_option("--json", arguments->json, "Write the same as JSON to this file");
  command->footer("Example: hoist inspect /local_nvme/hoist\nExit code 1: a rank's commits are damaged.");
  return {command, [arguments] { return inspect(arguments->store, arguments->json); }};
}

}  // namespace hoist::cli
