// SPDX-License-Identifier: Apache-2.0
// Tests what the engine offers an optimizer whose program keeps weights and gradients itself: gradients that are
// averaged already, and state that comes from elsewhere.
#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::given_state_test {
namespace {

ToySetup reduced(Placement placement, const std::string& directory = "") {
  ToySetup setup = toy_setup(placement, placement, directory);
  setup.engine.gradients_are_reduced = true;
  return setup;
}

TEST(ReducedGradients, TwoRanksEndInTheBitsOfOneAndSendWeightsOnly) {
  const TempDirectory directory;
  constexpr std::uint64_t kSteps = 4;
  ToySetup alone = toy_setup(Placement::pinned, Placement::pinned);
  alone.engine.gradient_clipping = 0;  // the norm adds up in the order of shards
  const Digests reference = train_once(alone, ToyShape{}, kSteps);
  for (const Placement placement : {Placement::pinned, Placement::nvme}) {
    ToySetup setup = reduced(placement, placement == Placement::nvme ? directory / "store" : std::string());
    setup.engine.gradient_clipping = 0;
    setup.engine.reuse_distance_elements = 0;  // every use fetches, as the formula counts
    on_ranks(2, [&](int, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup, join);
      model.equal_gradients = true;
      model.initialize();
      model.train(1, 1);  // records the passes
      const std::uint64_t sent = model.bytes_moved(2, kSteps)[Link::wire];
      const double formula = static_cast<double>(model.engine().formula_bytes().wire * (kSteps - 1));
      EXPECT_NEAR(static_cast<double>(sent), formula, 0.02 * formula);
      Digests ends = digests_of(model);
      ends.losses = reference.losses;  // each rank adds its own up
      EXPECT_EQ(ends, reference);
    });
  }
}

// Everything that a parameter has, by state.
using StateOfAll = std::map<State, std::vector<std::vector<float>>>;

StateOfAll state_of(ToyModel& model) {
  StateOfAll all;
  for (const State state : {State::master, State::moment1, State::moment2}) {
    for (std::uint32_t p = 0; p < model.model().parameters().size(); ++p) {
      std::vector<float> values(element_count(model.model().parameters()[p]));
      if (model.engine().keeps(ParameterId{p}, state)) model.engine().read(ParameterId{p}, state, 0, values);
      all[state].push_back(std::move(values));
    }
  }
  return all;
}

void take(const StateOfAll& all, ParameterId parameter, State state, std::uint64_t first, std::span<float> out) {
  std::copy_n(all.at(state)[parameter.index].begin() + static_cast<std::ptrdiff_t>(first), out.size(), out.begin());
}

void replace(ToyModel& model, std::uint64_t step, const StateOfAll& all, std::span<const std::byte> caller_state = {},
             std::optional<LossScaler::State> scale = {}) {
  const auto moments = [&](ParameterId p, State state, std::uint64_t first, std::span<float> out) {
    take(all, p, state, first, out);
  };
  model.engine().replace_state({.masters = [&](ParameterId p, std::uint64_t first,
                                               std::span<float> out) { take(all, p, State::master, first, out); },
                                .moments = moments,
                                .step = step,
                                .loss_scale = scale},
                               caller_state);
}

class GivenState : public testing::TestWithParam<Placement> {
 protected:
  ToySetup setup(const std::string& name) const {
    return toy_setup(GetParam(), GetParam(), GetParam() == Placement::nvme ? directory_ / name : std::string());
  }
  const TempDirectory directory_;
};

