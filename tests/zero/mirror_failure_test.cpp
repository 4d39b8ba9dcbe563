// SPDX-License-Identifier: Apache-2.0
// Copies to a mirror that fail, hang or cannot begin: training goes on, and the copy before stays whole until another
// is.
#include <atomic>
#include <filesystem>
#include <memory>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <hoist/aio/given_up.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/log_capture.hpp>
#include <hoist/tests/support/system_calls.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

#include "mirror_run.hpp"

namespace hoist::test::mirror_failure_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class MirrorFailureTest : public MirrorRun {};

// Errors of a copy: each reaches every rank, the training goes on, and the next copy is whole.
TEST_P(MirrorFailureTest, ACopyThatFailsOnOneRankFailsOnAllAndTheNextOneIsWhole) {
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
TEST(MirrorTimeOut, ACopyMayTakeLongerThanRanksWaitForEachOther) {
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

// Ranks that wait 6 s for each other, with a mirror whose drives have faults.
ToySetup mirror_with(const std::shared_ptr<Faults>& faults, const TempDirectory& directory) {
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.runtime.comm_timeout = std::chrono::seconds(6);
  setup.engine.mirror = {.directory = directory / "mirror", .every = 0};
  setup.runtime.make_aio_backend = [faults](const auto& io) { return make_faulty_backend(io, faults); };
  return setup;
}

// In rank 1's mirror: the next write takes longer than ranks wait for each other.
void hang(Faults& faults, const ToySetup& setup) {
  faults.add({.kind = Fault::Kind::delay,
              .operation = aio::Operation::write,
              .path_contains = setup.engine.mirror.directory + "/rank-00001.data",
              .delay = setup.runtime.comm_timeout + std::chrono::seconds(3)});
}

// In rank 0's mirror: the next write fails.
void fail(Faults& faults, const ToySetup& setup) {
  faults.add({.operation = aio::Operation::write,
              .path_contains = setup.engine.mirror.directory + "/rank-00000.data",
              .code = ENOSPC});
}

// The mirror's drive of one rank does not answer for longer than ranks wait for each other, and then does. Meanwhile
// the other rank's copy is at its end, or has failed.
TEST(MirrorTimeOut, ItsDriveMayHangForLongerThanRanksWaitForEachOther) {
  const TempDirectory directory;
  const auto faults = std::make_shared<Faults>(1);
  const ToySetup setup = mirror_with(faults, directory);
  on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
    Runtime runtime(setup.runtime, join);
    ToyModel model(runtime, setup.engine);
    model.initialize();
    for (const bool fails : {false, true}) {
      model.train(1, 1);
      if (rank == 1) hang(*faults, setup);
      if (rank == 0 && fails) fail(*faults, setup);
      const TimePoint begun = Clock::now();
      const Completion copied = model.engine().save("", {}, {.mirror = true});
      if (fails) {
        EXPECT_THAT([&] { copied.wait(); }, testing::ThrowsMessage<Error>(HasSubstr("No space left on device")));
      } else {
        EXPECT_NO_THROW(copied.wait());
      }
      EXPECT_TRUE((rank == 0 && fails) || Clock::now() - begun > setup.runtime.comm_timeout) << "too short to tell";
    }
    model.train(1, 1);
    EXPECT_NO_THROW(model.engine().save("", {}, {.mirror = true}).wait());
    EXPECT_EQ(model.engine().mirror().step, 3u);
  });
  EXPECT_EQ(faults->hits(Fault::Kind::delay), 2u);
}

// One rank's copy fails while the drive of another, which copies slowly, does not answer: no rank goes on before that
// drive is out of the way, and so none has to wait for it later, where ranks wait for each other.
TEST(MirrorTimeOut, ACopyThatFailsBesideADriveThatHangsEndsTogether) {
  const TempDirectory directory;
  const auto faults = std::make_shared<Faults>(1);
  const ToySetup setup = mirror_with(faults, directory);
  on_ranks(2, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToySetup mine = setup;
    if (rank == 1) mine.engine.mirror.bytes_per_second = 20 * kKiB;
    Runtime runtime(mine.runtime, join);
    ToyModel model(runtime, mine.engine);
    model.initialize();
    model.train(1, 1);
    rank == 1 ? hang(*faults, setup) : fail(*faults, setup);
    const Completion copied = model.engine().save("", {}, {.mirror = true});
    EXPECT_THAT([&] { copied.wait(); }, testing::ThrowsMessage<Error>(HasSubstr("No space left on device")));
    EXPECT_NO_THROW(model.train(2, 2));
  });
  EXPECT_EQ(faults->hits(Fault::Kind::delay), 1u);
}

