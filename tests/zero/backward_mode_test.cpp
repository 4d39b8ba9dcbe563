// SPDX-License-Identifier: Apache-2.0
// Update mode `backward`: units are updated while the pass that made their gradients is still under way. The bits are
// those of mode `step`; what would need an update to be undone is refused, or ends the engine and costs no commit.
#include <atomic>
#include <deque>
#include <limits>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/faulty_backend.hpp>
#include <hoist/tests/support/message_of.hpp>
#include <hoist/zero/passes/gradient_ring.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "mode_placements.hpp"
#include "toy_ranks.hpp"

namespace hoist::test::backward_mode_test {
namespace {

constexpr Placement kDevice = Placement::device, kPinned = Placement::pinned, kNvme = Placement::nvme;

class BackwardMode : public ModePlacement {
 protected:
  // What every rank ends in, in mode `step`.
  static const std::vector<RankRun>& expected_on(int ranks, std::uint64_t steps, DType dtype = DType::bf16) {
    static std::map<std::tuple<int, std::uint64_t, DType>, std::vector<RankRun>> made;
    return remembered(made, {ranks, steps, dtype},
                      [&] { return train_on(ranks, simplest(), {.dtype = dtype}, steps); });
  }
};
INSTANTIATE_TEST_SUITE_P(Placements, BackwardMode,
                         testing::Combine(testing::Values(UpdateMode::backward), testing::ValuesIn(kWheres)), name_of);

// What follows from the order of calls (zero/step/update_policy.hpp), on one placement for each way in which states and
// weights are divided between memory and commits.
class BackwardModeRules : public BackwardMode {};
INSTANTIATE_TEST_SUITE_P(
    Placements, BackwardModeRules,
    testing::Combine(testing::Values(UpdateMode::backward),
                     testing::Values(Where{"pinned_pinned", kPinned, kPinned}, Where{"nvme_nvme", kNvme, kNvme},
                                     Where{"nvme_pinned", kNvme, kPinned}, Where{"pinned_nvme", kPinned, kNvme},
                                     Where{"device_pinned_ratio_0", kDevice, kPinned, 0, 0},
                                     Where{"device_nvme_ratio_apart", kDevice, kNvme, 0.3, 0.5, false},
                                     Where{"nvme_half_weights_half", kNvme, kNvme, 0.4, 1, true, 0.6})),
    name_of);

// --- the same bits ---------------------------------------------------------------------------------------------------

TEST_P(BackwardMode, EndsInTheBitsOfModeStepOnOneToThreeRanks) {
  constexpr std::uint64_t kSteps = 6;
  for (const int ranks : {1, 2, 3}) {
    for (const DType dtype : {DType::bf16, DType::fp32}) {
      const ToyShape shape{.dtype = dtype};
      const TempDirectory store;
      ToySetup backward = setup();
      if (where().has_store()) backward.engine.store_directory = store / "store";
      const auto& wanted = expected_on(ranks, kSteps, dtype);
      const auto found = train_on(ranks, backward, shape, kSteps);
      for (std::size_t rank = 0; rank < wanted.size(); ++rank)
        EXPECT_EQ(found[rank].digests, wanted[rank].digests) << ranks << " ranks, " << dtype_name(dtype);
    }
  }
}

// The drive lags as far behind as it can: gradients wait for room in the ring.
TEST_P(BackwardMode, EndsInTheSameBitsWithTheLeastPinnedMemory) {
  for (const int ranks : {1, 2}) {
    const TempDirectory store;
    ToySetup least = setup();
    if (where().has_store()) least.engine.store_directory = store / "store";
    {
      ToyModel model_only(least);
      const Prediction predicted = predict(least.runtime, least.engine, model_only.model(), ranks);
      least.runtime.pinned_memory_bytes = round_up(predicted.pinned.least_bytes, kBlockAlignment);
    }
    const auto& wanted = expected_on(ranks, 5);
    const auto found = train_on(ranks, least, {}, 5);
    for (std::size_t rank = 0; rank < wanted.size(); ++rank) EXPECT_EQ(found[rank].digests, wanted[rank].digests);
  }
}

TEST_P(BackwardModeRules, EndsInTheSameBitsWithSeveralMicroBatches) {
  for (const bool vertical : {false, true}) {
    for (const int held : {1, 3}) {
      const auto train = [&](ToySetup setup) {
        setup.engine.micro_batches_max = 3;
        setup.engine.micro_batch_order = vertical ? MicroBatchOrder::vertical : MicroBatchOrder::horizontal;
        ToyProgram run(setup);
        run.micro_batches = held;
        run.vertical = vertical;
        run.train(1, 4);
        return digests_of(run);
      };
      const TempDirectory store;
      ToySetup backward = setup();
      if (where().has_store()) backward.engine.store_directory = store / "store";
      static std::map<std::pair<bool, int>, Digests> made;
      const Digests& wanted = remembered(made, {vertical, held}, [&] { return train(simplest()); });
      EXPECT_EQ(train(backward), wanted) << held << (vertical ? " vertical" : " horizontal");
    }
  }
}

TEST_P(BackwardModeRules, EndsInTheSameBitsWhateverIsCommitted) {
  if (!where().has_store()) GTEST_SKIP() << "nothing is committed by steps";
  for (const bool durable : {false, true}) {
    const TempDirectory store;
    ToySetup s = setup();
    s.engine.store_directory = store / "store";
    s.engine.durability = durable ? tiers::Durability::step : tiers::Durability::none;
    s.engine.commit_every = durable ? 3 : 1;
    s.engine.keep_steps = durable ? 2 : 0;
    ToyProgram run(s);
    for (std::uint64_t step = 1; step <= 7; ++step) {
      run.train(step, step);
      if (durable && step % 2 == 0)
        run.engine().save("step" + std::to_string(step), std::as_bytes(std::span(&step, 1)));
    }
    EXPECT_EQ(digests_of(run), expected(7)) << (durable ? "every 3" : "none");
  }
}

TEST_P(BackwardModeRules, EndsInTheSameBitsWithEveryOptimizer) {
  using optim::OptimizerKind;
  const optim::OptimizerOptions all[] = {
      {.kind = OptimizerKind::adam, .learning_rate = 1e-2},
      {.kind = OptimizerKind::adagrad, .learning_rate = 1e-2},
      {.kind = OptimizerKind::lion, .learning_rate = 1e-3},
      {.kind = OptimizerKind::sgd, .learning_rate = 1e-2, .momentum = 0.9},
      {.kind = OptimizerKind::sgd, .learning_rate = 1e-2},
      {.learning_rate = 1e-2, .moments = MomentType::bf16},
      {.learning_rate = 1e-2, .moments = MomentType::fp8, .remainder = RemainderType::int8}};
  for (const optim::OptimizerOptions& optimizer : all) {
    if (optimizer.moments == MomentType::fp8 && !where().host_accessible) continue;  // refused
    const TempDirectory store;
    ToySetup backward = setup(), step = simplest();
    if (where().has_store()) backward.engine.store_directory = store / "store";
    for (ToySetup* s : {&backward, &step}) s->engine.optimizer_defaults = optimizer;
    static std::map<std::ptrdiff_t, Digests> made;
    const Digests& wanted = remembered(made, &optimizer - all, [&] { return train_once(step, {}, 4); });
    EXPECT_EQ(train_once(backward, {}, 4), wanted) << static_cast<int>(optimizer.kind);
  }
}

// --- what cannot be undone is refused --------------------------------------------------------------------------------

TEST_P(BackwardModeRules, NothingButTheStepFollowsThePass) {
  const auto run = fresh();
  run->train(1, 2);
  run->pass(3);
  std::vector<float> values(10);
  EXPECT_THROW((void)run->engine().begin(Pass::evaluate), UsageError);
  EXPECT_THROW((void)run->engine().begin(Pass::train), UsageError);
  EXPECT_THROW(run->engine().read(run->matrix(0), State::master, 0, values), UsageError);
  EXPECT_THROW(run->engine().read(run->matrix(0), State::gradient, 0, values), UsageError);
  EXPECT_THROW(run->engine().write(run->matrix(0), State::master, 0, values), UsageError);
  EXPECT_THROW(run->engine().settle(), UsageError);
  EXPECT_THROW(run->engine().gradient_norm(), UsageError);
  EXPECT_THROW(run->engine().step({.gradient_norm_max = 1}), UsageError);
  EXPECT_THROW(run->engine().save("now", {}), UsageError);
  EXPECT_THROW(run->engine().set_learning_rate(GroupId{0}, 0.5), UsageError);
  run->engine().set_learning_rate(GroupId{0}, run->engine().learning_rate(GroupId{0}));  // as it is
  EXPECT_TRUE(run->engine().step().applied);                                             // none of these did any harm
  run->engine().set_learning_rate(GroupId{0}, 0.5);
  run->engine().set_learning_rate(GroupId{0}, 1e-2);
  run->train(4, 5);
  EXPECT_EQ(digests_of(*run), expected(5));
}

TEST_P(BackwardModeRules, AUnitIsNotGatheredAfterItsFinish) {
  const auto run = fresh();
  int refused = 0;
  run->in_backward = [&](std::size_t unit) {
    try {
      (void)run->engine().gather(run->unit(unit), run->stream());
    } catch (const UsageError& error) {
      refused += std::string(error.what()).find("forward") != std::string::npos ? 1 : 0;
    }
    EXPECT_THROW(run->engine().set_learning_rate(GroupId{0}, 0.5), UsageError);
  };
  run->train(1, 4);
  EXPECT_EQ(refused, 16);
  EXPECT_EQ(digests_of(*run), expected(4));
}

// Before the last micro-batch units may be gathered after their finish. The plan of the last one then fetches them,
// too, while they are being updated; some were read ahead before that.
TEST_P(BackwardModeRules, AFetchThatWasPlannedAfterTheFinishWaitsForTheUpdate) {
  ToyShape shape;
  shape.tied = false;
  const auto train = [&](ToySetup setup) {
    setup.engine.micro_batches_max = 2;
    setup.engine.reuse_distance_elements = 0;
    setup.engine.prefetch_elements = 60000;  // the last unit is fetched once more as unit 1 is finished
    setup.engine.staging_buffer_count = 4;
    ToyProgram run(setup, shape);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      run.in_backward = [&](std::size_t unit) {
        if (unit > 0) return;
        for (const std::size_t again : {3u, 2u, 1u, 0u})
          run.engine().gather(run.unit(again), run.stream()).release(run.stream());
      };
      run.pass(step, {.micro_batch = 0, .micro_batches = 2});
      run.in_backward = [](std::size_t unit) {  // long enough for an update
        if (unit > 1) std::this_thread::sleep_for(std::chrono::milliseconds(60));
      };
      run.pass(step, {.micro_batch = 1, .micro_batches = 2});
      EXPECT_TRUE(run.engine().step().applied);
    }
    return digests_of(run);
  };
  static const Digests wanted = train(simplest());
  EXPECT_EQ(train(setup()), wanted);
}

TEST_P(BackwardModeRules, AGradientThatIsNotFiniteEndsTheEngineAndCostsNoCommit) {
  auto run = fresh();
  run->train(1, 2);
  run->gradient_scale = std::numeric_limits<float>::infinity();
  run->pass(3);
  EXPECT_THAT([&] { run->engine().step(); }, testing::ThrowsMessage<Error>(testing::HasSubstr("not finite")));
  if (where().has_store()) {
    EXPECT_EQ(run->engine().committed_step(), 2u);
  }
  run->gradient_scale = 1;
  goes_on_from(std::move(run), 2);
}

TEST_P(BackwardModeRules, APassLeftAfterAFinishEndsTheEngineAndCostsNoCommit) {
  auto run = fresh();
  run->train(1, 2);
  run->in_backward = [&](std::size_t unit) {
    if (unit == 1) throw std::runtime_error("the program's own");
  };
  EXPECT_THROW(run->pass(3), std::runtime_error);
  run->in_backward = [](std::size_t) {};
  run->engine().discard();
  goes_on_from(std::move(run), 2);
}

TEST_P(BackwardModeRules, DiscardedGradientsEndTheEngineAndCostNoCommit) {
  auto run = fresh();
  run->train(1, 2);
  run->pass(3);
  run->engine().discard();
  EXPECT_THAT([&] { run->engine().settle(); },
              testing::ThrowsMessage<StepUndoneError>(
                  testing::HasSubstr(where().has_store() ? "restore the last commit" : "committed: start anew")));
  goes_on_from(std::move(run), 2);
}

// A drive whose writes begin late.
void make_late(ToySetup& setup, const std::shared_ptr<Faults>& faults, std::chrono::milliseconds delay) {
  faults->add(
      {.kind = Fault::Kind::delay, .operation = aio::Operation::write, .count = Faults::kForever, .delay = delay});
  setup.runtime.make_aio_backend = [faults](const aio::DriveQueueOptions& io) {
    return make_faulty_backend(io, faults);
  };
}

TEST(BackwardModeCommit, ThatFailsIsNotHiddenByTheStepGivenUpAfterIt) {
  const TempDirectory directory;
  ToySetup setup = setup_of({"", kPinned, kNvme}, UpdateMode::backward, directory / "store");
  setup.engine.update_buffer_count = 16;  // no unit waits for another's writes
  const auto faults = std::make_shared<Faults>(1);
  make_late(setup, faults, std::chrono::milliseconds(100));
  ToyProgram model(setup);
  model.train(1, 2);
  model.engine().settle();
  faults->add({.operation = aio::Operation::sync, .count = Faults::kForever});
  model.train(3, 3);
  model.pass(4);
  ASSERT_TRUE(model.engine().has_begun_step());
  model.engine().discard();
  EXPECT_THROW(model.engine().settle(), IoError);
  EXPECT_EQ(model.engine().committed_step(), 2u);
}

TEST(BackwardModeOnRanks, AllHearOfAGradientThatIsNotFiniteOnOne) {
  const TempDirectory directory;
  const ToySetup setup = setup_of({"", kNvme, kNvme}, UpdateMode::backward, directory / "store");
  std::atomic<int> heard{0};
  on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyProgram model(setup, join);
    model.train(1, 2);
    if (rank == 1) model.gradient_scale = std::numeric_limits<float>::infinity();
    model.pass(3);
    try {
      model.engine().step();
    } catch (const Error&) {
      ++heard;
    }
    EXPECT_EQ(model.engine().committed_step(), 2u);
  });
  EXPECT_EQ(heard, 3);
}

