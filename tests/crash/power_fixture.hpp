// SPDX-License-Identifier: Apache-2.0
// tests/crash/power_fixture.hpp - P3 at the engine's face against power cuts and failing drives.
//
// A life trains on a drive that stops answering at operation `dies_at`. After a power cut, every write that no flush
// covered is kept, lost or torn by seed; writes survive in any order. The judge resumes with a healthy drive: it must
// find a commit not older than the newest that was reported durable nor newer than the last step() called, with
// that step's caller state, and training on from there must end in the digests of an undisturbed run.
//
// Threading  One thread a test; the ranks of a life are threads of their own.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/forgetful_backend.hpp>
#include <hoist/tests/support/lost_names.hpp>
#include <hoist/tests/zero/toy_ranks.hpp>

namespace hoist::test {

inline constexpr std::uint64_t kCutSteps = 3;  // that are cut
inline constexpr std::uint64_t kLastStep = 5;  // that the judge trains to

struct PowerSetup {
  Placement parameters = Placement::nvme;
  UpdateMode update_mode = UpdateMode::forward;
  int ranks = 1;
  bool keeps = false;  // every step is saved under a name as well, and one of them stays
  unsigned commit_every = 1;
  int cut_ranks = 0;    // of the life that is cut, when it is not as many as began
  int judge_ranks = 0;  // likewise
  double pinned_fraction = 0;
  int groups = 1;  // sharding groups of so many ranks each, with a store each
};

// The facts that the judge has to know.
struct History {
  std::atomic<std::int64_t> committed{-1};
  std::atomic<std::int64_t> begun{-1};
  std::atomic<std::int64_t> checkpoint{-1};  // the newest step that was reported durable under its name
  std::atomic<bool> went_back{false};        // a rank's restore() of a named checkpoint returned
};

std::string setup_name(const testing::TestParamInfo<PowerSetup>& info);
void PrintTo(const PowerSetup& setup, std::ostream* out);  // GoogleTest names the parameter so in its messages

class Power : public testing::TestWithParam<PowerSetup> {
 protected:
  // The part that is removed from the protocol, for the judge to notice.
  struct Mutation {
    ForgetfulBackend::Drops drops{};
    LostNames::Forgets forgets{};
    bool no_barrier = false;        // commits are not agreed
    bool no_keep_barrier = false;   // what is kept is not
    bool no_adopt_barrier = false;  // from its first manifest on, a rank does without the others
    bool slow_manifest = false;     // rank 1, or with several groups the second one's first, is late with its manifest
    bool makes_up_agreements() const { return no_barrier || no_keep_barrier || no_adopt_barrier; }
  };

  void SetUp() override;

  // Every life before a cut begins with a training that came to `step`.
  void begin_all_with(std::uint64_t step);
  void start_over() const;  // puts what lives begin with in its place

  // Trains `count` steps from what is there, recording what was promised. Returns whether the drive died.
  bool live(const std::shared_ptr<Faults>& faults, std::uint64_t count, const Mutation& mutation, History& history);
  // The fault in the remaining files; empty when all is well.
  std::string judge(const History& history) const;

  // From this operation on, the drive answers nothing but EIO, and does nothing.
  static void die_at(Faults& faults, std::uint64_t operation);
  // The short form cuts the power and fails at one half of the operations, and kills at the other half. With
  // HOIST_CRASH_SEEDS everything happens at every operation, and the cuts once for each seed.
  struct CutPoints {
    std::uint64_t seeds = 1;
    std::uint64_t stride = 2;
  };
  static CutPoints cut_points();
  // Cuts the power at one operation after another, until a life gets by without reaching its own; what is wrong after
  // the first cut that shows anything. Adds to `cuts`.
  std::string first_problem(const CutPoints& points, const Mutation& mutation, std::uint64_t& cuts);
  // Takes something away, and looks for a cut that shows it.
  std::string found(const Mutation& mutation);

  static int cut_ranks() { return GetParam().cut_ranks == 0 ? GetParam().ranks : GetParam().cut_ranks; }
  static int judge_ranks() { return GetParam().judge_ranks == 0 ? cut_ranks() : GetParam().judge_ranks; }

  std::uint64_t last_step_ = kLastStep;
  std::optional<std::uint64_t> begun_with_;  // the step that the lives begin with
  std::string from_;                         // the named checkpoint they go back to
  bool elastic_ = false;                     // the state does not depend on the number of ranks

 private:
  // So many ranks of each group. What body() says of a group on its first rank is returned: the first that is anything.
  using Body = std::function<std::string(int group, const Runtime::Groups& joins)>;
  static std::string on_job(int ranks, const Body& body);

  ToySetup toy(int group) const;
  std::unique_ptr<ToyModel> make_model(Runtime& runtime, const ToySetup& setup, int group) const;
  // `together`: what restore() says goes for all ranks.
  void train(ToyModel& model, std::uint64_t count, History& history, bool together) const;
  std::string judge_rank(ToyModel& model, const History& history, const std::string& expected) const;
  // The kept state is a step that was saved, and training that continues from it ends as it should.
  std::string judge_checkpoints(const History& history) const;
  // Cuts the power at one operation; what is wrong then. `died`: whether the run came to that operation.
  std::string cut_at(std::uint64_t dies_at, std::uint64_t seed, const Mutation& mutation, bool& died);

  const TempDirectory directory_{scratch_in_memory()};
  std::vector<std::string> expected_;  // by group
};

}  // namespace hoist::test