// Bias correction needs the number of steps, and a commit needs all of it.
TEST_P(GivenState, TrainingGoesOnWithItAndCommitsIt) {
  const ToySetup first = setup("first"), second = setup("second");
  StateOfAll at_three;
  Digests reference;
  {
    ToyProgram model(first);
    model.train(1, 3);
    at_three = state_of(model);
    model.train(4, 5);
    reference = digests_of(model);
  }
  Runtime runtime(second.runtime);
  ToyModel model(runtime, second.engine, {.seed = 5});
  model.initialize();
  model.train(1, 1);
  replace(model, 3, at_three);
  EXPECT_EQ(model.engine().step_count(), 3u);
  if (GetParam() == Placement::nvme) {
    EXPECT_EQ(model.engine().committed_step(), 3u);
    model.close();
    EXPECT_EQ(model.restore().step, 3u);
  }
  ToyModel continued(runtime, second.engine);  // makes the gradients of the first program
  if (GetParam() == Placement::nvme) {
    model.close();
    continued.restore();
  } else {
    continued.initialize();
    replace(continued, 3, at_three);
  }
  continued.train(4, 5);
  Digests ends = digests_of(continued);
  ends.losses = reference.losses;
  EXPECT_EQ(ends, reference);
}

TEST_P(GivenState, MastersChangeAloneAndOnlyWhereTheyAreMeantTo) {
  const ToySetup used = setup("store");
  ToyProgram model(used);
  model.train(1, 2);
  StateOfAll expected = state_of(model);
  const ParameterId changed = model.matrix(2);
  std::vector<float>& values = expected[State::master][changed.index];
  for (std::size_t i = 0; i < values.size(); i += 3) values[i] = 0.25f;
  model.engine().change_masters([&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
    if (parameter != changed) return;
    for (std::size_t i = 0; i < out.size(); ++i)
      if ((first + i) % 3 == 0) out[i] = 0.25f;
  });
  EXPECT_EQ(model.engine().step_count(), 2u);
  EXPECT_EQ(state_of(model), expected);
  if (GetParam() == Placement::nvme) {
    model.restore();
    EXPECT_EQ(state_of(model), expected);
  }
  model.train(3, 3);  // gathers the new weights
  EXPECT_NE(state_of(model), expected);
}

// New values of some elements of every parameter, trained or frozen.
class ManyChanges {
 public:
  explicit ManyChanges(ToyModel& model) {
    for (std::uint32_t p = 0; p < model.model().parameters().size(); ++p) {
      const ParameterId parameter{p};
      const std::size_t count = element_count(model.model().parameters()[p]);
      values_.emplace_back(count - 1, 0.25f + static_cast<float>(p));
      chosen_.emplace_back();
      if (p % 2 == 0) {
        for (std::size_t i = 0; i < count - 1; ++i) chosen_.back().push_back(i % 3 == 0 ? 1 : 0);
        values_.back()[1] = std::numeric_limits<float>::quiet_NaN();  // is not written
      }
      const UnitId unit = model.model().unit_of(parameter);
      in_units_[unit.index].push_back(
          {.parameter = parameter, .first_element = 1, .values = values_.back(), .chosen = chosen_.back()});
      if (!model.engine().keeps(parameter, State::moment2)) continue;
      in_units_[unit.index].push_back(
          {.parameter = parameter, .state = State::moment2, .first_element = 1, .values = kMoments});
    }
    for (const auto& [unit, changes] : in_units_) units.push_back(UnitId{unit});
  }
  std::vector<StateChange> operator()(UnitId unit) {
    ++calls;
    return in_units_.at(unit.index);
  }
  void apply_to(StateOfAll& all) const {
    for (const auto& [unit, changes] : in_units_) {
      for (const StateChange& change : changes) {
        for (std::size_t i = 0; i < change.values.size(); ++i)
          if (change.chosen.empty() || change.chosen[i] != 0)
            all[change.state][change.parameter.index][change.first_element + i] = change.values[i];
      }
    }
  }

  std::vector<UnitId> units;
  std::size_t calls = 0;

 private:
  static constexpr std::array<float, 2> kMoments{0.5f, 0.125f};
  std::deque<std::vector<float>> values_;
  std::deque<std::vector<std::uint8_t>> chosen_;
  std::map<std::uint32_t, std::vector<StateChange>> in_units_;
};

std::uint64_t written_apart(ToyModel& model) {
  return model.runtime().ledger().totals(Link::nvme_write, Ledger::Account::outside_steps).bytes;
}