// Every rank tells the others, who may be committing the last step.
TEST(BackwardModeOnRanks, GradientsThatAreDiscardedCostNoCommitThatIsUnderWay) {
  const TempDirectory directory;
  ToySetup setup = setup_of({"", kPinned, kNvme}, UpdateMode::backward, directory / "store");
  setup.engine.update_buffer_count = 16;  // no unit waits for another's writes
  make_late(setup, std::make_shared<Faults>(1), std::chrono::milliseconds(100));
  on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyProgram model(setup, join);
    model.train(1, 2);
    model.pass(3);
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * rank));
    model.engine().discard();
    EXPECT_EQ(model.engine().committed_step(), 2u);
  });
  on_ranks(3, [&](int, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join);
    EXPECT_EQ(model.restore().step, 2u);
  });
}

TEST(BackwardModeOptions, AreRefusedWhereAStepCanBeChangedOrVetoed) {
  const auto refused = [](const std::function<void(EngineOptions&)>& change) {
    ToySetup setup = setup_of({"", kPinned, kPinned}, UpdateMode::backward, "");
    change(setup.engine);
    return message_of<ConfigError>([&] { ToyModel(setup).initialize(); });
  };
  EXPECT_EQ(refused([](EngineOptions&) {}), "no error");
  EXPECT_NE(refused([](EngineOptions& o) { o.gradient_clipping = 1; }).find("gradient_clipping"), std::string::npos);
  EXPECT_NE(refused([](EngineOptions& o) { o.loss_scale = toy_loss_scale(); }).find("fp16"), std::string::npos);
  EXPECT_NE(refused([](EngineOptions& o) { o.optimizer = o.parameters = kDevice; }).find("offloaded"),
            std::string::npos);
}

