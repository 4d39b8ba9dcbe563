// SPDX-License-Identifier: Apache-2.0
// A mirror holds one whole commit of the training at any moment. A run that has lost its drives resumes from it, bit by
// bit. Training never waits for the mirror, even when the mirror is slow or fails.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/aio/given_up.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/log_capture.hpp>
#include <hoist/tests/support/message_of.hpp>
#include <hoist/tests/support/remembered.hpp>
#include <hoist/tests/support/system_calls.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/checkpoint/verification.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::mirror_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

struct Cell {
  const char* name;
  Placement parameters, optimizer;
  UpdateMode mode = UpdateMode::automatic;
};

class MirrorTest : public testing::TestWithParam<Cell> {
 protected:
  MirrorTest() {
    setup_.engine.store_directory = directory_ / "store";
    setup_.engine.update_mode = GetParam().mode;
    setup_.engine.mirror = {.directory = directory_ / "mirror", .every = 0};
    setup_.engine.gradient_clipping = 0;
  }

  bool on_nvme() const { return GetParam().parameters == Placement::nvme || GetParam().optimizer == Placement::nvme; }
  // Directories of one rank alone, so that each has drives of its own.
  ToySetup of_rank(int rank) const {
    ToySetup setup = setup_;
    if (!own_drives_) return setup;
    setup.engine.store_directory += std::to_string(rank);
    for (std::string& further : setup.engine.stripe_directories) further += std::to_string(rank);
    return setup;
  }

  void on_engines(int ranks, const std::function<void(int rank, ToyModel&)>& body) {
    on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToySetup setup = of_rank(rank);
      if (faults_ && rank_of_faults_.value_or(rank) == rank)
        setup.runtime.make_aio_backend = [&](const auto& io) { return make_faulty_backend(io, faults_); };
      ToyModel model(setup, join);
      model.equal_gradients = true;
      body(rank, model);
    });
  }

  static void take_step(ToyModel& model, std::uint64_t step) {
    model.pass(step);
    const std::string state = "step " + std::to_string(step);
    model.engine().step({.caller_state = bytes_of(state)});
  }

  // Trains from scratch, and leaves the last step in the mirror.
  void train_and_mirror(int ranks, std::uint64_t steps) {
    on_engines(ranks, [&](int, ToyModel& model) {
      model.initialize();
      for (std::uint64_t step = 1; step <= steps; ++step) take_step(model, step);
      const std::string state = "step " + std::to_string(steps);
      model.engine().save("", bytes_of(state), {.mirror = true}).wait();
      EXPECT_EQ(model.engine().mirror().step, steps);
    });
  }

  // The state after each step of a run that nobody disturbed. It is the same for 1, 2 and 4 ranks.
  static const std::map<std::uint64_t, Digests>& undisturbed(std::uint64_t steps) {
    static std::map<std::uint64_t, std::map<std::uint64_t, Digests>> made;
    return remembered(made, steps, [&] {
      ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
      setup.engine.gradient_clipping = 0;
      setup.engine.update_mode = UpdateMode::step;
      ToyModel training(setup);
      training.equal_gradients = true;
      training.initialize();
      std::map<std::uint64_t, Digests> states;
      for (std::uint64_t step = 1; step <= steps; ++step) {
        take_step(training, step);
        states[step] = state_digests(training);
      }
      return states;
    });
  }

  // Removes the store, as if its drives were lost: the run resumes from the mirror, in the state of an undisturbed run.
  // Removes both at the end.
  void expect_restored(int ranks, const testing::Matcher<std::uint64_t>& step,
                       const std::map<std::uint64_t, Digests>& states) {
    fs::remove_all(setup_.engine.store_directory);
    on_engines(ranks, [&](int, ToyModel& model) {
      const RestoreReport report = model.restore();
      EXPECT_THAT(report.step, step);
      EXPECT_EQ(state_digests(model), states.at(report.step));
    });
    fs::remove_all(setup_.engine.store_directory);
    fs::remove_all(setup_.engine.mirror.directory);
  }

  std::vector<detail::StoreDirectory> stores_in(const std::string& directory) const {
    return detail::store_directories(directory);
  }

  TempDirectory directory_;
  ToySetup setup_ = toy_setup(GetParam().parameters, GetParam().optimizer);
  bool own_drives_ = false;
  std::shared_ptr<Faults> faults_;     // of the engines of on_engines()
  std::optional<int> rank_of_faults_;  // or of every rank
};