// A rank whose copy cannot even begin tells the others where their copies end. No step waits for that.
TEST_P(MirrorFailureTest, ACopyThatCannotBeginHoldsNoStepUp) {
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
TEST_P(MirrorFailureTest, ADriveThatStopsAnsweringIsGivenUp) {
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

TEST_P(MirrorFailureTest, AFailedEngineGivesItsCopyUp) {
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
TEST_P(MirrorFailureTest, ItsFilesMayDisappearAndAreMadeAnew) {
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

tiers::CommitHeader newest_in(const std::string& directory, int rank) {
  const auto found = tiers::Store::look(directory, rank);
  EXPECT_FALSE(found.commits.empty()) << directory;
  return found.commits.empty() ? tiers::CommitHeader() : found.commits.front();
}

dev_t file_system_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
  return status.st_dev;
}

// Mirrors are behind links to other file systems, as if these were mounted there. A drive fails, and is not mounted for
// a while: nothing is copied to the file system below. The copy that all ranks had stays, and with the drive back the
// next one is whole.
TEST_P(MirrorFailureTest, NothingIsCopiedToTheFileSystemBelowADriveThatIsNotMounted) {
  const TempDirectory drives(scratch_in_memory());
  own_mirrors_ = true;
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 1;
  const std::string mounted = drive_of_mirror(1), aside = directory_ / "aside";
  for (const int rank : {0, 1}) {
    const std::string drive = drives / std::to_string(rank);
    fs::create_directory(drive);
    fs::create_directory_symlink(drive, drive_of_mirror(rank));
    if (file_system_of(drive) == file_system_of(directory_.path()))
      GTEST_SKIP() << drives.path() << " is on the file system of the tests";
  }
  const LogCapture log;
  on_engines(2, [&](int rank, ToyModel& model) {
    model.initialize();
    for (std::uint64_t step = 1; step <= 6; ++step) {
      take_step(model, step);
      if (rank == 1 && step == 2)
        faults_->add({.operation = aio::Operation::write, .path_contains = mounted, .count = 1, .code = EIO});
      if (rank == 1 && step == 3) fs::rename(mounted, aside);
      if (rank == 1 && step == 5) fs::rename(aside, mounted);
      const Completion copied = model.engine().save("", bytes_of("step " + std::to_string(step)), {.mirror = true});
      if (step == 1 || step >= 5) {
        EXPECT_NO_THROW(copied.wait());
      } else if (step == 2) {
        EXPECT_THROW(copied.wait(), Error);
      } else {
        EXPECT_THAT([&] { copied.wait(); }, testing::ThrowsMessage<Error>(HasSubstr("is not mounted at " + mounted)));
      }
      EXPECT_EQ(model.engine().mirror().step, step >= 5 ? step : 1);
    }
  });
  EXPECT_EQ(log.count("has lost its copy"), 0);
  for (const int rank : {0, 1}) EXPECT_EQ(newest_in(of_rank(rank).engine.mirror.directory, rank).step, 6u);
}

// One rank's part of the newest copy is lost: its files are gone, or older ones are in their place. That is said once,
// and the next copy is whole on all ranks.
TEST_P(MirrorFailureTest, ARankThatHasLostItsPartCopiesAllOfItAnew) {
  own_mirrors_ = true;
  const auto& states = undisturbed(8);
  const std::string lossy = drive_of_mirror(1), older = directory_ / "older";
  for (const bool older_is_back : {false, true}) {
    SCOPED_TRACE(older_is_back ? "older files" : "no files");
    const LogCapture log;
    on_engines(2, [&](int rank, ToyModel& model) {
      model.initialize();
      for (std::uint64_t step = 1; step <= 8; ++step) {
        take_step(model, step);
        if (rank == 1 && step == 4) {
          fs::remove_all(lossy);
          if (older_is_back) fs::rename(older, lossy);
        }
        const auto copy = [&] {
          model.engine().save("", bytes_of("step " + std::to_string(step)), {.mirror = true}).wait();
        };
        if (step == 4) {
          EXPECT_THROW(copy(), Error);
        } else {
          EXPECT_NO_THROW(copy());
        }
        if (rank == 1 && step == 2) fs::copy(lossy, older, fs::copy_options::recursive);
        EXPECT_EQ(model.engine().mirror().step, step == 4 ? 3 : step);
      }
    });
    EXPECT_EQ(log.count("has lost its copy of step 3"), 1);
    std::vector<tiers::CommitHeader> newest;
    for (const int rank : {0, 1}) newest.push_back(newest_in(of_rank(rank).engine.mirror.directory, rank));
    EXPECT_EQ(newest[0].step, 8u);
    EXPECT_EQ(newest[0].revision, newest[1].revision);
    fs::remove_all(setup_.engine.store_directory);
    on_engines(2, [&](int, ToyModel& model) {
      EXPECT_EQ(model.restore().step, 8u);
      EXPECT_EQ(state_digests(model), states.at(8));
    });
    for (const auto& entry : fs::directory_iterator(directory_ / "")) fs::remove_all(entry);
  }
}

// One of the two files of a rank is gone. The other is worth nothing without it, and is this engine's own.
TEST_P(MirrorFailureTest, ARankThatHasLostOneOfItsFilesMakesBothAnew) {
  for (const char* const gone : {"data", "manifest"}) {
    SCOPED_TRACE(gone);
    const LogCapture log;
    on_engines(2, [&](int rank, ToyModel& model) {
      model.initialize();
      for (std::uint64_t step = 1; step <= 4; ++step) {
        take_step(model, step);
        if (rank == 1 && step == 3) fs::remove(setup_.engine.mirror.directory + "/rank-00001." + gone);
        const Completion copied = model.engine().save("", bytes_of("step " + std::to_string(step)), {.mirror = true});
        if (step == 3) {
          EXPECT_THROW(copied.wait(), Error);
        } else {
          EXPECT_NO_THROW(copied.wait());
        }
      }
    });
    EXPECT_EQ(log.count("has lost its copy of step 2"), 1);
    expect_restored(2, 4, undisturbed(4));
  }
}

// The copy is lost on one rank, and the same step is to be copied again: all ranks make the same revision of it.
TEST_P(MirrorFailureTest, ACopyThatOneRankLostIsMadeAgainOfTheSameStep) {
  own_mirrors_ = true;
  on_engines(2, [&](int rank, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    const auto copy = [&](const char* state) { model.engine().save("", bytes_of(state), {.mirror = true}).wait(); };
    copy("step 1");
    if (rank == 1) fs::remove_all(drive_of_mirror(1));
    EXPECT_THROW(copy("step 1"), Error);
    EXPECT_NO_THROW(copy("step 1"));
    EXPECT_EQ(model.engine().mirror().step, 1u);
  });
  fs::remove_all(setup_.engine.store_directory);
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 1u); });
}