TEST_P(GivenState, ManyParametersAreWrittenInOneCommitThatRewritesEachRecordOnce) {
  const ToySetup used = setup("store");
  ToyProgram model(used);
  model.train(1, 2);
  StateOfAll expected = state_of(model);
  ManyChanges changes(model);
  changes.apply_to(expected);
  const std::vector program{std::byte{7}};
  std::uint64_t commit_bytes = written_apart(model);
  model.engine().write({}, std::ref(changes));
  EXPECT_EQ(written_apart(model), commit_bytes) << "for no change at all";
  model.engine().write({}, std::ref(changes), program);
  commit_bytes = written_apart(model) - commit_bytes;
  // One write() to each record.
  std::uint64_t bytes = written_apart(model);
  std::set<std::pair<std::uint32_t, bool>> records;
  for (std::uint32_t p = 0; p < model.model().parameters().size(); ++p) {
    const bool trainable = model.model().parameters()[p].trainable;
    if (!records.emplace(model.model().unit_of(ParameterId{p}).index, trainable).second) continue;
    std::vector<float> same(1);
    model.engine().read(ParameterId{p}, State::master, 0, same);
    model.engine().write(ParameterId{p}, State::master, 0, same);
  }
  bytes = written_apart(model) - bytes;
  const std::uint64_t before = written_apart(model);
  model.engine().write(changes.units, std::ref(changes), program);
  EXPECT_EQ(changes.calls, 2 * changes.units.size());
  EXPECT_EQ(written_apart(model) - before, bytes - (records.size() - 1) * commit_bytes);
  EXPECT_EQ(bytes > 0, GetParam() == Placement::nvme);
  EXPECT_EQ(state_of(model), expected);
  if (GetParam() == Placement::nvme) {
    EXPECT_EQ(model.engine().committed_step(), 2u);
    EXPECT_EQ(model.restore().caller_state, program);
    EXPECT_EQ(state_of(model), expected);
    model.engine().write(changes.units, std::ref(changes));
    EXPECT_EQ(model.restore().caller_state, program) << "the last one is kept";
  }
  model.train(3, 3);  // gathers the new weights
  EXPECT_NE(state_of(model), expected);
}

TEST_P(GivenState, ManyParametersAreWrittenByRanksThatHoldPartsOfThem) {
  const ToySetup used = setup("store");
  on_ranks(3, [&](int, const Runtime::MakeCommunicator& join) {
    ToyProgram model(used, join);
    model.train(1, 2);
    StateOfAll expected = state_of(model);
    ManyChanges changes(model);
    changes.apply_to(expected);
    model.engine().write(changes.units, std::ref(changes), std::vector{std::byte{7}});
    EXPECT_EQ(state_of(model), expected);
    if (GetParam() == Placement::nvme) {
      EXPECT_EQ(model.restore().caller_state, std::vector{std::byte{7}});
      EXPECT_EQ(state_of(model), expected);
    }
  });
}