TEST_P(MirrorTest, ARunGoesOnFromItWhenItsDriveIsGone) {
  const auto& states = undisturbed(6);
  for (const auto& [before, after] : std::vector<std::pair<int, int>>{{1, 1}, {2, 2}, {2, 1}, {1, 4}}) {
    SCOPED_TRACE(std::to_string(before) + " ranks, then " + std::to_string(after));
    train_and_mirror(before, 4);
    fs::remove_all(setup_.engine.store_directory);
    on_engines(after, [&](int, ToyModel& model) {
      EXPECT_EQ(model.find_commit(), 4u);
      const RestoreReport report = model.restore();
      EXPECT_EQ(report.step, 4u);
      EXPECT_EQ(report.mirror, setup_.engine.mirror.directory);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(report.caller_state.data()), report.caller_state.size()),
                "step 4");
      EXPECT_EQ(state_digests(model), states.at(4));
      for (const std::uint64_t step : {5u, 6u}) take_step(model, step);
      model.engine().save("", bytes_of("step 6"), {.mirror = true}).wait();
      EXPECT_EQ(state_digests(model), states.at(6));
    });
    // The store that the first run's mirror was is gone, and the one that took its place is whole.
    EXPECT_EQ(stores_in(setup_.engine.mirror.directory).size(), 1u);
    {
      StoredModel copy(setup_.engine.mirror.directory);
      EXPECT_EQ(copy.step(), 6u);
      EXPECT_EQ(copy.world_size(), after);
      EXPECT_TRUE(verify_job(std::vector{setup_.engine.mirror.directory})[0].is_sound());
    }
    // The next start finds its own store again.
    on_engines(after, [&](int, ToyModel& model) {
      const RestoreReport report = model.restore();
      EXPECT_EQ(report.step, 6u);
      EXPECT_EQ(report.mirror, "");
      EXPECT_EQ(state_digests(model), states.at(6));
    });
    fs::remove_all(setup_.engine.store_directory);
    fs::remove_all(setup_.engine.mirror.directory);
  }
}

// Whatever step a copy under way holds, it is one of the run's, and whole.
TEST_P(MirrorTest, TrainingDoesNotWaitForASlowOne) {
  constexpr std::uint64_t kSteps = 8;
  const auto& states = undisturbed(kSteps);
  setup_.engine.mirror.every = 1;
  setup_.engine.mirror.bytes_per_second = 200 * kKiB;
  constexpr double kSecondsACopy = 2;  // at least, of a rank's 400 KiB and more
  on_engines(2, [&](int, ToyModel& model) {
    model.initialize();
    const TimePoint begin = Clock::now();
    for (std::uint64_t step = 1; step <= kSteps; ++step) {
      take_step(model, step);
      if (step == 1 && !on_nvme()) model.engine().save("", bytes_of("step 1")).wait();
    }
    model.engine().settle();
    EXPECT_LT(to_seconds(Clock::now() - begin), static_cast<double>(kSteps) * kSecondsACopy);
    EXPECT_EQ(state_digests(model), states.at(kSteps));
  });
  expect_restored(2, testing::Ge(1u), states);
}

TEST_P(MirrorTest, AsFastAsItGoesAndAtAnyStepItIsWhole) {
  constexpr std::uint64_t kSteps = 12;
  const auto& states = undisturbed(kSteps);
  setup_.engine.mirror.every = 1;
  for (std::uint64_t last = 3; last <= kSteps; last += 3) {
    on_engines(2, [&](int, ToyModel& model) {
      model.initialize();
      for (std::uint64_t step = 1; step <= last; ++step) {
        take_step(model, step);
        if (!on_nvme()) model.engine().save("", bytes_of("step")).wait();
      }
      model.engine().settle();
    });
    expect_restored(2, testing::Ge(1u), states);
  }
}

// The second one begins while the first is still being written. `every`: the first is copied as the next that is due.
TEST_P(MirrorTest, SavesInARowAreCopiedOneAfterTheOther) {
  const auto& states = undisturbed(2);
  setup_.engine.keep_steps = 2;
  for (const unsigned every : {0u, 1u}) {
    SCOPED_TRACE("every " + std::to_string(every));
    setup_.engine.mirror.every = every;
    on_engines(2, [&](int, ToyModel& model) {
      model.initialize();
      for (const std::uint64_t step : {1u, 2u}) {
        take_step(model, step);
        const std::string state = "step " + std::to_string(step);
        const Completion first = model.engine().save("a", bytes_of(state), {.mirror = every == 0});
        const Completion second = model.engine().save("b", bytes_of(state), {.mirror = true});
        first.wait();
        second.wait();
        EXPECT_EQ(model.engine().mirror().step, step);
      }
    });
    expect_restored(2, 2, states);
  }
}