// --- what step() waits for -------------------------------------------------------------------------------------------

// The last unit's gradient is summed up by the thread that hands it on, for the report alone.
TEST(BackwardModeNorm, CountsTheUnitThatCameLast) {
  const auto norms = [](UpdateMode mode) {
    ToySetup setup = setup_of({"", kPinned, kPinned}, mode, "");
    setup.engine.gradient_clipping = 0;
    setup.runtime.update_threads = 1;
    setup.runtime.device_memory_bytes = 64 * kMiB;
    setup.runtime.pinned_memory_bytes = 256 * kMiB;
    ToyProgram run(setup, {.matrices = {3'000'000, 1000}, .frozen = false, .tied = false});
    run.train(1, 3);
    std::vector<double> found;
    for (const StepReport& report : run.reports) found.push_back(report.gradient_norm);
    return found;
  };
  EXPECT_EQ(norms(UpdateMode::backward), norms(UpdateMode::step));
}

// Where every unit's states are on the device, nothing but the step itself waits until the step before is written.
TEST(BackwardModeOpen, AStepWhoseStatesAreAllOnTheDeviceWaitsForTheOneBefore) {
  const TempDirectory directory;
  ToySetup setup = setup_of({"", kDevice, kNvme, 0, 0, false}, UpdateMode::backward, directory / "store");
  make_late(setup, std::make_shared<Faults>(1), std::chrono::milliseconds(20));
  ToySetup simplest = setup_of({"", kPinned, kPinned}, UpdateMode::step, "");
  simplest.engine.gradient_clipping = 0;
  ToyProgram run(setup);
  run.train(1, 4);
  EXPECT_EQ(digests_of(run), train_once(simplest, {}, 4));
}

