// SPDX-License-Identifier: Apache-2.0
// A run begins with another program's training state, and continues as if the engine had trained it from the start:
// masters, moments, step and loss scale, on any number of ranks. Until its first commit is whole, there is none.
#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/zero/checkpoint/store_directory.hpp>
#include <hoist/zero/checkpoint/stored_model.hpp>

#include "reshard_fixture.hpp"
#include "toy_ranks.hpp"

namespace hoist::test::initial_state_test {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kBefore = 5;  // with fp16 some are skipped
constexpr std::uint64_t kLast = 9;

// The state of a commit, as a program of another kind would hand it over.
InitialState state_of(StoredModel& stored) {
  return {.masters = [&stored](ParameterId parameter, std::uint64_t first,
                               std::span<float> out) { stored.read(parameter.index, State::master, first, out); },
          .moments = [&stored](ParameterId parameter, State moment, std::uint64_t first,
                               std::span<float> out) { stored.read(parameter.index, moment, first, out); },
          .step = stored.step(),
          .loss_scale = stored.loss_scaler()};
}

class InitialStateTest : public testing::TestWithParam<std::tuple<Placement, DType>> {
 protected:
  InitialStateTest() {
    shape_.dtype = std::get<1>(GetParam());
    first_ = setup(Placement::nvme, "first");
    ToyModel before(first_, shape_);
    before.equal_gradients = true;
    before.initialize();
    before.train(1, kBefore);
    step_before_ = before.engine().step_count();
    scale_before_ = before.engine().loss_scale();
  }

  // Without clipping, so that the number of ranks does not matter.
  ToySetup setup(Placement placement, const std::string& name) const {
    ToySetup setup = toy_setup(placement, placement, placement == Placement::nvme ? directory_ / name : "");
    setup.engine.gradient_clipping = 0;
    if (shape_.dtype == DType::fp16) {
      setup.engine.weights_dtype = DType::fp16;
      setup.engine.loss_scale = toy_loss_scale();
    }
    return setup;
  }
  // A directory of one rank alone, so that each has a drive of its own.
  ToySetup of_rank(int rank) const {
    ToySetup setup = other();
    if (own_drives_) setup.engine.store_directory += std::to_string(rank);
    return setup;
  }
  ToySetup other() const { return setup(std::get<0>(GetParam()), "second"); }

  // The result of the first run when it goes on by itself.
  Digests undisturbed() {
    ToyModel run(first_, shape_);
    run.equal_gradients = true;
    run.restore();
    return go_on(run);
  }
  static Digests go_on(ToyModel& model) {
    model.losses.clear();
    model.train(model.engine().step_count() + 1, kLast);
    model.engine().settle();
    return digests_of(model);
  }
  // Begins the second run on so many ranks; the state is read on all of them at once.
  void begin(
      int ranks, const std::function<void(int, ToyModel&)>& then,
      const std::function<void(InitialState&)>& change = [](InitialState&) {}) {
    on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
      StoredModel stored(first_.engine.store_directory);
      InitialState state = state_of(stored);
      change(state);
      const ToySetup setup = of_rank(rank);
      ToyModel model(setup, join, shape_);
      model.equal_gradients = true;
      model.begin(state);
      then(rank, model);
    });
  }
  std::optional<std::uint64_t> found_commit() const {
    ToyModel run(other(), shape_);
    return run.find_commit();
  }

  TempDirectory directory_;
  ToyShape shape_;
  ToySetup first_;
  std::uint64_t step_before_ = 0;
  float scale_before_ = 0;
  bool own_drives_ = false;
};
INSTANTIATE_TEST_SUITE_P(Engine, InitialStateTest,
                         testing::Combine(testing::Values(Placement::pinned, Placement::nvme),
                                          testing::Values(DType::bf16, DType::fp16)));

TEST_P(InitialStateTest, GoesOnAsTheFirstRunDoes) {
  std::map<int, Digests> after;
  for (const int ranks : {1, 2}) {
    std::filesystem::remove_all(directory_ / "second");
    begin(ranks, [&](int rank, ToyModel& model) {
      EXPECT_EQ(model.engine().step_count(), step_before_);
      EXPECT_EQ(model.engine().loss_scale(), scale_before_);
      const Digests mine = go_on(model);
      if (rank == 0) after[ranks] = mine;
    });
  }
  const Digests expected = undisturbed();
  EXPECT_EQ(after[1], expected);
  after[2].losses = expected.losses;
  EXPECT_EQ(after[2], expected);
}

// The same directory as after a change of ranks, in which tools and restores find it.
TEST_P(InitialStateTest, IsCommittedWholeOrNotAtAll) {
  if (std::get<0>(GetParam()) != Placement::nvme) GTEST_SKIP() << "nothing is committed before the first save()";
  unsigned calls = 0;
  EXPECT_THAT(
      [&] {
        begin(
            1, [](int, ToyModel&) {},
            [&](InitialState& state) {
              state.moments = [&calls, moments = state.moments](ParameterId p, State moment, std::uint64_t first,
                                                                std::span<float> out) {
                if (++calls == 7) throw StoreError("the file ends here");
                moments(p, moment, first, out);
              };
            });
      },
      testing::ThrowsMessage<StoreError>(HasSubstr("the file ends here")));
  EXPECT_EQ(calls, 7u);
  EXPECT_EQ(found_commit(), std::nullopt);

  begin(1, [](int, ToyModel&) {});
  EXPECT_EQ(found_commit(), step_before_);
  EXPECT_EQ(detail::store_directories(other().engine.store_directory).size(), 1u);
  ToyModel resumed(other(), shape_);
  resumed.equal_gradients = true;
  EXPECT_EQ(resumed.restore().step, step_before_);
  EXPECT_EQ(go_on(resumed).master, undisturbed().master);
  resumed.close();
  EXPECT_THAT([&] { begin(1, [](int, ToyModel&) {}); },
              testing::ThrowsMessage<StoreError>(HasSubstr("of a run of 1 rank; continue it")));
}