// The files of a healthy rank stay where they are: a person may want them.
TEST_P(MirrorTest, OneRankWithANewDriveTakesAllBackToIt) {
  own_drives_ = true;
  const auto& states = undisturbed(6);
  on_engines(2, [&](int, ToyModel& model) {
    model.initialize();
    for (std::uint64_t step = 1; step <= 6; ++step) {
      take_step(model, step);
      if (step == 4) model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
    }
    if (!on_nvme()) model.engine().save("", bytes_of("step 6")).wait();
  });
  for (int lost = 0; lost < 2; ++lost) {  // once more: a healthy rank then holds half a store that took over
    fs::remove_all(setup_.engine.store_directory + "1");
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_EQ(model.restore().step, 4u);
      EXPECT_EQ(state_digests(model), states.at(4));
      for (const std::uint64_t step : {5u, 6u}) take_step(model, step);
      EXPECT_EQ(state_digests(model), states.at(6));
      if (!on_nvme()) model.engine().save("", bytes_of("step 6")).wait();
    });
  }
  EXPECT_TRUE(fs::exists(setup_.engine.store_directory + "0/rank-00000.manifest"));
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 6u); });
}

// What a restore that ended early has left on the new drive, even the new store's first commit, is not the rank's
// training. (With nothing on NVMe a restore commits nothing, and leaves a store without a commit whenever it ends.)
TEST_P(MirrorTest, ARestoreFromItMayEndAtAnyMomentAndIsBegunAnew) {
  own_drives_ = true;
  const auto& states = undisturbed(4);
  train_and_mirror(2, 4);
  fs::remove_all(setup_.engine.store_directory + "1");
  for (const int failing : {0, 1}) {
    for (const char* const file : {".data", ".manifest"}) {
      SCOPED_TRACE("rank " + std::to_string(failing) + ", " + file);
      faults_ = std::make_shared<Faults>(1);
      faults_->add({.operation = aio::Operation::write,
                    .path_contains = of_rank(failing).engine.store_directory + "/reshard-0001-ranks-2/rank-0000" +
                                     std::to_string(failing) + file,
                    .first = file == std::string(".manifest") ? 1u : 0u});  // after the superblock
      on_engines(2, [&](int, ToyModel& model) {
        if (on_nvme())
          EXPECT_THROW(model.restore(), Error);
        else
          EXPECT_EQ(model.restore().step, 4u);
      });
      EXPECT_TRUE(fs::exists(setup_.engine.store_directory + "1/reshard-0001-ranks-2"));
    }
  }
  faults_.reset();
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().mirror, setup_.engine.mirror.directory);
    EXPECT_EQ(state_digests(model), states.at(4));
    model.engine().save("", bytes_of("step 4")).wait();
  });
  // It is the rank's training now, of which the mirror holds an older commit.
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().mirror, ""); });
}

// A store cannot be read without each of its drives. When one is lost, the others keep their files: it may come back.
TEST_P(MirrorTest, OneOfARanksDrivesIsEnoughToLose) {
  own_drives_ = true;
  const auto& states = undisturbed(4);
  setup_.engine.stripe_directories = {directory_ / "further"};
  const std::string first = of_rank(1).engine.store_directory, further = of_rank(1).engine.stripe_directories.front();
  for (const auto& [lost, other] : {std::pair(first, further), std::pair(further, first)}) {
    SCOPED_TRACE(lost);
    train_and_mirror(2, 4);
    fs::remove_all(lost);
    for (const bool again : {false, true}) {
      on_engines(2, [&](int, ToyModel& model) {
        EXPECT_EQ(model.restore().mirror, again ? "" : setup_.engine.mirror.directory);
        EXPECT_EQ(state_digests(model), states.at(4));
        model.engine().save("", bytes_of("step 4")).wait();
      });
      EXPECT_TRUE(fs::exists(other + "/rank-00001.data"));
    }
    for (const auto& entry : fs::directory_iterator(directory_ / "")) fs::remove_all(entry);
  }
}

