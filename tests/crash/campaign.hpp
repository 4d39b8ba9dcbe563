// SPDX-License-Identifier: Apache-2.0
// tests/crash/campaign.hpp - trainings that are killed in every phase and resumed, until they end in the bits of one
// that nobody disturbed.
//
// A run trains one model to its last step over many lives. Each life is a child process that dies at a planned event
// (kill_switch.hpp), or from outside at a random moment. Checked in every life: what it begins with (rank_life.hpp); at
// the end of the run: the digests of masters and moments.
//
// Threading  One thread; it forks, so the process has no other.
// Errors     What is wrong comes back as a sentence with the seed.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "disturbance.hpp"
#include "kill_switch.hpp"
#include "rank_life.hpp"

namespace hoist::test {

struct CrashSetup {
  Placement parameters = Placement::nvme;
  UpdateMode update_mode = UpdateMode::forward;
  int ranks = 1;
  double pinned_fraction = 0;  // of what is on NVMe
  int groups = 1;              // sharding groups of so many ranks each, with a store each
  bool mirrored = false;   // commits are copied to a mirror, and after some kills a rank's drive is lost, or all are
  bool disturbed = false;  // after each kill the next life begins in trouble (disturbance.hpp)
  int rank_count() const { return groups * ranks; }
  std::string name() const;
};
// Parameters on NVMe and in memory, every update mode, one rank and two; and six of these also with half of the
// optimizer's states pinned.
std::vector<CrashSetup> all_crash_setups();
// With a mirror: parameters on NVMe and in memory, every update mode, one rank and two, and two sharding groups.
std::vector<CrashSetup> mirror_crash_setups();
// With disturbances: parameters on NVMe and in memory, every update mode, one rank and two, and two sharding groups.
std::vector<CrashSetup> disturbed_crash_setups();
// Two sharding groups, of one rank and of two, in every update mode.
std::vector<CrashSetup> group_crash_setups();

struct CrashTally {
  std::array<std::uint64_t, kPhaseCount> hits{};
  std::uint64_t chained_restores = 0;  // restores killed right after a killed restore
  std::uint64_t from_outside = 0;
  std::uint64_t manifests_differed = 0;  // kills that left ranks with different newest commits
  std::uint64_t groups_differed = 0;     // kills that left sharding groups with different newest commits
  std::uint64_t lost_stores = 0;         // kills after which the store was removed
  std::uint64_t two_stores = 0;          // kills that left the old store and a new one
  std::array<std::uint64_t, kDisturbanceCount> disturbances{};  // lives that began in trouble
  std::array<std::uint64_t, kDisturbanceCount> refusals{};      // of them, those that hoist refused
  std::uint64_t runs = 0;
  std::uint64_t missed = 0;  // planned kills that did not happen: the life ended first
  std::uint64_t kills() const;
  std::uint64_t troubles() const;  // all disturbances
  void add(const CrashTally& other);
};

class Campaign {
 public:
  // `directory`: where stores are made.
  Campaign(CrashSetup setup, std::string directory);
  // What an undisturbed run ends in, and how many events each phase has. Before the first run(); returns what is wrong.
  std::string prepare();
  // One run with about a dozen kills; returns what is wrong, or nothing.
  std::string run(std::uint64_t seed, CrashTally& tally);

 private:
  struct Life {
    KillPlan plan;
    bool outside = false;  // killed by the parent
    LifeTerms terms{};
    int slow_rank = -1;
    bool has_rival = false;  // another process is started at the same time
  };

  std::string store_of(int group, int rank) const;  // with a mirror, each rank has a drive of its own
  void remove_files() const;
  std::string prepare_foreign();
  std::string disturb(std::uint64_t seed, LifeTerms& terms, CrashTally& tally);
  LifeEnd live_with(Disturbance disturbance, const LifeTerms& terms, Witness& witness) const;
  LifeEnd live(const Life& life, std::uint64_t seed, Witness& witness) const;
  std::string train(const Life& life, KillSwitch& kills) const;
  std::vector<KillPlan> plans(std::uint64_t seed) const;
  KillPlan plan_in(Phase phase, std::uint64_t random) const;
  std::vector<std::int64_t> newest_of(int group) const;  // by rank; -1: none

  const CrashSetup setup_;
  const std::string directory_;
  std::string store_, mirror_;
  std::string expected_;
  Files foreign_, older_;
  std::int64_t older_promised_ = -1;                 // the newest step that was reported durable then
  std::array<std::uint64_t, kPhaseCount> events_{};  // of an undisturbed run; restore: of one restore
};

// Printed by the program and on failure.
std::string table(const CrashTally& tally, std::uint64_t seed);

}  // namespace hoist::test
