// SPDX-License-Identifier: Apache-2.0
// The long form of the kill tests, and a table of the kills.
//
//   hoist_crash_campaign [--kills N] [--hits N] [--reshard-kills N] [--group-kills N] [--mirror-kills N]
//                        [--troubles N] [--mpi-kills N] [--seed N] [--directory DIR]
//
// First N kills (1000) of whole processes, at least so many --hits (50) in each phase; then N (300) while the state is
// dealt out to another number of ranks; then N (300) of jobs of two sharding groups, and a third as many while these
// change their number of ranks; then N (300) with a mirror, after a tenth of which at least a rank's drive is lost, or
// all are; then N (300) lives that begin in trouble, with other kinds of files, signals, forks or rivals; then N (100)
// kills of one rank of an MPI job. Ends with 1 and the seed as soon as anything is wrong.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <fmt/core.h>

#include <hoist/bench/options.hpp>

#include "campaign.hpp"
#include "mpi_campaign.hpp"
#include "reshard_campaign.hpp"

namespace hoist::test {
namespace {

struct Arguments {
  std::uint64_t kills = 1000, hits = 50, reshard_kills = 300, group_kills = 300, mirror_kills = 300, troubles = 300,
                mpi_kills = 100, seed = 1;
  std::string directory = ".";
};

// The options that every campaign needs.
template <typename Campaigns>
bool prepared(Campaigns& campaigns) {
  for (auto& campaign : campaigns) {
    const std::string problem = campaign.prepare();
    if (problem.empty()) continue;
    fmt::print(stderr, "an undisturbed run: {}\n", problem);
    return false;
  }
  return true;
}

// Runs of all campaigns, with one seed after another, until `enough`.
template <typename Campaigns, typename Tally, typename Run, typename Enough>
bool run_until(Campaigns& campaigns, std::uint64_t seed, Tally& tally, const Run& run, const Enough& enough) {
  for (std::uint64_t next = seed; !enough(); ++next) {
    for (auto& campaign : campaigns) {
      const std::string problem = run(campaign, next);
      if (problem.empty()) continue;
      fmt::print(stderr, "{}\n{}", problem, table(tally, seed));
      return false;
    }
  }
  fmt::print("{}", table(tally, seed));
  std::fflush(stdout);
  return true;
}

bool enough_in(const CrashTally& tally, std::initializer_list<Phase> phases, std::uint64_t hits) {
  return std::ranges::all_of(phases, [&](Phase p) { return tally.hits[static_cast<std::size_t>(p)] >= hits; });
}

bool kill_processes(const Arguments& arguments, const std::string& directory) {
  std::vector<Campaign> campaigns;
  for (const CrashSetup& setup : all_crash_setups()) campaigns.emplace_back(setup, directory);
  CrashTally tally;
  return prepared(campaigns) &&
         run_until(
             campaigns, arguments.seed, tally,
             [&](Campaign& campaign, std::uint64_t seed) { return campaign.run(seed, tally); },
             [&] {
               return tally.kills() >= arguments.kills && tally.chained_restores >= arguments.hits &&
                      tally.manifests_differed >= arguments.hits &&
                      enough_in(
                          tally,
                          {Phase::create, Phase::initialize, Phase::forward_update, Phase::step_update, Phase::backward,
                           Phase::reduce, Phase::flush, Phase::manifest, Phase::between_ranks, Phase::restore},
                          arguments.hits);
             });
}

bool kill_while_resharding(const Arguments& arguments, const std::string& directory) {
  std::vector<ReshardCampaign> campaigns;
  for (const Placement place : {Placement::nvme, Placement::pinned}) {
    for (const UpdateMode mode : {UpdateMode::forward, UpdateMode::step})
      campaigns.emplace_back(place, mode, directory);
  }
  CrashTally tally;
  return prepared(campaigns) &&
         run_until(
             campaigns, arguments.seed, tally,
             [&](ReshardCampaign& campaign, std::uint64_t seed) { return campaign.run(seed, tally); },
             [&] { return tally.kills() >= arguments.reshard_kills; });
}

bool kill_groups(const Arguments& arguments, const std::string& directory) {
  std::vector<Campaign> campaigns;
  for (const CrashSetup& setup : group_crash_setups()) campaigns.emplace_back(setup, directory);
  CrashTally tally;
  const auto run = [&](Campaign& campaign, std::uint64_t seed) { return campaign.run(seed, tally); };
  const auto enough = [&] { return tally.kills() >= arguments.group_kills && tally.groups_differed >= arguments.hits; };
  if (!prepared(campaigns) || !run_until(campaigns, arguments.seed, tally, run, enough)) return false;
  constexpr int kGroups = 2;
  std::vector<ReshardCampaign> changes;
  changes.emplace_back(Placement::nvme, UpdateMode::forward, directory, kGroups);
  changes.emplace_back(Placement::pinned, UpdateMode::step, directory, kGroups);
  CrashTally changed;
  return prepared(changes) &&
         run_until(
             changes, arguments.seed, changed,
             [&](ReshardCampaign& campaign, std::uint64_t seed) { return campaign.run(seed, changed); },
             [&] { return 3 * changed.kills() >= arguments.group_kills; });
}

bool kill_with_a_mirror(const Arguments& arguments, const std::string& directory) {
  std::vector<Campaign> campaigns;
  for (const CrashSetup& setup : mirror_crash_setups()) campaigns.emplace_back(setup, directory);
  CrashTally tally;
  return prepared(campaigns) && run_until(
                                    campaigns, arguments.seed, tally,
                                    [&](Campaign& campaign, std::uint64_t seed) { return campaign.run(seed, tally); },
                                    [&] {
                                      return tally.kills() >= arguments.mirror_kills &&
                                             10 * tally.lost_stores >= arguments.mirror_kills;
                                    });
}

bool begin_in_trouble(const Arguments& arguments, const std::string& directory) {
  std::vector<Campaign> campaigns;
  for (const CrashSetup& setup : disturbed_crash_setups()) campaigns.emplace_back(setup, directory);
  CrashTally tally;
  return prepared(campaigns) && run_until(
                                    campaigns, arguments.seed, tally,
                                    [&](Campaign& campaign, std::uint64_t seed) { return campaign.run(seed, tally); },
                                    [&] { return tally.troubles() >= arguments.troubles; });
}

bool kill_mpi_ranks(const Arguments& arguments, const std::string& directory) {
  constexpr std::uint64_t kKillsOfARun = 8;
  if (arguments.mpi_kills == 0) return true;
  if (const std::string obstacle = MpiCampaign::obstacle(); !obstacle.empty()) {
    fmt::print("ranks of MPI were not killed: {}\n", obstacle);
    return true;
  }
  std::vector<MpiCampaign> campaigns;
  for (const MpiCrashSetup& setup : all_mpi_crash_setups()) campaigns.emplace_back(setup, directory);
  MpiTally tally;
  return prepared(campaigns) &&
         run_until(
             campaigns, arguments.seed, tally,
             [&](MpiCampaign& campaign, std::uint64_t seed) { return campaign.run(seed, kKillsOfARun, tally); },
             [&] { return tally.kills.kills() >= arguments.mpi_kills; });
}

int run(const Arguments& arguments) {
  const TempDirectory directory(arguments.directory);
  const std::string path = directory.path().string();
  const bool good = (arguments.kills == 0 || kill_processes(arguments, path)) &&
                    (arguments.reshard_kills == 0 || kill_while_resharding(arguments, path)) &&
                    (arguments.group_kills == 0 || kill_groups(arguments, path)) &&
                    (arguments.mirror_kills == 0 || kill_with_a_mirror(arguments, path)) &&
                    (arguments.troubles == 0 || begin_in_trouble(arguments, path)) && kill_mpi_ranks(arguments, path);
  return good ? 0 : 1;
}

}  // namespace
}  // namespace hoist::test

int main(int count, char** words) {
  return hoist::bench::run_main([&] {
    hoist::bench::Options options(count, words);
    hoist::test::Arguments arguments;
    for (const auto& [name, value] :
         {std::pair("--kills", &arguments.kills), std::pair("--hits", &arguments.hits),
          std::pair("--reshard-kills", &arguments.reshard_kills), std::pair("--group-kills", &arguments.group_kills),
          std::pair("--mirror-kills", &arguments.mirror_kills), std::pair("--troubles", &arguments.troubles),
          std::pair("--mpi-kills", &arguments.mpi_kills), std::pair("--seed", &arguments.seed)})
      *value = options.number(name, *value, 0);
    arguments.directory = options.text("--directory", arguments.directory);
    options.end();
    return hoist::test::run(arguments);
  });
}