TEST_P(MirrorTest, AnAdditionalDriveIsNotALostOne) {
  train_and_mirror(1, 2);
  setup_.engine.stripe_directories = {directory_ / "further"};
  on_engines(1, [&](int, ToyModel& model) { EXPECT_THROW(model.restore(), StoreError); });
  setup_.engine.stripe_directories.clear();
  on_engines(1, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().mirror, ""); });
}

TEST_P(MirrorTest, RelativePathsOutliveAChangeOfDirectory) {
  const fs::path before = fs::current_path();
  fs::current_path(directory_ / "");
  setup_.engine.store_directory = "store_here";
  setup_.engine.mirror.directory = "mirror_here";
  on_engines(1, [&](int, ToyModel& model) {
    model.initialize();
    for (std::uint64_t step = 1; step <= 3; ++step) {
      take_step(model, step);
      if (step == 2) fs::current_path(before);
      model.engine().save("", bytes_of("here"), {.mirror = true}).wait();
    }
  });
  EXPECT_FALSE(fs::exists("store_here") || fs::exists("mirror_here"));
  fs::current_path(before);
}

// A missing file does not mean a new drive: resuming from the mirror would ignore the files that are there.
TEST_P(MirrorTest, AStoreThatLacksAFileIsRefusedAndLeftAsItIs) {
  train_and_mirror(2, 4);
  const std::string manifest = setup_.engine.store_directory + "/rank-00001.manifest";
  fs::rename(manifest, directory_ / "aside");
  on_engines(2, [&](int, ToyModel& model) { EXPECT_THROW(model.restore(), StoreError); });
  fs::rename(directory_ / "aside", manifest);
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().mirror, ""); });
}

// Errors of a copy: each reaches every rank, the training goes on, and the next copy is whole.
TEST_P(MirrorTest, ACopyThatFailsOnOneRankFailsOnAllAndTheNextOneIsWhole) {
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 1;
  const auto& states = undisturbed(6);
  for (const std::uint64_t first_failure : {1u, 3u}) {  // before there is a whole copy, and after
    on_engines(2, [&](int rank, ToyModel& model) {
      model.initialize();
      for (std::uint64_t step = 1; step <= 6; ++step) {
        take_step(model, step);
        const std::string state = "step " + std::to_string(step);
        const bool fails = step == first_failure || step == first_failure + 1;
        if (fails && rank == 1)
          faults_->add({.operation = aio::Operation::write,
                        .path_contains = setup_.engine.mirror.directory,
                        .count = 1,
                        .code = ENOSPC});
        const Completion saved = model.engine().save("", bytes_of(state), {.mirror = true});
        if (fails)
          EXPECT_THROW(saved.wait(), Error);
        else
          EXPECT_NO_THROW(saved.wait());
        const auto whole = model.engine().mirror().step;
        EXPECT_EQ(whole, !fails ? std::optional(step) : first_failure == 1 ? std::nullopt : std::optional(2ul));
      }
      EXPECT_EQ(state_digests(model), states.at(6));
    });
    expect_restored(2, 6, states);
  }
}

// Copies take longer than ranks wait for each other, on one rank: one that fails early on the other, one that ends
// early on the other, and one whose flush is slow.
TEST(Mirror, ACopyMayTakeLongerThanRanksWaitForEachOther) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.runtime.comm_timeout = std::chrono::seconds(4);
  setup.engine.mirror = {.directory = directory / "mirror", .every = 0};
  const auto faults = std::make_shared<Faults>(1);
  const auto copies_take_long = [&](int rank, const Runtime::MakeCommunicator& join) {
    ToySetup mine = setup;
    mine.engine.mirror.bytes_per_second = rank == 0 ? 80 * kKiB : 0;
    if (rank == 1) mine.runtime.make_aio_backend = [&](const auto& io) { return make_faulty_backend(io, faults); };
    Runtime runtime(mine.runtime, join);
    ToyModel model(runtime, mine.engine);
    model.initialize();
    model.train(1, 1);
    if (rank == 1)
      faults->add({.operation = aio::Operation::write, .path_contains = mine.engine.mirror.directory, .code = ENOSPC});
    EXPECT_THROW(model.engine().save("", {}, {.mirror = true}).wait(), Error);
    const TimePoint begun = Clock::now();
    EXPECT_NO_THROW(model.engine().save("", {}, {.mirror = true}).wait());
    EXPECT_GT(Clock::now() - begun, setup.runtime.comm_timeout) << "the copy was too short to tell";
    EXPECT_EQ(model.engine().mirror().step, 1u);
    model.train(2, 2);
    if (rank == 1)
      faults->add({.kind = Fault::Kind::delay,
                   .operation = aio::Operation::sync,
                   .path_contains = mine.engine.mirror.directory + "/rank-00001.data",
                   .delay = setup.runtime.comm_timeout * 2});
    EXPECT_NO_THROW(model.engine().save("", {}, {.mirror = true}).wait());
    EXPECT_EQ(model.engine().mirror().step, 2u);
    EXPECT_TRUE(rank == 0 || faults->hits(Fault::Kind::delay) == 1);
  };
  on_ranks(2, copies_take_long);
}

