// SPDX-License-Identifier: Apache-2.0
// Hierarchical gathers (zero_hpz_partition_size): the same bits, whatever lives where and whenever it is updated; bytes
// that follow the formula, split into those of all ranks and those of the group; budgets that hold.
#include <gmock/gmock.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/remembered.hpp>
#include <hoist/zero/layout/partition.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::secondary_shard_test {
namespace {

const ToyShape kShape{.matrices = {20000, 30001, 16384, 9973}};

struct Groups {
  int size = 4;
  int ranks = 2;  // of a group
};
void PrintTo(const Groups& groups, std::ostream* out) { *out << groups.size << " ranks in groups of " << groups.ranks; }

class SecondaryShard : public testing::TestWithParam<Groups> {
 protected:
  int size() const { return GetParam().size; }

  // Evaluation before and between steps, several micro-batches: passes that begin with and without secondary shards.
  Digests train(const ToySetup& setup, int micro_batches) const {
    Digests digests;
    on_ranks(size(), [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup, join, kShape);
      model.micro_batches = micro_batches;
      model.initialize();
      std::vector<double> evaluated;
      for (std::uint64_t step = 1; step <= 4; ++step) {
        if (step != 2) evaluated.push_back(model.evaluate());
        model.train(step, step);
        if (step == 3) model.engine().write(model.matrix(1), State::master, 5, std::vector<float>{0.25f, -3.5f});
      }
      Digests mine = digests_of(model);
      mine.losses.insert(mine.losses.end(), evaluated.begin(), evaluated.end());
      if (rank == 0) digests = mine;
    });
    return digests;
  }
};

TEST_P(SecondaryShard, ChangesNoBit) {
  const TempDirectory directory;
  int cell = 0;
  struct Case {
    Placement parameters, optimizer;
    UpdateMode mode;
  };
  // Each place of weights and of states, in either mode.
  const Case cases[] = {{Placement::device, Placement::device, UpdateMode::step},
                        {Placement::device, Placement::nvme, UpdateMode::forward},
                        {Placement::pinned, Placement::pinned, UpdateMode::forward},
                        {Placement::pinned, Placement::nvme, UpdateMode::step},
                        {Placement::nvme, Placement::pinned, UpdateMode::step},
                        {Placement::nvme, Placement::nvme, UpdateMode::forward}};
  const bool secondary = GetParam().ranks > 1 && GetParam().ranks < size();
  for (const int micro_batches : {1, 2}) {
    ToySetup plain = toy_setup(Placement::pinned, Placement::pinned);
    plain.engine.micro_batches_max = 2;
    static std::map<std::pair<int, int>, Digests> made;
    const Digests& expected = remembered(made, {size(), micro_batches}, [&] { return train(plain, micro_batches); });
    for (const auto& [parameters, optimizer, mode] : cases) {
      // One case shows that a group of one or of all has none.
      if (!secondary && (parameters != Placement::nvme || optimizer != Placement::nvme)) continue;
      ToySetup setup = toy_setup(parameters, optimizer, directory / ("store" + std::to_string(cell++)));
      if (parameters != Placement::nvme && optimizer != Placement::nvme) setup.engine.store_directory.clear();
      setup.engine.micro_batches_max = 2;
      setup.engine.update_mode = mode;
      setup.engine.secondary_shard_ranks = GetParam().ranks;
      setup.engine.reuse_distance_elements = cell % 3 == 0 ? 1'000'000'000 : 0;
      setup.engine.prefetch_elements = cell % 2 == 0 ? 50'000'000 : 0;
      setup.engine.persistence_elements = cell % 5 == 0 ? 10'500 : 0;
      setup.runtime.host_device.chaos_seed = static_cast<std::uint64_t>(cell % 2 == 0 ? 0 : cell);
      EXPECT_EQ(train(setup, micro_batches), expected) << "cell " << cell << ", micro-batches " << micro_batches;
    }
    ++cell;  // the other half of the cases is delayed next, the other one fetches ahead
  }
}

TEST_P(SecondaryShard, ChangesNoBitInVerticalOrder) {
  const auto run = [&](int group) {
    ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
    setup.engine.micro_batches_max = 2;
    setup.engine.micro_batch_order = MicroBatchOrder::vertical;
    setup.engine.secondary_shard_ranks = group;
    setup.engine.reuse_distance_elements = 0;
    return train_in_micro_batches(size(), setup, 3, kShape);
  };
  EXPECT_EQ(run(GetParam().ranks), run(1));
}

