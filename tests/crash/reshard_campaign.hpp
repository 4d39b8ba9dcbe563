// SPDX-License-Identifier: Apache-2.0
// tests/crash/reshard_campaign.hpp - trainings that change their number of ranks, and are killed while the state is
// redistributed over ranks.
//
// A run goes from 1, 2 or 4 ranks to another number several times; each time it is killed at planned events: while the
// new store is made and filled, between its ranks' first commits, while the old store is removed. The next start may
// want the new number, the old one, or a third. Gradients do not depend on the number of ranks (ToyModel), so every run
// must end in the bits of one that nobody disturbed.
//
// Threading  One thread; it forks, so the process has no other.
// Errors     What is wrong comes back as a sentence with the seed.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "campaign.hpp"
#include "rank_life.hpp"

namespace hoist::test {

class ReshardCampaign {
 public:
  // `groups`: sharding groups of so many ranks each, which change together.
  ReshardCampaign(Placement parameters, UpdateMode mode, const std::string& directory, int groups = 1);
  // Trains undisturbed on each number of ranks: finds the digests that every run must end in, and counts the events of
  // a change. Returns what is wrong, or nothing.
  std::string prepare();
  // One run with a few changes and about a dozen kills; returns what is wrong, or nothing.
  std::string run(std::uint64_t seed, CrashTally& tally);

 private:
  static constexpr std::array<int, 3> kWorlds{1, 2, 4};
  struct Life {
    int ranks = 1;
    bool reshards = false;
    KillPlan plan{};
    LifeTerms terms{};
    int slow_rank = -1;
  };

  LifeEnd live(const Life& life, Witness& witness) const;
  std::string train(const Life& life, KillSwitch& kills) const;
  bool has_two_stores() const;  // some group
  KillPlan plan_for(std::size_t world, Phase phase, std::uint64_t random) const;

  const Placement parameters_;
  const UpdateMode mode_;
  const int groups_;
  const std::string store_;
  std::string expected_;
  std::array<std::array<std::uint64_t, kPhaseCount>, kWorlds.size()> events_{};  // of a change to so many ranks
};

}  // namespace hoist::test