// A rank whose copy cannot even begin tells the others where their copies end. No step waits for that.
TEST_P(MirrorTest, ACopyThatCannotBeginHoldsNoStepUp) {
  setup_.engine.mirror.bytes_per_second = 300 * kKiB;  // two seconds and more
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 0;
  on_engines(2, [&](int rank, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    if (rank == 0) faults_->add({.operation = aio::Operation::read, .path_contains = "store/rank-00000.manifest"});
    const Completion saved = model.engine().save("", bytes_of("step 1"), {.mirror = true});
    take_step(model, 2);
    model.engine().settle();
    EXPECT_FALSE(saved.done()) << "the step has waited for the other rank's copy";
    EXPECT_THROW(saved.wait(), Error);
    model.engine().save("", bytes_of("step 2"), {.mirror = true}).wait();
  });
  EXPECT_EQ(StoredModel(setup_.engine.mirror.directory).step(), 2u);
}

// Counts the names that are removed below a path. Each such call would hang if its drive did not answer.
class RemovedNames final : public SystemCallObserver {
 public:
  explicit RemovedNames(std::string path) : path_(std::move(path)), before_(observe_system_calls(this)) {}
  ~RemovedNames() override { observe_system_calls(before_); }
  bool before(const SystemCall& call) override {
    if (call.kind == SystemCall::Kind::remove && call.path.starts_with(path_)) ++count_;
    return true;
  }
  void start_over() { count_ = 0; }
  int count() const { return count_; }

 private:
  const std::string path_;
  SystemCallObserver* const before_;
  std::atomic<int> count_{0};
};

// A process whose drive hung frees no memory that drives were given. Here the transfers never began, and the tests that
// follow would leave gigabytes.
struct FreedAfterwards {
  const unsigned before = aio::drives_given_up();
  ~FreedAfterwards() { aio::detail::given_up = before; }
};

// The mirror's drive hangs on one rank. No rank tries again while this process lives, and each says why at once. The
// end of the rank makes no call that the drive would have to answer.
TEST_P(MirrorTest, ADriveThatStopsAnsweringIsGivenUp) {
  const FreedAfterwards freed_afterwards;
  setup_.runtime.aio_answer_timeout = std::chrono::seconds(3);
  setup_.engine.mirror.every = 1;
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 1;
  const LogCapture log;
  RemovedNames removed(setup_.engine.mirror.directory + "/rank-00001");
  on_engines(2, [&](int rank, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    model.engine().save("", bytes_of("step 1"), {.mirror = true}).wait();
    if (rank == 1) {
      removed.start_over();
      faults_->add({.kind = Fault::Kind::delay,
                    .path_contains = setup_.engine.mirror.directory,
                    .count = Faults::kForever,
                    .delay = std::chrono::hours(9)});
    }
    for (std::uint64_t step = 2; step <= 4; ++step) {
      take_step(model, step);
      const Completion saved = model.engine().save("", bytes_of("a step"), {.mirror = true});
      try {
        saved.wait();
        ADD_FAILURE() << "step " << step << " was copied";
      } catch (const Error& error) {
        if (step > 2) {
          EXPECT_THAT(error.what(), HasSubstr("until the program is started again"));
        }
      }
    }
    EXPECT_EQ(model.engine().mirror().step, 1u);
  });
  EXPECT_EQ(removed.count(), 0);
  EXPECT_EQ(log.count("the drive of " + setup_.engine.mirror.directory + "/rank-00001."), 1);
  setup_.engine.mirror = {};  // as long as this process lives, it has the lock of the mirror's file
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 4u); });
}