// Per rank and step, in the communicated types, padding included: weights from all ranks once and then from the group,
// gradients as ever.
TEST_P(SecondaryShard, MovesWhatTheFormulaSays) {
  const auto [size, ranks] = GetParam();
  const ToyShape shape{.matrices = {400000, 400000, 400000}, .norm = 64, .frozen = false, .tied = false};
  const TempDirectory directory;
  int cell = 0;
  // Fetched for each use, or gathered once and kept.
  for (const auto& [parameters, stays] : {std::pair(Placement::pinned, false), std::pair(Placement::nvme, false),
                                          std::pair(Placement::pinned, true), std::pair(Placement::nvme, true)}) {
    ToySetup setup = toy_setup(parameters, Placement::nvme, directory / ("store" + std::to_string(cell++)));
    setup.runtime.device_memory_bytes = 16 * kMiB;
    if (!stays) setup.engine.reuse_distance_elements = setup.engine.live_elements_max = 0;
    setup.engine.secondary_shard_ranks = ranks;
    on_ranks(size, [&, size = size, stays = stays, n = static_cast<std::uint64_t>(size),
                    h = static_cast<std::uint64_t>(ranks)](int, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup, join, shape);
      Engine& engine = model.initialize();
      model.train(1, 2);
      engine.settle();
      const std::uint64_t group = engine.wire_bytes_in_group();
      const MovedBytes moved = model.bytes_moved(3, 6);
      const StepBytes formula = engine.formula_bytes();
      EXPECT_EQ(moved[Link::wire], 4 * formula.wire);
      EXPECT_EQ(engine.wire_bytes_in_group() - group, 4 * formula.wire_in_group);
      EXPECT_EQ(moved[Link::host_to_device], 4 * formula.host_to_device);
      EXPECT_EQ(moved[Link::device_to_host], 4 * formula.device_to_host);
      EXPECT_NEAR(static_cast<double>(moved[Link::nvme_read]) / 4, static_cast<double>(formula.nvme_read),
                  0.02 * static_cast<double>(formula.nvme_read));  // blocks of 4 KiB
      // The formula itself; psi in bytes, as padded.
      std::uint64_t psi = 0;
      for (std::size_t unit = 0; unit < shape.matrices.size(); ++unit)
        psi += 2 * n * shard_elements(400000, size) + 4 * n * shard_elements(64, size);
      const bool grouped = h > 1 && h < n && !stays;
      EXPECT_EQ(formula.wire_in_group, grouped ? psi * (h - 1) / h : 0);
      EXPECT_EQ(formula.wire - formula.wire_in_group, (grouped || stays ? 2 : 3) * psi * (n - 1) / n);
      EXPECT_EQ(formula.device_to_host, (grouped ? psi / h : 0) + psi / n);  // secondary shard and gradients
    });
  }
}

TEST_P(SecondaryShard, LivesWithinTheBudgetAndIsPredicted) {
  const auto [size, ranks] = GetParam();
  std::optional<BudgetError::Need> need;
  const auto start = [&, size = size, ranks = ranks](std::uint64_t pinned) {
    need.reset();
    ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
    setup.runtime.pinned_memory_bytes = pinned;
    setup.engine.secondary_shard_ranks = ranks;
    on_ranks(size, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup, join, kShape);
      const Prediction predicted = predict(setup.runtime, setup.engine, model.model(), size);
      try {
        model.initialize();
        EXPECT_EQ(predicted.pinned.bytes, model.runtime().pinned_budget().held_bytes());
        model.train(1, 2);
      } catch (const BudgetError& error) {
        if (rank == 0) need = error.need;
        EXPECT_GE(error.need.need_bytes, predicted.pinned.least_bytes);
      }
    });
  };
  start(64 * kKiB);
  ASSERT_TRUE(need);
  EXPECT_EQ(need->key, "hoist.pinned_memory");
  const std::uint64_t works = need->need_bytes;
  start(works);
  EXPECT_FALSE(need) << "the number it names works";
  start(works - kBlockAlignment);
  EXPECT_TRUE(need) << "and is the smallest";
}

INSTANTIATE_TEST_SUITE_P(Worlds, SecondaryShard,
                         testing::Values(Groups{2, 1}, Groups{2, 2}, Groups{4, 2}, Groups{4, 4}, Groups{6, 3}),
                         [](const auto& one) {
                           return std::to_string(one.param.size) + "RanksInGroupsOf" + std::to_string(one.param.ranks);
                         });

TEST(SecondaryShards, AreRefusedWhereTheyCannotBe) {
  const auto refusal = [](int ranks, int stage) {
    std::string text;
    on_ranks(4, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToySetup setup = toy_setup(Placement::device, Placement::pinned);
      setup.engine.secondary_shard_ranks = ranks;
      setup.engine.stage = stage;
      try {
        ToyModel(setup, join).initialize();
      } catch (const ConfigError& error) {
        if (rank == 0) text = error.what();
      }
    });
    return text;
  };
  EXPECT_THAT(refusal(3, 3), testing::AllOf(testing::HasSubstr("zero_optimization.zero_hpz_partition_size"),
                                            testing::HasSubstr("4 ranks cannot be cut into groups of 3")));
  EXPECT_THAT(refusal(0, 3), testing::HasSubstr("zero_hpz_partition_size"));
  EXPECT_THAT(refusal(2, 2), testing::HasSubstr("use stage 3"));
  EXPECT_EQ(refusal(2, 3), "");
}

}  // namespace
}  // namespace hoist::test::secondary_shard_test