// The first copy is whole on one rank and fails on the other. The run may be at its last step.
TEST_P(MirrorFailureTest, AFirstCopyThatFailedOnOneRankIsMadeAgainOfTheSameStep) {
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 1;
  on_engines(2, [&](int rank, ToyModel& model) {
    model.initialize();
    take_step(model, 1);
    const auto copy = [&] { model.engine().save("", bytes_of("step 1"), {.mirror = true}).wait(); };
    if (rank == 1)
      faults_->add({.operation = aio::Operation::sync,
                    .path_contains = setup_.engine.mirror.directory + "/rank-00001.data",
                    .code = EIO});
    EXPECT_THROW(copy(), Error);
    for (int again = 0; again < 2; ++again) EXPECT_NO_THROW(copy());
    EXPECT_EQ(model.engine().mirror().step, 1u);
  });
  expect_restored(2, 1, undisturbed(1));
}

// A loss is known on all ranks once all have opened their stores again, though the copy then fails for another reason.
TEST_P(MirrorFailureTest, ACopyThatIsKnownToBeLostIsNotReported) {
  own_mirrors_ = true;
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 0;
  on_engines(2, [&](int rank, ToyModel& model) {
    model.initialize();
    for (std::uint64_t step = 1; step <= 5; ++step) {
      take_step(model, step);
      if (rank == 1 && step == 3) fs::remove_all(drive_of_mirror(1));
      if (rank == 0 && step == 4)
        faults_->add({.operation = aio::Operation::write,
                      .path_contains = drive_of_mirror(0) + "/copies/rank-00000.data",
                      .code = EIO});
      const Completion copied = model.engine().save("", bytes_of("a step"), {.mirror = true});
      if (step == 3 || step == 4) {
        EXPECT_THROW(copied.wait(), Error);
      } else {
        EXPECT_NO_THROW(copied.wait());
      }
      const auto known = model.engine().mirror().step;
      EXPECT_EQ(known, step == 3 ? std::optional(2ul) : step == 4 ? std::nullopt : std::optional(step));
    }
  });
}

// While one rank's mirror cannot be opened, no rank copies anything.
TEST_P(MirrorFailureTest, NobodyCopiesBeforeAllHaveOpenedTheirStores) {
  own_mirrors_ = true;
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 1;
  on_engines(2, [&](int rank, ToyModel& model) {
    model.initialize();
    const auto copy = [&] { model.engine().save("", bytes_of("a step"), {.mirror = true}).wait(); };
    take_step(model, 1);
    EXPECT_NO_THROW(copy());
    if (rank == 1)
      faults_->add({.operation = aio::Operation::write, .path_contains = drive_of_mirror(1), .count = 1, .code = EIO});
    take_step(model, 2);
    EXPECT_THROW(copy(), Error);
    if (rank == 1)
      faults_->add({.operation = aio::Operation::read, .path_contains = drive_of_mirror(1), .count = 1, .code = EIO});
    const std::uint64_t before = model.engine().mirror().copied_bytes;
    EXPECT_THROW(copy(), Error);
    EXPECT_EQ(model.engine().mirror().copied_bytes, before);
    EXPECT_NO_THROW(copy());
  });
}