TEST_P(MirrorTest, AFailedEngineGivesItsCopyUp) {
  setup_.engine.mirror.bytes_per_second = 10 * kKiB;  // a minute and more
  const TimePoint begin = Clock::now();
  on_engines(2, [&](int, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    const Completion saved = model.engine().save("", bytes_of("step 1"), {.mirror = true});
    take_step(model, 2);
    model.engine().abandon("its program ends");
    model.close();
    EXPECT_THROW(saved.wait(), Error);
  });
  EXPECT_LT(to_seconds(Clock::now() - begin), 30);
  EXPECT_TRUE(StoreSummary(look_at_store(setup_.engine.mirror.directory)).commits.empty());
}

// The copy that finds the mirror's files gone fails; the next copy makes them anew.
TEST_P(MirrorTest, ItsFilesMayDisappearAndAreMadeAnew) {
  on_engines(1, [&](int, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    model.engine().save("", bytes_of("step 1"), {.mirror = true}).wait();
    fs::remove_all(setup_.engine.mirror.directory);
    take_step(model, 2);
    EXPECT_THROW(model.engine().save("", bytes_of("step 2"), {.mirror = true}).wait(), Error);
    take_step(model, 3);
    model.engine().save("", bytes_of("step 3"), {.mirror = true}).wait();
  });
  EXPECT_EQ(StoredModel(setup_.engine.mirror.directory).step(), 3u);
}

TEST_P(MirrorTest, ARestartGoesOnWithItAndWhatHasNotChangedIsNotCopiedAgain) {
  train_and_mirror(2, 2);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().mirror, "");
    EXPECT_EQ(model.engine().mirror().step, 2u);
    take_step(model, 3);
    model.engine().save("", bytes_of("step 3"), {.mirror = true}).wait();
    const std::uint64_t all = model.engine().mirror().copied_bytes;
    take_step(model, 4);
    model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
    const std::uint64_t second = model.engine().mirror().copied_bytes - all;
    if (on_nvme()) {  // a save of state in memory writes all of it
      EXPECT_LT(second, all) << "the frozen parameters were copied again";
    }
    EXPECT_GT(second, all / 2);
  });
  const auto stores = stores_in(setup_.engine.mirror.directory);
  ASSERT_EQ(stores.size(), 1u);
  EXPECT_EQ(stores[0].name, "");
}

// After going back a step, the mirror's commits no longer belong to the run. The first whole copy replaces them.
TEST_P(MirrorTest, AStepBackMakesItAnew) {
  setup_.engine.keep_steps = 1;
  const auto& states = undisturbed(4);
  on_engines(1, [&](int, ToyModel& model) {
    model.initialize();
    for (std::uint64_t step = 1; step <= 4; ++step) {
      take_step(model, step);
      if (step == 2) model.engine().save("two", bytes_of("two")).wait();
    }
    model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
  });
  on_engines(1, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore({.from = "two"}).step, 2u);
    EXPECT_EQ(StoredModel(setup_.engine.mirror.directory).step(), 4u);
  });
  on_engines(1, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 2u) << "the start before has gone back";
    EXPECT_EQ(stores_in(setup_.engine.mirror.directory).size(), 2u) << "the start before left one";
    take_step(model, 3);
    model.engine().save("", bytes_of("step 3"), {.mirror = true}).wait();
  });
  expect_restored(1, 3, states);
}

// A drive is missing at a restart, the run goes on from the mirror, and then the drive is back with its older state.
TEST_P(MirrorTest, AStoreThatTheRunHasLeftBehindIsRefused) {
  const auto& states = undisturbed(4);
  train_and_mirror(2, 2);
  const std::string store = setup_.engine.store_directory, away = store + "-away";
  fs::rename(store, away);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 2u);
    for (const std::uint64_t step : {3u, 4u}) take_step(model, step);
    model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
  });
  fs::remove_all(store);
  fs::rename(away, store);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_THAT([&] { model.restore(); },
                testing::ThrowsMessage<StoreError>(
                    testing::AllOf(HasSubstr("ends with step 2"), HasSubstr("has step 4"), HasSubstr(store))));
  });
  expect_restored(2, 4, states);
}