TEST_P(GivenState, OfManyWritesNoneIsMadeWhereOneIsRefused) {
  const ToySetup used = setup("store");
  ToyProgram model(used);
  model.train(1, 2);
  const StateOfAll before = state_of(model);
  const std::uint64_t bytes = written_apart(model);
  ManyChanges changes(model);
  const auto refused_with = [&](const auto& change_one, const std::vector<UnitId>& units) {
    const UnitChanges changed = [&](UnitId unit) {
      std::vector<StateChange> of_unit = changes(unit);
      if (unit == units.back()) change_one(of_unit.back());
      return of_unit;
    };
    EXPECT_THROW(model.engine().write(units, changed), UsageError);
  };
  const std::vector<float> infinite{std::numeric_limits<float>::infinity()};
  const std::vector<std::uint8_t> one{1}, two{1, 1};
  refused_with([&](StateChange& change) { change.values = infinite, change.chosen = one; }, changes.units);
  refused_with([&](StateChange& change) { change.first_element = 1'000'000; }, changes.units);
  refused_with([&](StateChange& change) { change.parameter = model.matrix(0); }, changes.units);
  refused_with([&](StateChange& change) { change.parameter = ParameterId{1'000}; }, changes.units);
  refused_with([&](StateChange& change) { change.state = State::gradient; }, changes.units);
  refused_with([&](StateChange& change) { change.values = change.values.first(1), change.chosen = two; },
               changes.units);
  refused_with([](StateChange&) {}, {changes.units[1], changes.units[0]});
  refused_with([&](StateChange&) { throw UsageError("the program's own"); }, changes.units);
  EXPECT_EQ(state_of(model), before);
  EXPECT_EQ(written_apart(model), bytes);
  model.train(3, 3);
}

TEST_P(GivenState, AfterAnErrorBetweenWritesTheLastCommitStays) {
  const ToySetup used = setup("store");
  ToyProgram model(used);
  model.train(1, 2);
  const StateOfAll before = state_of(model);
  ManyChanges changes(model);
  const UnitChanges fails = [&](UnitId unit) {
    if (changes.calls == 2 * changes.units.size() - 1) throw UsageError("the program's own");
    return changes(unit);
  };
  try {
    model.engine().write(changes.units, fails);
    ADD_FAILURE() << "the error was lost";
  } catch (const UsageError& error) {
    ADD_FAILURE() << "it says that nothing has changed: " << error.what();
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("own"));
  }
  EXPECT_ANY_THROW(model.train(3, 3));
  if (GetParam() != Placement::nvme) return;
  EXPECT_EQ(model.restore().step, 2u);
  EXPECT_EQ(state_of(model), before);
}

// A tile that is being changed is in no state to be read, and its step of the store is open.
TEST_P(GivenState, ACallbackThatCallsTheEngineEndsItAndNotTheStore) {
  for (const bool replaces : {true, false}) {
    const ToySetup used = setup(replaces ? "replaced" : "changed");
    ToyProgram model(used);
    const StateOfAll before = state_of(model);
    const Initializer reads = [&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
      model.engine().read(parameter, State::master, first, out);
    };
    EXPECT_THAT(
        [&] { replaces ? model.engine().replace_state({.masters = reads}) : model.engine().change_masters(reads); },
        testing::ThrowsMessage<Error>(
            testing::HasSubstr(replaces ? "callback of replace_state()" : "callback of change_masters()")));
    if (GetParam() != Placement::nvme) continue;
    model.restore();
    EXPECT_EQ(state_of(model), before);
  }
}

// An error of the program's own that has a type by which hoist says that nothing was changed.
TEST(GivenStateErrors, ACallbackThatThrowsOnTheWayEndsTheEngineWhateverItThrows) {
  const TempDirectory directory;
  const std::vector<std::function<void()>> throwers{
      [] { throw UsageError("the program's own"); },
      [] { throw BudgetError({.tier = "device", .have_bytes = 1, .need_bytes = 2, .key = "k", .detail = "its own"}); },
      [] { throw std::runtime_error("its own"); }};
  int run = 0;
  for (const auto& [parameters, optimizer] :
       {std::pair(Placement::pinned, Placement::pinned), std::pair(Placement::pinned, Placement::nvme),
        std::pair(Placement::nvme, Placement::nvme)}) {
    for (const bool replaces : {true, false}) {
      for (const auto& thrower : throwers) {
        SCOPED_TRACE(run);
        const ToySetup setup = toy_setup(parameters, optimizer, directory / std::to_string(run++));
        ToyProgram model(setup);
        model.train(1, 2);
        model.engine().save("", {}).wait();
        const StateOfAll before = state_of(model);
        const Initializer fails = [&](ParameterId parameter, std::uint64_t, std::span<float> out) {
          if (parameter.index >= 2) thrower();
          std::ranges::fill(out, 7.0f);
        };
        const auto call = [&] {
          replaces ? model.engine().replace_state({.masters = fails, .step = 2}) : model.engine().change_masters(fails);
        };
        try {
          call();
          ADD_FAILURE() << "the error was lost";
        } catch (const UsageError& error) {
          ADD_FAILURE() << "it says that nothing has changed: " << error.what();
        } catch (const BudgetError& error) {
          ADD_FAILURE() << "it says that nothing has changed: " << error.what();
        } catch (const std::exception& error) {
          EXPECT_THAT(error.what(), testing::HasSubstr("own"));
        }
        EXPECT_ANY_THROW(model.train(3, 3));
        EXPECT_ANY_THROW(model.engine().save("", {}));
        EXPECT_ANY_THROW(state_of(model));
        EXPECT_EQ(model.restore().step, 2u);
        EXPECT_EQ(state_of(model), before);
      }
    }
  }
}

TEST_P(GivenState, WhatCannotBeTrainedWithEndsTheEngineAndNotTheStore) {
  const ToySetup used = setup("store");
  ToyProgram model(used);
  model.train(1, 2);
  StateOfAll all = state_of(model);
  const StateOfAll before = all;
  if (GetParam() == Placement::nvme) {
    EXPECT_THROW(replace(model, 1, all), UsageError) << "older than the commit";
    EXPECT_EQ(state_of(model), before);
  }
  all[State::moment2].back().back() = -1;
  EXPECT_THROW(replace(model, 2, all), Error);
  EXPECT_THROW(model.train(3, 3), Error);
  if (GetParam() != Placement::nvme) return;
  EXPECT_EQ(model.restore().step, 2u);
  EXPECT_EQ(state_of(model), before);
}

TEST_P(GivenState, IsRefusedWhereTheStoreHasALaterStep) {
  const TempDirectory store;
  ToySetup used = setup("store");
  used.engine.store_directory = store / "store";
  ToyProgram model(used);
  model.train(1, 2);
  const StateOfAll before = state_of(model);
  model.engine().save("", {}).wait();
  EXPECT_THROW(replace(model, 1, before), UsageError);
  EXPECT_THROW(replace(model, ~std::uint64_t{0}, before), UsageError) << "the next step would be the first again";
  EXPECT_EQ(model.engine().step_count(), 2u);
  EXPECT_EQ(state_of(model), before);
  replace(model, 2, before);
  model.train(3, 3);
}

// Masters that are changed alone are no reason to forget what the scale has come to.
TEST_P(GivenState, WithoutALossScaleBeginsWithThatOfTheOptions) {
  ToySetup used = setup("store");
  used.engine.weights_dtype = DType::fp16;
  used.engine.loss_scale = toy_loss_scale();
  ToyShape shape;
  shape.dtype = DType::fp16;
  ToyProgram model(used, shape);
  const float first = model.engine().loss_scale();
  model.train(1, 6);
  const float present = model.engine().loss_scale();
  ASSERT_NE(present, first);
  model.engine().change_masters([](ParameterId, std::uint64_t, std::span<float>) {});
  EXPECT_EQ(model.engine().loss_scale(), present);
  replace(model, model.engine().step_count(), state_of(model));
  EXPECT_EQ(model.engine().loss_scale(), first);
  if (GetParam() != Placement::nvme) return;
  model.close();
  model.restore();
  EXPECT_EQ(model.engine().loss_scale(), first);
}

TEST_P(GivenState, IsCommittedWithItsCallerStateAndLossScale) {
  if (GetParam() != Placement::nvme) GTEST_SKIP() << "nothing is committed before the first save()";
  ToySetup used = setup("store");
  used.engine.weights_dtype = DType::fp16;
  used.engine.loss_scale = toy_loss_scale();
  ToyShape shape;
  shape.dtype = DType::fp16;
  ToyModel model(used, shape);
  const std::vector kOld{std::byte{1}}, kNew{std::byte{2}, std::byte{3}};
  model.initialize(kOld);
  const auto scale = static_cast<double>(model.engine().loss_scale()) / 2;
  replace(model, 3, state_of(model), kNew, LossScaler::State{.scale = scale});
  model.close();
  EXPECT_EQ(model.restore().caller_state, kNew);
  EXPECT_EQ(model.engine().loss_scale(), static_cast<float>(scale));
  model.engine().change_masters([](ParameterId, std::uint64_t, std::span<float>) {});
  model.close();
  EXPECT_EQ(model.restore().caller_state, kNew) << "the last one is kept";
}

INSTANTIATE_TEST_SUITE_P(Places, GivenState, testing::Values(Placement::pinned, Placement::nvme));

}  // namespace
}  // namespace hoist::test::given_state_test