// A drive that has no space for a second store beside the copy that the run goes on from. Copies begin when it has.
TEST_P(MirrorFailureTest, WithoutSpaceBesideTheOldCopyTheRunGoesOnAndCopiesLater) {
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 1;
  train_and_mirror(2, 2);
  fs::remove_all(setup_.engine.store_directory);
  const Fault no_space{.operation = aio::Operation::write,
                       .path_contains = setup_.engine.mirror.directory + "/reshard-0001-ranks-2",
                       .count = 1,
                       .code = ENOSPC};
  const LogCapture log;
  faults_->add(no_space);
  on_engines(2, [&](int rank, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 2u);
    for (const std::uint64_t step : {3u, 4u}) {
      take_step(model, step);
      if (rank == 1 && step == 3) faults_->add(no_space);
      const Completion copied = model.engine().save("", bytes_of("a step"), {.mirror = true});
      if (step == 3) {
        EXPECT_THAT([&] { copied.wait(); }, testing::ThrowsMessage<Error>(HasSubstr("No space left on device")));
        EXPECT_EQ(StoredModel(setup_.engine.mirror.directory).step(), 2u);
        EXPECT_FALSE(fs::exists(setup_.engine.mirror.directory + "/reshard-0001-ranks-2/rank-00000.data"))
            << "a rank keeps the space that another one lacks";
      } else {
        EXPECT_NO_THROW(copied.wait());
      }
    }
  });
  EXPECT_EQ(log.count("has no space for new copies beside older ones"), 1);
  EXPECT_EQ(stores_in(setup_.engine.mirror.directory).size(), 1u);
  expect_restored(2, 4, undisturbed(4));
}

// One rank's drive was replaced by an empty one between two starts. The other rank's part of the copy leaves no space
// for a second store, and stays until there is: the drive may come back.
TEST_P(MirrorFailureTest, APartThatAnotherRankHasLostStaysUntilAnotherCopyIsWhole) {
  own_mirrors_ = true;
  faults_ = std::make_shared<Faults>(1);
  rank_of_faults_ = 0;
  const std::string older = of_rank(0).engine.mirror.directory;
  train_and_mirror(2, 2);
  fs::remove_all(drive_of_mirror(1));
  faults_->add({.operation = aio::Operation::write,
                .path_contains = older + "/reshard-",
                .count = Faults::kForever,
                .code = ENOSPC});
  on_engines(2, [&](int rank, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 2u);
    for (const std::uint64_t step : {3u, 4u}) {
      take_step(model, step);
      if (rank == 0 && step == 4) faults_->clear();
      const Completion copied = model.engine().save("", bytes_of("a step"), {.mirror = true});
      if (step == 3) {
        EXPECT_THROW(copied.wait(), Error);
        EXPECT_EQ(newest_in(older, 0).step, 2u);
      } else {
        EXPECT_NO_THROW(copied.wait());
        EXPECT_EQ(model.engine().mirror().step, step);
      }
    }
  });
  for (const int rank : {0, 1}) {
    const std::string mirror = of_rank(rank).engine.mirror.directory;
    const auto stores = stores_in(mirror);
    ASSERT_EQ(stores.size(), 1u);
    EXPECT_EQ(newest_in(stores[0].in(mirror), rank).step, 4u);
  }
  fs::remove_all(setup_.engine.store_directory);
  on_engines(2, [&](int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 4u);
    EXPECT_EQ(state_digests(model), undisturbed(4).at(4));
  });
}

// Where the mirror should have a copy at a start and has none, its drive may be missing.
TEST_P(MirrorFailureTest, AStartThatFindsNoCopyWarns) {
  const LogCapture log;
  train_and_mirror(2, 2);
  EXPECT_EQ(log.count("holds no copy that every rank has"), 0);
  for (const bool lost : {false, true}) {
    if (lost) fs::remove_all(setup_.engine.mirror.directory);
    on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore().step, 2u); });
    EXPECT_EQ(log.count("holds no copy that every rank has"), lost ? 2 : 0);
  }
}

INSTANTIATE_TEST_SUITE_P(, MirrorFailureTest, kMirrorCells, [](const auto& cell) { return cell.param.name; });

}  // namespace
}  // namespace hoist::test::mirror_failure_test