TEST_P(MirrorTest, NeitherAFreshRunNorAnotherModelTakesItsPlace) {
  train_and_mirror(1, 2);
  fs::remove_all(setup_.engine.store_directory);
  on_engines(1, [&](int, ToyModel& model) {
    EXPECT_THAT([&] { model.initialize(); },
                testing::ThrowsMessage<StoreError>(
                    testing::AllOf(HasSubstr("holds step 2"), HasSubstr(setup_.engine.mirror.directory))));
    EXPECT_FALSE(fs::exists(setup_.engine.store_directory));
  });
  ToyShape other;
  other.norm += 1;
  ToyModel model(setup_, other);
  EXPECT_THROW(model.restore(), StoreError);
  EXPECT_EQ(StoredModel(setup_.engine.mirror.directory).step(), 2u);
}

// Runs that ended before their first copy: each start removes what the one before left.
TEST_P(MirrorTest, StoresThatNoCopyReachedAreRemoved) {
  for (const int ranks : {1, 2, 2}) {
    on_engines(ranks, [](int, ToyModel& model) { model.initialize(); });
    fs::remove_all(setup_.engine.store_directory);
    EXPECT_EQ(stores_in(setup_.engine.mirror.directory).size(), 1u);
  }
  train_and_mirror(1, 2);
  EXPECT_EQ(stores_in(setup_.engine.mirror.directory).size(), 1u);
  EXPECT_EQ(StoredModel(setup_.engine.mirror.directory).step(), 2u);
}

// Two trainings of one model, and a mirror that is configured where the other one's is, or the other one itself.
TEST_P(MirrorTest, AnotherTrainingIsNotReplaced) {
  train_and_mirror(1, 4);
  const std::string its_store = setup_.engine.store_directory, its_mirror = setup_.engine.mirror.directory;
  setup_.engine.store_directory = directory_ / "second";
  setup_.engine.mirror = {};
  on_engines(1, [&](int, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    model.engine().save("", bytes_of("step 1")).wait();
  });
  for (const std::string& place : {its_store, its_mirror}) {
    setup_.engine.mirror.directory = place;
    on_engines(1, [&](int, ToyModel& model) {
      EXPECT_THAT([&] { model.restore(); },
                  testing::ThrowsMessage<StoreError>(HasSubstr("of another training than the store")));
    });
    EXPECT_EQ(StoredModel(place).step(), 4u);
  }
  setup_.engine.mirror = {};
  on_engines(1, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 1u); });
}

// A run's own store becomes the mirror of the store on its new drive. Copies never replace named checkpoints.
TEST_P(MirrorTest, NamedCheckpointsOfAStoreThatBecomesAMirrorStay) {
  setup_.engine.mirror = {};
  setup_.engine.keep_steps = 1;
  on_engines(1, [](int, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    model.engine().save("kept", bytes_of("step 1")).wait();
  });
  const std::string first = setup_.engine.store_directory;
  setup_.engine.store_directory = directory_ / "new-drive";
  setup_.engine.mirror.directory = first;
  on_engines(1, [](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 1u);
    take_step(model, 2);
    model.engine().save("", bytes_of("step 2"), {.mirror = true}).wait();
  });
  EXPECT_EQ(StoredModel(first).step(), 2u);
  setup_.engine.store_directory = first;
  setup_.engine.mirror = {};
  on_engines(1, [](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "kept"}).step, 1u); });
}

// A store has as many places as it was made for. One of them becomes the mirror's.
TEST_P(MirrorTest, ANewMirrorTakesNoNamedCheckpointsPlace) {
  const auto mirror = std::exchange(setup_.engine.mirror, {});
  setup_.engine.keep_steps = 1;
  on_engines(1, [](int, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    model.engine().save("kept", bytes_of("step 1")).wait();
  });
  setup_.engine.keep_steps = 0;
  setup_.engine.mirror = mirror;
  on_engines(1, [](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 1u);
    take_step(model, 2);
    model.engine().save("", bytes_of("step 2"), {.mirror = true}).wait();
    const auto kept = model.find_checkpoints();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].name, "kept");
  });
}

