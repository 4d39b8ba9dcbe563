// SPDX-License-Identifier: Apache-2.0
// A run resumes with another number of ranks: the engine redistributes the state, bit by bit, into a new store, and
// removes the old store only when the new one is committed, and holds no named checkpoint that counts.
#include <filesystem>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/tests/support/damage.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "reshard_fixture.hpp"

namespace hoist::test::reshard_test {
namespace {

using testing::HasSubstr;

TEST_P(ReshardTest, OneFourThreeOne) {
  begin_with(1, 3);
  continue_with(4, 5);
  continue_with(4, 6);  // in place
  continue_with(3, 8);
  continue_with(1, 9);
  continue_with(1, 10);
  ASSERT_EQ(stores().size(), 1u);
  EXPECT_EQ(stores()[0].name, "reshard-0003-ranks-1");
  EXPECT_FALSE(std::filesystem::exists(store_ + "/rank-00000.data"));
  const StoredModel stored(store_);  // tools find it below
  EXPECT_EQ(stored.step(), 10u);
  EXPECT_EQ(stored.world_size(), 1);
}

// Moments pass through fp32 on their way, and come out of it as they were, exponents of their blocks included.
TEST_P(ReshardTest, StateOfEightBits) {
  setup_.engine.optimizer_defaults.moments = MomentType::fp8;
  setup_.engine.optimizer_defaults.remainder = RemainderType::int8;
  begin_with(1, 3);
  continue_with(4, 5);
  continue_with(3, 8);
  continue_with(1, 9);
}

// The padding between parameters keeps its accumulator, too, which no parameter's values replace.
TEST_P(ReshardTest, AdagradsInitialAccumulatorOfPaddingStays) {
  setup_.engine.optimizer_defaults.kind = optim::OptimizerKind::adagrad;
  setup_.engine.optimizer_defaults.initial_accumulator = 0.1;
  setup_.engine.optimizer_defaults.epsilon = 0;
  begin_with(1, 3);
  continue_with(2, 5);
  continue_with(1, 6);
}

// The memory for reading the old store is taken from the pinned budget and given back afterwards. A budget that is too
// small is refused, and the error names one that works.
TEST_P(ReshardTest, ReadingTheOldStoreIsWithinTheBudget) {
  begin_with(3, 2);
  const std::uint64_t reading_bytes = StoredModel(store_).memory_bytes();
  const std::uint64_t plain_bytes = predict(setup_.runtime, setup_.engine, describe({}), 2).pinned.least_bytes;
  const auto resume = [&](std::uint64_t budget) {
    setup_.runtime.pinned_memory_bytes = budget;
    std::uint64_t need_bytes = 0;
    on_engines(2, [&](int rank, ToyModel& model) {
      try {
        EXPECT_EQ(model.restore().step, 2u);
        const tiers::Budget& pinned = model.engine().runtime().pinned_budget();
        EXPECT_EQ(pinned.peak_bytes() - pinned.held_bytes(), reading_bytes);
      } catch (const BudgetError& error) {
        EXPECT_EQ(error.need.key, "hoist.pinned_memory");
        if (rank == 0) need_bytes = error.need.need_bytes;
      }
    });
    return need_bytes;
  };
  const std::uint64_t need_bytes = resume(round_up(plain_bytes, kBlockAlignment));
  EXPECT_GE(need_bytes, plain_bytes + reading_bytes);
  EXPECT_EQ(resume(need_bytes - kBlockAlignment), need_bytes);
  EXPECT_EQ(resume(need_bytes), 0u);
}

TEST_P(ReshardTest, MoreNamedCheckpointsNeedANewStore) {
  begin_with(2, 2);
  setup_.engine.keep_steps = 3;
  continue_with(2, 4);
  EXPECT_EQ(stores()[0].name, "reshard-0001-ranks-2");
}

TEST_P(ReshardTest, LongerCallerStateNeedsANewStore) {
  begin_with(2, 2);
  setup_.engine.caller_state_bytes_max += 1;
  continue_with(2, 4);
  EXPECT_EQ(stores()[0].name, "reshard-0001-ranks-2");
  setup_.engine.caller_state_bytes_max -= 1;
  continue_with(2, 6);
  EXPECT_EQ(stores()[0].name, "reshard-0001-ranks-2");
}

// Each rank then takes over its own part, because it can read only its own files.
TEST_P(ReshardTest, MoreRoomIsMadeOnDrivesOfTheRanksOwn) {
  own_drives_ = true;
  setup_.engine.keep_steps = 0;
  begin_with(2, 2);
  setup_.engine.keep_steps = 2;
  continue_with(2, 3);
  continue_with(2, 4);  // without NVMe, the old store is removed only now that the new one has a commit
  setup_.engine.mirror.directory = directory_ / "mirror";
  continue_with(2, 5);
  continue_with(2, 6);
  for (const int rank : {0, 1}) {
    const auto stores = detail::store_directories(directory_of(rank));
    ASSERT_EQ(stores.size(), 1u) << "rank " << rank;
    EXPECT_EQ(stores[0].name, "reshard-0002-ranks-2");
  }
}

// --- named checkpoints -----------------------------------------------------------------------------------------------

TEST_P(ReshardTest, AStoreThatKeepsStepsStaysAndIsGoneBackTo) {
  begin_and_keep_two(4);
  continue_with(3, 6);
  EXPECT_EQ(stores().size(), 2u);
  on_engines(3, [&](int, ToyModel& model) {
    const auto kept = model.find_checkpoints();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].name, "two");
    EXPECT_EQ(model.find_commit(), 6u);
  });
  ranks_before_ = 2;
  continue_with(3, 5, "two");  // also a new store: the one of step 6 was newer than the one that keeps it
  continue_with(3, 7);
  EXPECT_EQ(stores().size(), 2u);
  on_engines(3, [&](int rank, ToyModel& model) {
    model.restore();
    const std::string state = "rank " + std::to_string(rank);
    model.engine().save("two", std::as_bytes(std::span(state))).wait();  // replaces the one that the old store keeps
    const auto kept = model.find_checkpoints();
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_EQ(kept[0].step, 7u);
  });
  continue_with(3, 8);
  EXPECT_EQ(stores().size(), 1u);
}

