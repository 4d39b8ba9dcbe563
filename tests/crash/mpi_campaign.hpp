// SPDX-License-Identifier: Apache-2.0
// tests/crash/mpi_campaign.hpp - ranks that are processes: one dies, the others stop with an error in time, and the job
// started anew ends in the bits of one that nobody disturbed.
//
// mpirun starts hoist_crash_mpi_rank; one rank kills itself at a planned event, or is killed from here at a random
// moment. Where a rank's death ends the whole job, mpirun kills the others. With `survivors` (Open MPI's
// --enable-recovery) they live, and each has to end by itself, with an error that names the dead rank, within the
// time-out of collectives and a while for ending.
//
// Threading  One thread.
// Errors     What is wrong comes back as a sentence with the seed.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "campaign.hpp"
#include "rank_life.hpp"

namespace hoist::test {

struct MpiCrashSetup {
  Placement parameters = Placement::nvme;
  UpdateMode update_mode = UpdateMode::forward;
  int ranks = 2;
  std::string name() const;
};

// Two ranks and four, parameters on NVMe and in memory, both update modes.
std::vector<MpiCrashSetup> all_mpi_crash_setups();

struct MpiTally {
  CrashTally kills;
  std::uint64_t survivors = 0;     // ranks that had to end by themselves
  std::uint64_t named_a_unit = 0;  // of them, with an error that names a unit as well as the rank
  double slowest_end_seconds = 0;  // from the death of the one to the end of another
  void add(const MpiTally& other);
};
std::string table(const MpiTally& tally, std::uint64_t seed);

class MpiCampaign {
 public:
  static constexpr std::chrono::milliseconds kTimeout{2000};  // of collectives
  static constexpr std::chrono::milliseconds kEnding{
      6000};  // for what a rank may do after its error, on a busy machine

  MpiCampaign(MpiCrashSetup setup, const std::string& directory);
  // Why such jobs cannot be started here; empty when they can.
  static std::string obstacle();
  // An undisturbed job: its end, and how many events each phase has.
  std::string prepare();
  // One run with about `kills` kills.
  std::string run(std::uint64_t seed, std::uint64_t kills, MpiTally& tally);

 private:
  struct Life {
    KillPlan plan{};
    bool outside = false;
    int victim = -1;  // the rank that dies; none: -1
    bool survivors = false;
    LifeTerms terms{};
    int slow_rank = -1;
  };
  using Witnesses = std::vector<std::unique_ptr<SharedWitness>>;

  Witnesses make_witnesses() const;
  std::vector<std::string> command(const Life& life) const;
  // Starts the job and waits for its end. What is wrong about how it ended; `end` otherwise.
  std::string live(const Life& life, std::uint64_t seed, const Witnesses& witnesses, LifeEnd& end) const;
  std::string judge_survivors(const Life& life, const Witnesses& witnesses, MpiTally& tally) const;
  Life next_life(std::uint64_t seed, std::uint64_t number, const LifeTerms& terms) const;

  const MpiCrashSetup setup_;
  const std::string store_, witness_, log_;
  std::string expected_;
  std::array<std::uint64_t, kPhaseCount> events_{};  // of the rank that has most; restore: of one restore
};

}  // namespace hoist::test