// The ledger counts reads for a copy apart from those of steps. Predictions include the pinned memory that copies use.
TEST_P(MirrorTest, ItsBytesAreBookedApart) {
  const auto links_of = [&](bool mirrored) {
    ToySetup setup = setup_;
    setup.engine.store_directory = directory_ / (mirrored ? "with" : "without");
    if (!mirrored) setup.engine.mirror = {};
    ToyProgram training(setup);
    for (std::uint64_t step = 1; step <= 3; ++step) take_step(training, step);
    training.engine().save("", bytes_of("step 3"), {.mirror = mirrored}).wait();
    training.engine().settle();
    const Ledger& ledger = training.runtime().ledger();
    const std::uint64_t pinned = training.runtime().pinned_budget().held_bytes();
    EXPECT_EQ(pinned, predict(setup.runtime, setup.engine, training.model(), 1).pinned.bytes);
    return std::array{ledger.totals(Link::nvme_read).bytes, ledger.totals(Link::nvme_write).bytes,
                      ledger.totals(Link::nvme_read, Ledger::Account::outside_steps).bytes};
  };
  const auto with = links_of(true), without = links_of(false);
  EXPECT_EQ(with[0], without[0]);
  EXPECT_EQ(with[1], without[1]);
  EXPECT_GT(with[2], without[2]);
}

// Neither what a copy that fails half-way has read, nor the tables of one that fails earlier, count as a step's.
TEST_P(MirrorTest, BytesOfCopiesThatFailAreBookedApart) {
  const auto read_by_steps = [&](bool mirrored) {
    ToySetup setup = setup_;
    setup.engine.store_directory = directory_ / (mirrored ? "with" : "without");
    if (!mirrored) setup.engine.mirror = {};
    const auto faults = std::make_shared<Faults>(1);
    setup.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& io) { return make_faulty_backend(io, faults); };
    ToyProgram training(setup);
    for (const std::uint64_t step : {1u, 2u}) {
      take_step(training, step);
      training.engine().settle();
      // The first data of a copy; then the manifest of the store that is made anew for the next one.
      faults->add({.operation = aio::Operation::write, .path_contains = setup_.engine.mirror.directory});
      const Completion saved = training.engine().save("", bytes_of("a step"), {.mirror = mirrored});
      if (mirrored)
        EXPECT_THROW(saved.wait(), Error);
      else
        saved.wait();
    }
    take_step(training, 3);
    training.engine().settle();
    return training.runtime().ledger().totals(Link::nvme_read).bytes;
  };
  EXPECT_EQ(read_by_steps(true), read_by_steps(false));
}

INSTANTIATE_TEST_SUITE_P(, MirrorTest,
                         testing::Values(Cell{"nvme", Placement::nvme, Placement::nvme, UpdateMode::forward},
                                         Cell{"nvme_states", Placement::pinned, Placement::nvme, UpdateMode::backward},
                                         Cell{"memory", Placement::pinned, Placement::pinned}),
                         [](const auto& cell) { return cell.param.name; });

TEST(MirrorOptions, AreChecked) {
  const TempDirectory directory;
  const auto refused = [&](const std::function<void(EngineOptions&)>& change) {
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.engine.mirror.directory = directory / "mirror";
    change(setup.engine);
    ToyModel model(setup);
    return message_of<ConfigError>([&] { model.initialize(); });
  };
  EXPECT_EQ(refused([](EngineOptions&) {}), "no error");
  EXPECT_THAT(refused([](EngineOptions& o) { o.durability = tiers::Durability::none; }), HasSubstr("hoist.mirror"));
  EXPECT_THAT(refused([](EngineOptions& o) { o.mirror.directory = o.store_directory; }), HasSubstr("another"));
  EXPECT_THAT(refused([](EngineOptions& o) { o.mirror.directory = o.store_directory + "/../store/"; }),
              HasSubstr("where the store itself is"));
  fs::create_directory(directory / "drive");
  fs::create_symlink(directory / "drive", directory / "link");
  EXPECT_THAT(refused([&](EngineOptions& o) {
                o.store_directory = directory / "drive/store";
                o.mirror.directory = directory / "link/store";
              }),
              HasSubstr("where the store itself is"));
  EXPECT_THAT(refused([](EngineOptions& o) { o.keep_steps = 64; }), HasSubstr("63"));
  EXPECT_THAT(refused([](EngineOptions& o) {
                o.parameters = o.optimizer = Placement::pinned;
                o.store_directory.clear();
              }),
              HasSubstr("no store"));
  ToyProgram without(toy_setup(Placement::pinned, Placement::pinned, directory / "other"));
  EXPECT_THROW(without.engine().save("", {}, {.mirror = true}), UsageError);
}

}  // namespace
}  // namespace hoist::test::mirror_test