// --- memory ----------------------------------------------------------------------------------------------------------

TEST(BackwardModeMemory, HoldsNoGradientsBeyondTheLargestUnits) {
  const Model model = uniform_model(100 * 16384 * 10, 100);  // ten tiles a unit
  const auto least = [&](UpdateMode mode, unsigned micro_batches = 1) {
    EngineOptions options = setup_of({"", kPinned, kNvme}, mode, "/nowhere").engine;
    options.micro_batches_max = micro_batches;
    return predict({}, options, model, 1).pinned.least_bytes;
  };
  const std::uint64_t unit = 2 * 16384 * 10;
  EXPECT_EQ(least(UpdateMode::forward) - least(UpdateMode::backward), 99 * unit);
  EXPECT_EQ(least(UpdateMode::forward, 2), least(UpdateMode::backward, 2));  // sums over passes have homes
}

TEST(BackwardModeMemory, ARingOfItsOwnIsNeverMoreThanAllGradients) {
  const Model model = uniform_model(100 * 16384 * 10, 100);
  const auto held = [&](UpdateMode mode) {
    const EngineOptions options = setup_of({"", kPinned, kNvme}, mode, "/nowhere").engine;
    return predict({}, options, model, 1).pinned.bytes;
  };
  EXPECT_EQ(held(UpdateMode::forward), held(UpdateMode::backward));  // 1 GiB is plenty
}

TEST(GradientRing, KeepsPiecesApartAndWaitsForTheOldest) {
  std::vector<std::byte> block(100);
  detail::GradientRing ring(block);
  std::deque<Promise> promises;
  const auto take = [&](std::uint64_t bytes) {
    const auto offset = static_cast<std::uint64_t>(ring.take(bytes) - block.data());
    promises.emplace_back();
    ring.lend(promises.back().completion());
    return offset;
  };
  EXPECT_EQ(take(40), 0u);
  EXPECT_EQ(take(40), 40u);
  promises[0].complete();
  EXPECT_EQ(take(30), 0u);  // 20 at the end are too few
  EXPECT_EQ(take(10), 30u);
  std::atomic<bool> came{false};
  std::uint64_t fifth = 1;
  std::thread waiting([&] {
    fifth = take(60);
    came = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(came);
  promises[1].fail(std::make_exception_ptr(Error("an update")));  // 60 are free from 40 on
  waiting.join();
  EXPECT_EQ(fifth, 40u);
  promises[3].complete();
  promises[2].complete();
  promises[4].complete();
  EXPECT_EQ(take(100), 0u);
  promises[5].complete();
}

}  // namespace
}  // namespace hoist::test::backward_mode_test
