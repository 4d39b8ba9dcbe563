// SPDX-License-Identifier: Apache-2.0
// The long form of the kill test: at least a thousand kills, at least fifty in each phase, and a table of them.
//
//   hoist_crash_campaign [--kills N] [--hits N] [--seed N] [--directory DIR]
//
// Ends with 1 and the seed as soon as anything is wrong.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <fmt/core.h>

#include "campaign.hpp"

namespace hoist::test {
namespace {

struct Arguments {
  std::uint64_t kills = 1000, hits = 50, seed = 1;
  std::string directory = ".";
};

bool enough(const CrashTally& tally, const Arguments& arguments) {
  for (const std::uint64_t hits : tally.hits) {
    if (hits < arguments.hits) return false;
  }
  return tally.kills() >= arguments.kills && tally.chained_restores >= arguments.hits &&
         tally.manifests_differed >= arguments.hits;
}

int run(const Arguments& arguments) {
  const TempDirectory directory(arguments.directory);
  std::vector<Campaign> campaigns;
  for (const CrashSetup& setup : all_crash_setups()) campaigns.emplace_back(setup, directory.path().string());
  for (Campaign& campaign : campaigns) {
    if (const std::string problem = campaign.prepare(); !problem.empty()) {
      fmt::print(stderr, "an undisturbed run: {}\n", problem);
      return 1;
    }
  }
  CrashTally tally;
  for (std::uint64_t seed = arguments.seed; !enough(tally, arguments); ++seed) {
    for (Campaign& campaign : campaigns) {
      const std::string problem = campaign.run(seed, tally);
      if (problem.empty()) continue;
      fmt::print(stderr, "{}\n{}", problem, table(tally, arguments.seed));
      return 1;
    }
  }
  fmt::print("{}", table(tally, arguments.seed));
  return 0;
}

}  // namespace
}  // namespace hoist::test

int main(int count, char** words) {
  hoist::test::Arguments arguments;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string key = words[i];
    if (key == "--directory") {
      arguments.directory = words[i + 1];
      continue;
    }
    const std::uint64_t value = std::strtoull(words[i + 1], nullptr, 10);
    if (key == "--kills") arguments.kills = value;
    if (key == "--hits") arguments.hits = value;
    if (key == "--seed") arguments.seed = value;
  }
  return hoist::test::run(arguments);
}