// A rank that dies before its first commit leaves nothing to go on from: the next attempt begins anew. It has files:
// all ranks make theirs before any of them commits.
TEST_P(InitialStateTest, AFirstCommitThatARankLacksIsReplaced) {
  if (std::get<0>(GetParam()) != Placement::nvme) GTEST_SKIP() << "nothing is committed before the first save()";
  begin(2, [](int, ToyModel&) {});
  const std::string store = other().engine.store_directory;
  const auto places = detail::store_directories(store);
  ASSERT_EQ(places.size(), 1u);
  for (const std::uint32_t slot : {0u, 1u}) blank_slot(places[0].in(store), 1, slot);
  on_ranks(2, [&](int, const Runtime::MakeCommunicator& join) {
    const ToySetup setup = other();
    Runtime runtime(setup.runtime, join);
    EXPECT_EQ(Engine::find_commit(runtime, setup.engine), std::nullopt);
  });
  begin(2, [&](int rank, ToyModel& model) {
    if (rank == 0) {
      EXPECT_EQ(model.engine().committed_step(), step_before_);
    }
  });
}

// Each attempt reserves the whole store. Rank 1 dies before it has a manifest.
TEST_P(InitialStateTest, AttemptsThatDiedLeaveNothingOnAnyRanksDrive) {
  if (std::get<0>(GetParam()) != Placement::nvme) GTEST_SKIP() << "there is no store";
  for (const bool own_drives : {false, true}) {
    SCOPED_TRACE(own_drives ? "own drives" : "one drive");
    own_drives_ = own_drives;
    for (int attempt = 0; attempt < 3; ++attempt) {
      begin(2, [](int, ToyModel&) {});
      for (const int rank : own_drives ? std::vector{0, 1} : std::vector{0}) {
        const std::string store = of_rank(rank).engine.store_directory;
        const auto places = detail::store_directories(store);
        ASSERT_EQ(places.size(), 1u) << "rank " << rank << ", attempt " << attempt;
        EXPECT_TRUE(std::filesystem::exists(places[0].in(store) + "/rank-0000" + std::to_string(rank) + ".data"));
      }
      const std::string store = of_rank(1).engine.store_directory;
      const std::string manifest = detail::store_directories(store)[0].in(store) + "/rank-00001.manifest";
      std::filesystem::rename(manifest, manifest + "-new");
    }
  }
}

TEST_P(InitialStateTest, RanksAgreeOnAllOfTheLossScale) {
  using State = LossScaler::State;
  const State base{.scale = 1024, .steps_without_overflow = 3, .hysteresis_left = 2};
  for (const std::optional<State>& other_rank :
       {std::optional<State>(), std::optional(State{1024, 4, 2}), std::optional(State{1024, 3, 1})}) {
    EXPECT_THROW(on_ranks(2,
                          [&](int rank, const Runtime::MakeCommunicator& join) {
                            StoredModel stored(first_.engine.store_directory);
                            InitialState state = state_of(stored);
                            state.loss_scale = rank == 0 ? std::optional(base) : other_rank;
                            const ToySetup setup = other();
                            ToyModel model(setup, join, shape_);
                            model.begin(state);
                          }),
                 CommError);
  }
}

// With such a state training would skip every step, and say nothing.
TEST_P(InitialStateTest, RefusesALossScaleThatCannotBe) {
  for (const LossScaler::State& scale : {LossScaler::State{.scale = 65536, .hysteresis_left = 0},
                                         LossScaler::State{.scale = std::numeric_limits<double>::quiet_NaN()},
                                         LossScaler::State{.scale = -1}, LossScaler::State{.scale = 0x1p65}}) {
    EXPECT_THAT(
        [&] {
          begin(
              1, [](int, ToyModel&) {}, [&](InitialState& state) { state.loss_scale = scale; });
        },
        testing::ThrowsMessage<UsageError>(HasSubstr("a loss scale that cannot be")))
        << scale.scale;
  }
}

TEST_P(InitialStateTest, RefusesMomentsThatCannotBeCommitted) {
  const auto with = [&](State wanted, float value) {
    begin(
        1, [](int, ToyModel&) {},
        [=](InitialState& state) {
          state.moments = [=](ParameterId, State moment, std::uint64_t, std::span<float> out) {
            std::ranges::fill(out, moment == wanted ? value : 0.0f);
          };
        });
  };
  EXPECT_THAT([&] { with(State::moment1, std::numeric_limits<float>::infinity()); },
              testing::ThrowsMessage<UsageError>(HasSubstr("inf cannot be a first moment of parameter 'unit0")));
  EXPECT_THAT([&] { with(State::moment2, -1); },
              testing::ThrowsMessage<UsageError>(HasSubstr("-1 cannot be a second moment of parameter 'unit0")));
}

}  // namespace
}  // namespace hoist::test::initial_state_test
