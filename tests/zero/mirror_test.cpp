// SPDX-License-Identifier: Apache-2.0
// Commits are copied to a mirror while training goes on: no step waits for it, at any moment it holds one whole commit,
// and its bytes are counted apart.
#include <cerrno>
#include <filesystem>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/log_capture.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "mirror_run.hpp"

namespace hoist::test::mirror_test {
namespace {

using testing::HasSubstr;

class MirrorTest : public MirrorRun {};

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

// A run that is preempted often is copied as often as one that is not.
TEST_P(MirrorTest, SessionsMayBeShorterThanItIsFromCopyToCopy) {
  setup_.engine.mirror.every = 4;
  std::uint64_t step = 0;
  for (const std::uint64_t last_copy : {0u, 4u, 8u, 12u, 12u}) {
    on_engines(1, [&](int, ToyModel& model) {
      step == 0 ? void(model.initialize()) : void(model.restore());
      for (const std::uint64_t end = step + 3; step < end;) {
        take_step(model, ++step);
        if (!on_nvme()) model.engine().save("", bytes_of("a step")).wait();
      }
    });
    const auto commits = look_at_store(setup_.engine.mirror.directory).commits;
    EXPECT_EQ(commits.empty() ? 0 : commits.front().step, last_copy) << "after step " << step;
  }
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

// A run that goes back leaves newer steps in the mirror. They are replaced at once, however rarely it copies.
class MirrorThatIsAheadTest : public MirrorRun {
 protected:
  MirrorThatIsAheadTest() {
    setup_.engine.keep_steps = 1;
    on_engines(2, [&](int, ToyModel& model) {
      model.initialize();
      for (std::uint64_t step = 1; step <= 4; ++step) {
        take_step(model, step);
        if (step == 2) model.engine().save("two", bytes_of("two")).wait();
      }
      model.engine().save("", bytes_of("step 4"), {.mirror = true}).wait();
    });
  }
  void go_back_and_on_to(std::uint64_t last_step) {
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_EQ(model.restore({.from = "two"}).step, 2u);
      for (std::uint64_t step = 3; step <= last_step; ++step) take_step(model, step);
      if (!on_nvme()) model.engine().save("", bytes_of("a step")).wait();
    });
  }
};

TEST_P(MirrorThatIsAheadTest, TheFirstCommitAfterAStepBackIsCopied) {
  setup_.engine.mirror.every = 100;
  go_back_and_on_to(3);
  expect_restored(2, 3, undisturbed(4));
}

// A program that copies only what it asks for may pass the step that it has given up: that is no copy of its run.
TEST_P(MirrorThatIsAheadTest, WhatTheRunHasGivenUpIsNoCopyOfIt) {
  go_back_and_on_to(5);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 5u);
    EXPECT_EQ(model.engine().mirror().step, std::nullopt);
  });
  const LogCapture log;
  expect_restored(2, 4, undisturbed(4));
  EXPECT_EQ(log.count("the run may have gone back by a name, and have given this step up"), 1);
}

// The same if a start was killed while it made the files of the store for the copies to come anew.
TEST_P(MirrorThatIsAheadTest, WhatTheRunHasGivenUpIsKnownByOneRanksFiles) {
  go_back_and_on_to(5);
  const std::string manifest = setup_.engine.mirror.directory + "/reshard-0001-ranks-2/rank-00001.manifest";
  std::filesystem::rename(manifest, manifest + "-new");
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 5u);
    EXPECT_EQ(model.engine().mirror().step, std::nullopt);
  });
}

// Without the store for the copies to come, the next start would not know that the run has gone back.
TEST_P(MirrorThatIsAheadTest, AStepBackWithoutSpaceForAnotherStoreIsRefused) {
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 1;
  const std::string mirror = setup_.engine.mirror.directory;
  faults_->add({.operation = aio::Operation::write,
                .path_contains = mirror + "/reshard-0001-ranks-2",
                .count = 1,
                .code = ENOSPC});
  on_engines(2, [&](int rank, ToyModel& model) {
    EXPECT_THAT(
        [&] { model.restore({.from = "two"}); },
        testing::ThrowsMessage<StoreError>(testing::AllOf(
            HasSubstr("the mirror in " + mirror + " has no space"), HasSubstr("beside its copy of step 4"),
            HasSubstr("start in the same way again"), HasSubstr(rank == 1 ? "No space left" : "another rank"))));
  });
  for (const char* const file : {"/rank-00000.data", "/rank-00001.data"})
    EXPECT_FALSE(std::filesystem::exists(mirror + "/reshard-0001-ranks-2" + file));
  EXPECT_EQ(StoredModel(mirror).step(), 4u);
  go_back_and_on_to(3);
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 3u); });
}

INSTANTIATE_TEST_SUITE_P(, MirrorThatIsAheadTest, kMirrorCells, [](const auto& cell) { return cell.param.name; });

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

INSTANTIATE_TEST_SUITE_P(, MirrorTest, kMirrorCells, [](const auto& cell) { return cell.param.name; });

}  // namespace
}  // namespace hoist::test::mirror_test
