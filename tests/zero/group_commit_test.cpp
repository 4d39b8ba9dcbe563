// SPDX-License-Identifier: Apache-2.0
// Several sharding groups in one job: a step counts when it is durable in every group. If a group loses a step, fails
// to write it, or is the only one that has it, all groups resume from the same step and end in the bits of an
// undisturbed job.
#include <array>
#include <atomic>
#include <filesystem>
#include <thread>

#include <gmock/gmock.h>

#include <hoist/aio/file.hpp>
#include <hoist/core/error.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/observed_backend.hpp>
#include <hoist/tiers/store.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::group_commit_test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

constexpr std::uint64_t kLastStep = 6;
constexpr std::chrono::seconds kAtOnce{30};  // far below kTimeout, which ends a wait in vain
constexpr std::chrono::minutes kTimeout{10};
constexpr std::chrono::milliseconds kGrace{500};  // how long a test waits for an event that must not happen

// From arm() on, rank 0 of group 1 cannot write its manifest, but for the first `spared` times. The write fails once
// group 0 has come as far as `until` says, or after a while.
class Sabotage {
 public:
  enum class Until : std::uint8_t { others_manifests, others_overwrite };
  explicit Sabotage(Until until, const std::string& place = "", int spared = 0)
      : until_(until),
        manifest_(place + "rank-00000.manifest"),
        data_(place + "rank-00000.data"),
        writes_to_spare_(spared),
        syncs_to_spare_(spared) {}

  void arm() { armed_ = true; }
  bool group_0_came_so_far() const { return came_so_far_; }

  std::unique_ptr<aio::Backend> backend(int group, const aio::DriveQueueOptions& options) {
    const auto on_submit = [this, group](const aio::Block& block) {
      if (!armed_ || block.operation != aio::Operation::write) return;
      if (group == 0 && durable_ && block.file->path().ends_with(data_)) overwrites_ = true;
      if (group == 1 && block.file->path().ends_with(manifest_) && writes_to_spare_-- <= 0) fail(block);
    };
    const auto on_done = [this, group](const aio::Block& block) {
      if (armed_ && group == 0 && block.operation == aio::Operation::sync && block.file->path().ends_with(manifest_) &&
          syncs_to_spare_-- <= 0)
        durable_ = true;
    };
    return std::make_unique<ObservedBackend>(make_faulty_backend(options, group == 1 ? faults_ : nobodys_), on_submit,
                                             on_done);
  }

 private:
  void fail(const aio::Block& block) {
    const bool for_manifests = until_ == Until::others_manifests;
    const std::atomic<bool>& awaited = for_manifests ? durable_ : overwrites_;
    const TimePoint end = Clock::now() + (for_manifests ? Nanoseconds(kAtOnce) : Nanoseconds(kGrace));
    while (!awaited && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    came_so_far_ = awaited.load();
    faults_->add({.operation = aio::Operation::write, .path_contains = block.file->path(), .count = Faults::kForever});
  }

  const Until until_;
  const std::string manifest_, data_;
  std::atomic<int> writes_to_spare_, syncs_to_spare_;
  const std::shared_ptr<Faults> faults_ = std::make_shared<Faults>(1), nobodys_ = std::make_shared<Faults>(1);
  std::atomic<bool> armed_{false};
  std::atomic<bool> durable_{false};     // the manifest of group 0's rank 0
  std::atomic<bool> overwrites_{false};  // by the same rank, after that
  std::atomic<bool> came_so_far_{false};
};

struct Cell {
  const char* name;
  Placement parameters, optimizer;
  UpdateMode mode;
};

class GroupCommit : public testing::TestWithParam<Cell> {
 protected:
  using Body = std::function<void(int group, int rank, ToyModel&)>;

  ToySetup setup(int group) const {
    ToySetup toy = toy_setup(GetParam().parameters, GetParam().optimizer, store(group));
    toy.engine.update_mode = GetParam().mode;
    toy.engine.keep_steps = keep_steps_;
    toy.runtime.comm_timeout = kTimeout;
    return toy;
  }
  std::string store(int group) const { return directory_ / (job_ + "/group-" + std::to_string(group)); }
  static ToyShape shape(int group) {
    return {.seed = static_cast<std::uint64_t>(1 + group), .matrices = {3000, 5000}, .norm = 40};
  }