TEST_P(ReshardTest, StepsAreKeptOverAllStoresAndNoMore) {
  begin_and_keep_two(2);
  for (const int ranks : {1, 2, 1, 2}) {
    on_engines(ranks, [&](int rank, ToyModel& model) {
      const std::uint64_t step = model.restore().step;
      EXPECT_LE(stores().size(), 2u) << "the newest, and the one that keeps the last named step";
      EXPECT_EQ(model.find_checkpoints().size(), 1u);
      train_to(rank, model, step, step + 1, before_);
      model.engine().save(fmt::format("step {}", step + 1), {}).wait();
    });
  }
}

// The newer name counts, and yet what a start goes back to is there for the next one, should it fail.
TEST_P(ReshardTest, AStepIsGoneBackToMoreThanOnce) {
  begin_and_keep_two(2);
  on_engines(1, [&](int rank, ToyModel& model) {
    train_to(rank, model, model.restore().step, 6, before_);
    model.engine().save("six", {}).wait();
  });
  for (const int ranks : {2, 1})
    on_engines(ranks, [&](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "two"}).step, 2u); });
}

TEST_P(ReshardTest, DamageIsToldWithTheStepsThatOlderStoresKeep) {
  begin_and_keep_two(2);
  continue_with(1, 4);
  flip_bits(stores()[0].in(store_) + "/rank-00000.data", 5, 4096);
  on_engines(1, [&](int, ToyModel& model) {
    EXPECT_THAT(
        [&] {
          model.restore();
          model.train(5, 6);
        },
        testing::ThrowsMessage<CorruptionError>(HasSubstr("'two' (step 2)")));
  });
}

// A named checkpoint of a store that nothing has replaced yet stays, even if the store seems to be half removed.
TEST_P(ReshardTest, AHalfRemovedStoreStaysWhileItHoldsANamedCheckpointThatCounts) {
  begin_and_keep_two(3);
  const std::string manifest = store_ + "/rank-00001.manifest";
  continue_with(3, 4);
  continue_with(3, 5);
  std::filesystem::rename(manifest, manifest + "-new");
  EXPECT_TRUE(tiers::Store::is_half_removed(store_));
  continue_with(3, 6);
  std::filesystem::rename(manifest + "-new", manifest);
  ranks_before_ = 2;
  continue_with(3, 7, "two");
}

// One rank died before it had gone back to a named checkpoint with the others. All ranks still have the last commit.
// (Without NVMe there are two commits in all, and the named one is common as well.)
TEST_P(ReshardOnNvmeTest, ACrashBetweenRanksGoingBackLeavesTheLastCommit) {
  begin_and_keep_two(6);
  const Digests at_six = before_;
  const std::string manifest = store_ + "/rank-00001.manifest";
  std::filesystem::copy(manifest, directory_ / "before");
  on_engines(2, [&](int, ToyModel& model) { EXPECT_EQ(model.restore({.from = "two"}).step, 2u); });
  std::filesystem::rename(directory_ / "before", manifest);
  std::filesystem::copy(store_, directory_ / "store-between");
  const auto continue_at_six = [&](int ranks, std::uint32_t keep_steps) {
    std::filesystem::remove_all(store_);
    std::filesystem::copy(directory_ / "store-between", store_);
    setup_.engine.keep_steps = keep_steps;
    before_ = at_six;
    ranks_before_ = 2;
    continue_with(ranks, 7);  // expects the state of step 6
  };
  continue_at_six(2, 1);
  continue_at_six(2, 2);  // into a new store
  continue_at_six(3, 1);
}

std::string placement_names(const testing::TestParamInfo<std::pair<Placement, Placement>>& cell) {
  const char* names[] = {"device", "pinned", "nvme"};
  return std::string(names[static_cast<int>(cell.param.first)]) + "_" + names[static_cast<int>(cell.param.second)];
}

}  // namespace
}  // namespace hoist::test::reshard_test

// Instantiates the tests of all three reshard_*_test.cpp files.
namespace hoist::test {

using reshard_test::placement_names;
INSTANTIATE_TEST_SUITE_P(Placements, ReshardTest,
                         testing::Values(std::pair(Placement::nvme, Placement::nvme),
                                         std::pair(Placement::pinned, Placement::nvme),
                                         std::pair(Placement::pinned, Placement::pinned)),
                         placement_names);
INSTANTIATE_TEST_SUITE_P(Placements, ReshardOnNvmeTest,
                         testing::Values(std::pair(Placement::nvme, Placement::nvme),
                                         std::pair(Placement::pinned, Placement::nvme)),
                         placement_names);

}  // namespace hoist::test