  void on_engines(const Body& body, Sabotage* sabotage = nullptr) const {
    on_groups(sizes_, [&](int group, int rank, const Runtime::Groups& groups) {
      ToySetup toy = setup(group);
      if (prepare_) prepare_(group, rank, toy);
      if (sabotage != nullptr)
        toy.runtime.make_aio_backend = [&, group](const aio::DriveQueueOptions& o) {
          return sabotage->backend(group, o);
        };
      ToyModel model(toy, groups, shape(group));
      body(group, rank, model);
    });
  }

  // The groups' state after so many undisturbed steps, in memory, without a store.
  std::vector<Digests> undisturbed(std::uint64_t steps) const {
    std::vector<Digests> found(sizes_.size());
    on_groups(sizes_, [&](int group, int rank, const Runtime::Groups& groups) {
      const ToySetup toy = toy_setup(Placement::pinned, Placement::pinned);
      ToyProgram model(toy, groups, shape(group));
      model.train(1, steps);
      const Digests mine = state_digests(model);
      if (rank == 0) found[static_cast<std::size_t>(group)] = mine;
    });
    return found;
  }

  // Between two calls of all ranks of the job.
  static void arm(Sabotage& sabotage, Engine& engine) {
    engine.runtime().norm_group().barrier();
    sabotage.arm();
    engine.runtime().norm_group().barrier();
  }

  // The step must fail on every rank: nowhere does it count.
  static void expect_no_commit(Engine& engine, const std::function<void()>& call, std::uint64_t last) {
    EXPECT_THAT([&] { call(); },
                testing::ThrowsMessage<Error>(AnyOf(HasSubstr("rank-00000.manifest"), HasSubstr("could not commit"))));
    EXPECT_EQ(engine.committed_step(), last);
  }

  std::optional<std::uint64_t> newest(int group, int rank) const {
    const auto commits = tiers::Store::look(store(group), rank).commits;
    return commits.empty() ? std::nullopt : std::optional(commits.front().step);
  }

  // All groups go on from `step`, and end as they should.
  void expect_to_go_on_from(std::uint64_t step, const std::string& from = "") const {
    const auto there = undisturbed(step), end = undisturbed(kLastStep);
    on_engines([&](int group, int, ToyModel& model) {
      if (from.empty()) {
        EXPECT_EQ(model.find_commit(), step);
      }
      EXPECT_EQ(model.restore({.from = from}).step, step);
      EXPECT_EQ(state_digests(model), there[static_cast<std::size_t>(group)]);
      model.train(step + 1, kLastStep);
      EXPECT_EQ(state_digests(model), end[static_cast<std::size_t>(group)]);
      EXPECT_EQ(model.engine().committed_step(), kLastStep);
    });
  }

  const TempDirectory directory_;
  std::vector<int> sizes_{2, 2};
  std::string job_ = "job";
  unsigned keep_steps_ = 0;
  std::function<void(int group, int rank, ToySetup&)> prepare_;
};

TEST_P(GroupCommit, AStepThatOneGroupLacksIsGivenUpByAll) {
  Sabotage sabotage(Sabotage::Until::others_manifests);
  on_engines(
      [&](int, int, ToyModel& model) {
        Engine& engine = model.initialize();
        model.train(1, 3);
        engine.settle();
        arm(sabotage, engine);
        model.train(4, 4);
        expect_no_commit(
            engine, [&] { engine.settle(); }, 3);
      },
      &sabotage);
  EXPECT_TRUE(sabotage.group_0_came_so_far());
  EXPECT_EQ(newest(0, 0), 4u);
  EXPECT_EQ(newest(1, 0), 3u);
  expect_to_go_on_from(3);
}

// A group that is one step ahead must still have the step before, to go back to it.
TEST_P(GroupCommit, NothingIsOverwrittenBeforeAllGroupsHaveTheStep) {
  Sabotage sabotage(Sabotage::Until::others_overwrite);
  on_engines(
      [&](int, int, ToyModel& model) {
        Engine& engine = model.initialize();
        model.train(1, 3);
        engine.settle();
        arm(sabotage, engine);
        const auto two_steps = [&] {
          model.train(4, 5);
          engine.settle();
        };
        expect_no_commit(engine, two_steps, 3);
      },
      &sabotage);
  EXPECT_FALSE(sabotage.group_0_came_so_far()) << "step 5 was written over step 3 while a group had nothing else";
  expect_to_go_on_from(3);
}

TEST_P(GroupCommit, AStepIsKeptByAllGroupsOrNotOffered) {
  keep_steps_ = 2;
  Sabotage sabotage(Sabotage::Until::others_manifests, "", /*spared=*/1);  // of the commit, which is made again first
  on_engines(
      [&](int, int, ToyModel& model) {
        Engine& engine = model.initialize();
        model.train(1, 3);
        engine.save("three", {}).wait();
        model.train(4, 4);
        engine.settle();
        arm(sabotage, engine);
        expect_no_commit(
            engine, [&] { engine.save("four", {}).wait(); }, 4);
      },
      &sabotage);
  EXPECT_TRUE(sabotage.group_0_came_so_far());
  EXPECT_THAT(tiers::Store::look(store(0), 0).checkpoints, testing::SizeIs(2));
  EXPECT_THAT(tiers::Store::look(store(1), 0).checkpoints, testing::SizeIs(1));
  on_engines([&](int group, int rank, ToyModel& model) {
    const auto checkpoints = model.find_checkpoints();
    ASSERT_EQ(checkpoints.size(), 1u);
    EXPECT_EQ(checkpoints.front().name, "three");
    EXPECT_EQ(checkpoints.front().step, 3u);
    EXPECT_THROW(model.restore({.from = "four"}), StoreError) << "group " << group << " rank " << rank;
    EXPECT_EQ(model.restore().step, 4u);
  });
  EXPECT_THAT(tiers::Store::look(store(0), 0).checkpoints, testing::SizeIs(1)) << "nobody can go back to it";
  expect_to_go_on_from(3, "three");
  expect_to_go_on_from(kLastStep);
}

// No group waits for a group that has failed, and none has to start anew for it.
TEST_P(GroupCommit, AGroupThatCannotBeRestoredIsHeardByAll) {
  const auto faults = std::make_shared<Faults>(1);
  prepare_ = [&](int group, int, ToySetup& toy) {
    if (group == 1)
      toy.runtime.make_aio_backend = [&](const aio::DriveQueueOptions& o) { return make_faulty_backend(o, faults); };
  };
  on_engines([](int, int, ToyModel& model) {
    model.initialize();
    model.train(1, 2);
  });
  faults->add({.operation = aio::Operation::read, .path_contains = "rank-00001.manifest", .count = Faults::kForever});
  const TimePoint start = Clock::now();
  const auto there = undisturbed(2);
  on_engines([&](int group, int rank, ToyModel& model) {
    try {
      model.restore();
      ADD_FAILURE() << "restored without a group";
    } catch (const IoError&) {
      EXPECT_EQ(group, 1);
      EXPECT_EQ(rank, 1);
      faults->clear();
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 3 of the norm group"), HasSubstr("rank-00001.manifest")));
    }
    EXPECT_EQ(model.restore().step, 2u);
    EXPECT_EQ(state_digests(model), there[static_cast<std::size_t>(group)]);
  });
  EXPECT_LT(Clock::now() - start, kAtOnce);
}

TEST_P(GroupCommit, AFirstCommitThatOneGroupLacksIsNoBeginning) {
  const auto initialize = [](int, int, ToyModel& model) {
    EXPECT_FALSE(model.find_commit());
    model.initialize();
  };
  on_engines(initialize);
  std::filesystem::remove_all(store(1));
  on_engines([&](int group, int rank, ToyModel& model) {
    EXPECT_THROW(model.restore(), StoreError);
    initialize(group, rank, model);
    model.train(1, 1);
  });
  expect_to_go_on_from(1);
}

TEST_P(GroupCommit, ATrainingOfOneGroupIsNotReplaced) {
  on_engines([](int, int, ToyModel& model) {
    model.initialize();
    model.train(1, 1);
  });
  std::filesystem::remove_all(store(1));
  on_engines([](int, int, ToyModel& model) {
    EXPECT_THAT([&] { model.initialize(); }, testing::ThrowsMessage<StoreError>(AllOf(
                                                 HasSubstr("holds a training, but no commit that every rank has ("),
                                                 HasSubstr(" of the norm group finds no files"))));
  });
  EXPECT_FALSE(std::filesystem::exists(store(1))) << "no rank of the other group has begun to make its store";
  EXPECT_EQ(newest(0, 0), 1u);
}

// Groups of two jobs do not make one job, even if both jobs are at the same step.
TEST_P(GroupCommit, GroupsOfTwoJobsAreNotOne) {
  for (const char* const job : {"other", "job"}) {
    job_ = job;
    on_engines([](int, int, ToyModel& model) {
      model.initialize();
      model.train(1, 2);
    });
  }
  std::filesystem::remove_all(store(1));
  std::filesystem::copy(directory_ / "other/group-1", store(1), std::filesystem::copy_options::recursive);
  on_engines([](int, int, ToyModel& model) {
    EXPECT_FALSE(model.find_commit());
    EXPECT_THAT([&] { model.restore(); },
                testing::ThrowsMessage<StoreError>(HasSubstr("of all sharding groups, which made it in one job")));
  });
}

// A group's files are not accepted in another group's store.
TEST_P(GroupCommit, FilesOfTwoGroupsAreNotOneStore) {
  on_engines([](int, int, ToyModel& model) {
    model.initialize();
    model.train(1, 2);
  });
  for (const char* const file : {"/rank-00001.data", "/rank-00001.manifest"})
    std::filesystem::copy(store(1) + file, store(0) + file, std::filesystem::copy_options::overwrite_existing);
  on_engines([](int, int, ToyModel& model) { EXPECT_THROW(model.restore(), StoreError); });
}

// A change of one group's parameters is a commit of all.
TEST_P(GroupCommit, AWriteIsACommitOfTheWholeJob) {
  const std::vector<float> values{1.5f, -2.5f};
  const auto write = [&](int group, ToyModel& model) {
    model.engine().write(model.matrix(0), State::master, 1, group == 0 ? std::span(values) : std::span<const float>());
  };
  const auto write_units = [&](std::size_t count, ToyModel& model) {
    const UnitId unit = model.model().unit_of(model.matrix(0));
    const StateChange change{.parameter = model.matrix(0), .first_element = 1, .values = values};
    model.engine().write(std::span(&unit, count), [&](UnitId) { return std::vector{change}; });
  };
  on_engines([&](int group, int, ToyModel& model) {
    model.initialize();
    model.train(1, 2);
    write(group, model);
    write_units(group == 0 ? 1 : 0, model);
    write_units(0, model);  // of all groups: nothing to commit
  });
  for (const int group : {0, 1}) EXPECT_EQ(tiers::Store::look(store(group), 0).commits.front().revision, 2u);
  on_engines([&](int group, int, ToyModel& model) {
    EXPECT_EQ(model.restore().step, 2u);
    Engine& engine = model.engine();
    std::vector<float> found(2);
    engine.read(model.matrix(0), State::master, 1, found);
    EXPECT_EQ(found == values, group == 0);
    EXPECT_THAT([&] { group == 0 ? write(group, model) : void(engine.save("", {})); },
                testing::ThrowsMessage<CommError>(
                    AllOf(HasSubstr("diverged"), HasSubstr("write() after step 2"), HasSubstr("save ''"))));
  });
}

TEST_P(GroupCommit, GroupsThatCommitByOtherRulesAreRefused) {
  prepare_ = [](int group, int, ToySetup& toy) { toy.engine.commit_every = group == 0 ? 1 : 2; };
  on_engines([](int, int, ToyModel& model) {
    EXPECT_THAT([&] { model.initialize(); },
                testing::ThrowsMessage<CommError>(
                    AllOf(HasSubstr("a commit every 1 step,"), HasSubstr("a commit every 2 steps"))));
  });
}

// --- other numbers of ranks -----------------------------------------------------------------------------------------

class GroupReshard : public GroupCommit {
 protected:
  // Resumes with sizes[g] ranks in group g, expects the state `before`, trains one step and sets `before` to the new
  // state. Starts a new training when `before` is empty.
  void continue_with(const std::vector<int>& sizes, std::vector<Digests>& before) {
    sizes_ = sizes;
    std::vector<Digests> after(sizes.size());
    on_engines([&](int group, int rank, ToyModel& model) {
      const std::uint64_t step = before.empty() ? 0 : model.restore().step;
      if (before.empty())
        model.initialize();
      else
        EXPECT_EQ(state_digests(model), before[static_cast<std::size_t>(group)]);
      Engine& engine = model.engine();
      model.train(step + 1, step + 1);
      engine.settle();
      EXPECT_EQ(engine.committed_step(), step + 1);
      const Digests mine = state_digests(model);
      if (rank == 0) after[static_cast<std::size_t>(group)] = mine;
    });
    before = after;
  }
  std::vector<std::string> places(int group) const {
    std::vector<std::string> names;
    for (const detail::StoreDirectory& place : detail::store_directories(store(group))) names.push_back(place.name);
    return names;
  }
};

TEST_P(GroupReshard, AllGroupsGoToNewStoresTogether) {
  std::vector<Digests> state;
  continue_with({2, 2}, state);
  continue_with({1, 1}, state);
  continue_with({3, 1}, state);  // group 1 gets a new store, too
  continue_with({3, 1}, state);
  continue_with({1, 2}, state);
  EXPECT_THAT(places(0), testing::ElementsAre("reshard-0003-ranks-1"));
  EXPECT_THAT(places(1), testing::ElementsAre("reshard-0003-ranks-2"));
}

// Group 0's new store is complete and group 1's is not, so both groups give up their new stores.
TEST_P(GroupReshard, ANewStoreThatOneGroupLacksIsGivenUpByAll) {
  for (const std::vector<int>& next : {std::vector<int>{2, 2}, std::vector<int>{1, 1}, std::vector<int>{1, 3}}) {
    std::vector<Digests> state;
    job_ = "job-" + std::to_string(next[0]) + std::to_string(next[1]);
    continue_with({2, 2}, state);
    sizes_ = {1, 1};
    Sabotage sabotage(Sabotage::Until::others_manifests, "reshard-0001-ranks-1/");
    sabotage.arm();
    on_engines([&](int, int, ToyModel& model) { EXPECT_THROW(model.restore(), Error); }, &sabotage);
    EXPECT_TRUE(sabotage.group_0_came_so_far());
    EXPECT_THAT(places(0), testing::SizeIs(2));
    EXPECT_FALSE(tiers::Store::look(store(0) + "/reshard-0001-ranks-1", 0).commits.empty());
    EXPECT_TRUE(tiers::Store::look(store(1) + "/reshard-0001-ranks-1", 0).commits.empty());
    continue_with(next, state);
    continue_with(next, state);
    for (const int group : {0, 1}) EXPECT_THAT(places(group), testing::SizeIs(1)) << "group " << group;
  }
}

// A group holds a newer commit of the same step, or a newer checkpoint of the same name, that the other one lacks:
// other numbers of ranks take over what both have.
TEST_P(GroupReshard, WhatOneGroupLacksIsTakenOverByNone) {
  keep_steps_ = 2;
  const std::vector<float> values{1.5f, -2.5f};
  for (const std::string from : {"", "best"}) {
    job_ = "job " + from;
    sizes_ = {2, 2};
    const auto there = undisturbed(2);
    Sabotage sabotage(Sabotage::Until::others_manifests);
    on_engines(
        [&](int group, int, ToyModel& model) {
          Engine& engine = model.initialize();
          model.train(1, 2);
          engine.save("best", {}).wait();
          if (!from.empty()) model.train(3, 4);
          engine.settle();
          arm(sabotage, engine);
          const auto commit = [&] {
            if (!from.empty()) return engine.save("best", {}).wait();
            engine.write(model.matrix(0), State::master, 1, group == 0 ? std::span(values) : std::span<const float>());
          };
          expect_no_commit(engine, commit, from.empty() ? 2 : 4);
        },
        &sabotage);
    EXPECT_TRUE(sabotage.group_0_came_so_far());
    sizes_ = {1, 1};
    on_engines([&](int group, int, ToyModel& model) {
      EXPECT_EQ(model.restore({.from = from}).step, 2u);
      EXPECT_EQ(state_digests(model), there[static_cast<std::size_t>(group)])
          << "group " << group << " from '" << from << "'";
    });
  }
}

constexpr std::array kCells{
    Cell{"nvme_forward", Placement::nvme, Placement::nvme, UpdateMode::forward},
    Cell{"pinned_step", Placement::pinned, Placement::nvme, UpdateMode::step},
};
std::string name_of(const testing::TestParamInfo<Cell>& cell) { return cell.param.name; }

INSTANTIATE_TEST_SUITE_P(Cells, GroupCommit, testing::ValuesIn(kCells), name_of);
INSTANTIATE_TEST_SUITE_P(Cells, GroupReshard, testing::ValuesIn(kCells), name_of);

}  // namespace
}  // namespace hoist::test::group_commit_test
