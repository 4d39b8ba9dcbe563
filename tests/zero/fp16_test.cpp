// SPDX-License-Identifier: Apache-2.0
// fp16 weights and the loss scale in the engine: all ranks skip a step that overflows, which changes nothing; scaled
// gradients are unscaled; and a restore brings back the scale of the commit.
#include <cmath>
#include <cstring>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/tests/support/message_of.hpp>

#include "loss_scale_golden.hpp"
#include "toy_ranks.hpp"

namespace hoist::test::fp16_test {
namespace {

using testing::HasSubstr;

// Makes every fp16 gradient infinite; those of fp32 stay finite.
constexpr float kOverflow = 1e25f;

const ToyShape kSmall{.matrices = {3000, 20000}, .norm = 33, .dtype = DType::fp16};

ToySetup fp16_setup(Placement parameters, Placement optimizer, const std::string& directory = "") {
  ToySetup setup = toy_setup(parameters, optimizer, directory);
  setup.engine.weights_dtype = DType::fp16;
  setup.engine.loss_scale = {.dynamic = true, .scale = 65536, .window = 3, .hysteresis = 1};
  return setup;
}

struct Session : ToyModel {
  explicit Session(const ToySetup& setup, const ToyShape& shape = kSmall) : ToyModel(setup, shape) {}
  Session& fresh() {
    initialize();
    return *this;
  }
  StepReport attempt(std::uint64_t step, float scale = 1) {
    gradient_scale = scale;
    train(step, step);
    return reports.back();
  }
  Digests digests() { return state_digests(*this); }
};

// --- weights ---------------------------------------------------------------------------------------------------------

class Fp16Test : public testing::TestWithParam<std::tuple<Placement, UpdateMode>> {
 protected:
  Placement placement() const { return std::get<0>(GetParam()); }
  ToySetup setup() const {
    ToySetup setup = fp16_setup(placement(), placement(), placement() == Placement::nvme ? directory_ / "store" : "");
    setup.engine.update_mode = std::get<1>(GetParam());
    return setup;
  }
  TempDirectory directory_;
};
INSTANTIATE_TEST_SUITE_P(Engine, Fp16Test,
                         testing::Combine(testing::Values(Placement::pinned, Placement::nvme),
                                          testing::Values(UpdateMode::forward, UpdateMode::step)));

TEST_P(Fp16Test, GatheredWeightsAreTheMastersRounded) {
  Session run(setup());
  run.fresh().train(1, 4);
  for (std::size_t u = 0; u < kSmall.matrices.size(); ++u) {
    std::vector<std::uint16_t> weights(static_cast<std::size_t>(kSmall.matrices[u]));
    {
      const PassScope scope = run.engine().begin(Pass::evaluate);
      Lease lease = run.engine().gather(run.unit(u), run.stream());
      const TensorView view = lease.view(run.matrix(u));
      ASSERT_EQ(view.dtype, DType::fp16);
      run.stream().launch("look", [&] { std::memcpy(weights.data(), view.data, 2 * weights.size()); });
      run.stream().synchronize();
      lease.release(run.stream());
    }
    std::vector<float> masters(weights.size());
    run.engine().read(run.matrix(u), State::master, 0, masters);
    std::size_t rounded = 0;
    for (std::size_t i = 0; i < masters.size(); ++i) {
      ASSERT_EQ(weights[i], float_to_fp16(masters[i])) << "unit " << u << " element " << i;
      rounded += fp16_to_float(weights[i]) != masters[i] ? 1u : 0u;
    }
    EXPECT_GT(rounded, masters.size() / 2) << "masters hold more than the weights do";
  }
}

// --- skipped steps ---------------------------------------------------------------------------------------------------

// In update mode `forward` the step before is still to be carried out when the overflow is seen.
TEST_P(Fp16Test, ASkippedStepChangesNoBit) {
  Session run(setup()),
      undisturbed(setup().engine.store_directory.empty() ? setup() : fp16_setup(Placement::pinned, Placement::pinned));
  run.fresh().train(1, 3);
  undisturbed.fresh().train(1, 3);
  const StepReport report = run.attempt(4, kOverflow);
  EXPECT_FALSE(report.applied);
  EXPECT_FALSE(std::isfinite(report.gradient_norm));
  EXPECT_EQ(report.step, 3u);
  EXPECT_EQ(report.loss_scale, 65536);
  EXPECT_EQ(run.engine().loss_scale(), 32768);
  run.engine().settle();
  EXPECT_EQ(run.engine().step_count(), 3u);
  EXPECT_EQ(run.digests(), undisturbed.digests());

  const auto written = [&] { return run.runtime().ledger().totals(Link::nvme_write).bytes; };
  const std::uint64_t before = written();
  const auto committed = run.engine().committed_step();
  for (std::uint64_t step = 5; step < 9; ++step) EXPECT_FALSE(run.attempt(step, kOverflow).applied);
  run.engine().settle();
  EXPECT_EQ(written(), before) << "a skipped step writes nothing";
  EXPECT_EQ(run.engine().committed_step(), committed);
  EXPECT_EQ(run.digests(), undisturbed.digests());
  // And it goes on as if nothing had been: the scale is a power of two, which fp16 gradients of this size bear exactly.
  EXPECT_TRUE(run.attempt(9).applied);
}

// The engine's scale follows DeepSpeed's class: forced overflows, and the scale that each step was made with.
TEST_P(Fp16Test, TheScaleFollowsDeepSpeedsThroughAWholeRun) {
  for (const GoldenScales& golden : kGoldenScales) {
    if (golden.name != "hysteresis_three" && golden.name != "consecutive" && golden.name != "refilled_by_growth")
      continue;
    const TempDirectory directory;
    ToySetup with = setup();
    if (placement() == Placement::nvme) with.engine.store_directory = directory / "store";
    with.engine.loss_scale = golden.options;
    Session run(with, {.matrices = {500}, .norm = 5, .frozen = false, .tied = false, .dtype = DType::fp16});
    run.fresh();
    double scale = golden.options.scale;
    for (std::size_t i = 0; i < golden.scales.size(); ++i) {
      const bool overflow = golden.steps[i] == 'X';
      const StepReport report = run.attempt(i + 1, overflow ? kOverflow : 1);
      ASSERT_EQ(report.applied, !overflow) << golden.name << " step " << i;
      ASSERT_EQ(report.loss_scale, scale) << golden.name << " step " << i;
      scale = golden.scales[i];
      ASSERT_EQ(run.engine().loss_scale(), scale) << golden.name << " step " << i;
    }
  }
}

// An overflow in one micro-batch is one of the step; the scale stays as it is between micro-batches.
TEST_P(Fp16Test, AnOverflowInOneMicroBatchSkipsTheStep) {
  ToySetup with = setup();
  with.engine.micro_batches_max = 3;
  Session run(with);
  run.fresh();
  run.micro_batches = 3;
  run.train(1, 1);
  const Digests before = run.digests();
  for (int bad = 0; bad < 3; ++bad) {
    const float scale = run.engine().loss_scale();
    for (int i = 0; i < 3; ++i) {
      run.gradient_scale = i == bad ? kOverflow : 1;
      run.pass(2, {.micro_batch = i, .micro_batches = 3});
      EXPECT_EQ(run.engine().loss_scale(), scale);
    }
    EXPECT_FALSE(run.engine().step().applied) << "micro-batch " << bad;
    EXPECT_EQ(run.engine().loss_scale(), scale / 2);
    EXPECT_EQ(run.digests(), before);
  }
  run.gradient_scale = 1;
  run.train(3, 3);
  EXPECT_TRUE(run.reports.back().applied);
}

// --- unscaling -------------------------------------------------------------------------------------------------------

// fp32 gradients bear a power of two exactly: whatever the scale, nothing of the run may show it.
TEST(LossScaleInTheEngine, IsUndoneExactly) {
  const ToyShape shape{.matrices = {9000, 20000}, .dtype = DType::fp32};
  for (const int micro_batches : {1, 2}) {
    ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
    setup.engine.micro_batches_max = static_cast<unsigned>(micro_batches);
    std::vector<Digests> digests;
    std::vector<std::vector<float>> gradients;
    std::vector<double> norms;
    for (const double scale : {1.0, 1024.0, 0x1.0p-8}) {
      setup.engine.loss_scale = {.scale = scale};
      Session run(setup, shape);
      run.fresh().micro_batches = micro_batches;
      run.train(1, 4);
      norms.push_back(run.reports.back().gradient_norm);
      EXPECT_LT(run.reports.back().clip_factor, 1);
      EXPECT_EQ(run.reports.back().loss_scale, scale);
      for (int i = 0; i < micro_batches; ++i) run.pass(5, {.micro_batch = i, .micro_batches = micro_batches});
      gradients.emplace_back(9000);
      run.engine().read(run.matrix(0), State::gradient, 0, gradients.back());
      run.engine().discard();
      digests.push_back(run.digests());
    }
    for (std::size_t i = 1; i < digests.size(); ++i) {
      EXPECT_EQ(digests[i], digests[0]);
      EXPECT_EQ(gradients[i], gradients[0]);
      EXPECT_EQ(norms[i], norms[0]);
    }
  }
}

// The purpose of loss scaling: gradients below fp16's smallest number reach the masters.
TEST(LossScaleInTheEngine, KeepsSmallGradients) {
  ToySetup setup = fp16_setup(Placement::pinned, Placement::pinned);
  setup.engine.gradient_clipping = 0;
  const auto moment = [&](double scale) {
    setup.engine.loss_scale = {.scale = scale};
    Session run(setup);
    run.fresh().attempt(1, 1e-7f);  // some 1e-9; fp16's smallest is 6e-8
    std::vector<float> values(100);
    run.engine().read(run.matrix(0), State::moment1, 0, values);
    return std::ranges::count_if(values, [](float value) { return value != 0; });
  };
  EXPECT_EQ(moment(1), 0);
  EXPECT_EQ(moment(65536), 100);
}

// --- ranks -----------------------------------------------------------------------------------------------------------

TEST(Fp16Ranks, AnOverflowOfOneSkipsAllAndTheirScalesStayEqual) {
  for (const Placement placement : {Placement::pinned, Placement::nvme}) {
    const TempDirectory directory;
    const ToySetup setup = fp16_setup(placement, placement, placement == Placement::nvme ? directory / "store" : "");
    on_ranks(3, [&](int rank, const Runtime::MakeCommunicator& join) {
      ToyProgram model(setup, join, kSmall);
      double scale = 65536;
      std::uint64_t applied = 0;
      for (std::uint64_t step = 1; step <= 12; ++step) {
        const bool overflows = step % 4 == 2;  // on one rank, another one each time
        model.gradient_scale = overflows && rank == static_cast<int>(step / 4) ? kOverflow : 1;
        model.train(step, step);
        ASSERT_EQ(model.reports.back().applied, !overflows) << "rank " << rank << " step " << step;
        ASSERT_EQ(model.reports.back().loss_scale, scale) << "rank " << rank << " step " << step;
        if (overflows) scale /= 2;
        applied += overflows ? 0u : 1u;
        ASSERT_EQ(model.engine().loss_scale(), scale) << "rank " << rank << " step " << step;
      }
      EXPECT_EQ(model.engine().step_count(), applied);
    });
  }
}

TEST(Fp16Ranks, EveryPlacementGivesTheSameBits) {
  for (const int size : {2, 3}) {
    ToySetup simplest = fp16_setup(Placement::pinned, Placement::pinned);
    simplest.engine.loss_scale = toy_loss_scale();
    const auto reference = train_on(size, simplest, ToyShape{.dtype = DType::fp16}, 6)[0].digests;
    for (const auto& [parameters, optimizer] :
         {std::pair{Placement::nvme, Placement::nvme}, std::pair{Placement::device, Placement::device},
          std::pair{Placement::device, Placement::nvme}}) {
      const TempDirectory directory;
      ToySetup setup = fp16_setup(parameters, optimizer, optimizer == Placement::nvme ? directory / "store" : "");
      setup.engine.loss_scale = toy_loss_scale();
      for (const RankRun& run : train_on(size, setup, ToyShape{.dtype = DType::fp16}, 6))
        EXPECT_EQ(run.digests, reference) << size << " ranks";
    }
  }
}

// --- in commits ------------------------------------------------------------------------------------------------------

std::uint64_t program_state(const RestoreReport& report) {
  std::uint64_t state = 0;
  EXPECT_EQ(report.caller_state.size(), sizeof(state));
  std::memcpy(&state, report.caller_state.data(), sizeof(state));
  return state;
}

// A restore brings back the scale of the last commit. Skipped steps after it do not count: the program repeats them.
TEST(Fp16Commits, TheScaleIsThatOfTheCommit) {
  const TempDirectory directory;
  const ToySetup setup = fp16_setup(Placement::nvme, Placement::nvme, directory / "store");
  {
    Session run(setup);
    run.fresh().attempt(1);
    run.attempt(2, kOverflow);
    run.attempt(3);
    EXPECT_EQ(run.engine().loss_scale(), 32768);
    run.attempt(4, kOverflow);
    EXPECT_EQ(run.engine().loss_scale(), 16384);
  }
  Session run(setup);
  EXPECT_EQ(program_state(run.restore()), 3u);
  EXPECT_EQ(run.engine().loss_scale(), 32768);
}

// A change of state is a commit of its own; the program's place in its data, and the scale there, are the old ones.
TEST(Fp16Commits, AChangeOfStateKeepsTheScaleOfItsCommit) {
  const TempDirectory directory;
  const ToySetup setup = fp16_setup(Placement::nvme, Placement::nvme, directory / "store");
  {
    Session run(setup);
    run.fresh().attempt(1);
    run.attempt(2, kOverflow);
    run.engine().write(run.matrix(0), State::master, 7, std::vector<float>{0.5f});
    EXPECT_EQ(run.engine().loss_scale(), 32768);
  }
  Session run(setup);
  EXPECT_EQ(program_state(run.restore()), 1u);
  EXPECT_EQ(run.engine().loss_scale(), 65536) << "attempt 2 is made again, with the scale it had";
  float value = 0;
  run.engine().read(run.matrix(0), State::master, 7, {&value, 1});
  EXPECT_EQ(value, 0.5f);
}

// A run that is stopped after every attempt, applied or skipped, ends in the bits of one that is not.
TEST(Fp16Commits, StoppedAfterEveryAttemptAndResumed) {
  ToySetup setup = fp16_setup(Placement::nvme, Placement::nvme);
  setup.engine.loss_scale = {.dynamic = true, .scale = 65536, .window = 2, .hysteresis = 2};
  const std::string pattern = ".X..XX.....X.X.X..";
  const auto gradient_scale = [&](std::uint64_t step) { return pattern[step - 1] == 'X' ? kOverflow : 1; };
  const TempDirectory directory;
  setup.engine.store_directory = directory / "undisturbed";
  Digests expected;
  double expected_scale = 0;
  {
    Session run(setup);
    run.fresh();
    for (std::uint64_t step = 1; step <= pattern.size(); ++step) run.attempt(step, gradient_scale(step));
    expected = run.digests();
    expected_scale = run.engine().loss_scale();
  }
  setup.engine.store_directory = directory / "store";
  std::uint64_t last = 0;  // the attempt that the store holds
  Session(setup).fresh();
  for (std::uint64_t stop = 1; stop <= pattern.size(); ++stop) {
    Session run(setup);
    const RestoreReport report = run.restore();
    last = report.caller_state.empty() ? 0 : program_state(report);
    ASSERT_LT(last, stop);
    for (std::uint64_t step = last + 1; step <= stop; ++step) run.attempt(step, gradient_scale(step));
    if (stop < pattern.size()) continue;
    EXPECT_EQ(run.digests(), expected);
    EXPECT_EQ(run.engine().loss_scale(), expected_scale);
  }
}

TEST(Fp16Commits, ACheckpointBringsItsScaleBack) {
  for (const Placement placement : {Placement::nvme, Placement::pinned}) {
    const TempDirectory directory;
    ToySetup setup = fp16_setup(placement, placement, directory / "store");
    setup.engine.keep_steps = 2;
    const std::uint64_t mark = 42;
    const auto state = std::as_bytes(std::span(&mark, 1));
    {
      Session run(setup);
      run.fresh().attempt(1);
      run.attempt(2, kOverflow);
      run.engine().save("after an overflow", state).wait();
      run.attempt(3, kOverflow);
      run.attempt(4);
      run.engine().save("later", state).wait();
      EXPECT_EQ(run.engine().loss_scale(), 16384);
    }
    {
      Session run(setup);
      run.restore({.from = "after an overflow"});
      EXPECT_EQ(run.engine().loss_scale(), 32768);
      EXPECT_EQ(run.engine().step_count(), 1u);
    }
    Session run(setup);
    run.restore({.from = "later"});
    EXPECT_EQ(run.engine().loss_scale(), 16384);
  }
}

TEST(Fp16Commits, AnotherNumberOfRanksGoesOnWithTheScale) {
  for (const Placement placement : {Placement::nvme, Placement::pinned}) {
    const TempDirectory directory;
    const ToySetup setup = fp16_setup(placement, placement, directory / "store");
    Digests before;
    double scale = 65536;
    std::uint64_t step = 0;
    for (const int ranks : {1, 3, 2}) {
      on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model(setup, join, kSmall);
        if (step == 0) {
          model.initialize();
        } else {
          model.restore();
          EXPECT_EQ(state_digests(model), before);
        }
        EXPECT_EQ(model.engine().loss_scale(), scale);
        model.gradient_scale = kOverflow;
        model.train(step + 1, step + 1);
        model.gradient_scale = 1;
        model.train(step + 2, step + 2);
        if (placement == Placement::pinned) model.engine().save("", {}).wait();
        model.engine().settle();
        EXPECT_EQ(model.engine().loss_scale(), scale / 2);
        const Digests now = state_digests(model);
        model.runtime().communicator().barrier();
        if (rank == 0) before = now;
      });
      step += 2;
      scale /= 2;
    }
  }
}

// A store without a scaler, as versions before loss scaling and fixed scales leave it: the scale begins as configured.
TEST(Fp16Commits, AStoreWithoutAScaleBeginsWithTheConfigurations) {
  const TempDirectory directory;
  ToySetup setup = fp16_setup(Placement::nvme, Placement::nvme, directory / "store");
  const LossScaleOptions dynamic = setup.engine.loss_scale;
  setup.engine.loss_scale = {.scale = 128};
  Session(setup).fresh().attempt(1);
  setup.engine.loss_scale = dynamic;
  Session run(setup);
  EXPECT_EQ(run.restore().step, 1u);
  EXPECT_EQ(run.engine().loss_scale(), 65536);
}

// --- refusals and errors ---------------------------------------------------------------------------------------------

TEST(Fp16Refusals, SayWhatToDo) {
  ToySetup setup = fp16_setup(Placement::pinned, Placement::pinned);
  EXPECT_THAT(message_of([&] { Session(setup, {}).fresh(); }),
              HasSubstr("'unit0.matrix' is bf16, but the configuration asks for fp16 weights (fp16.enabled)"));
  EXPECT_THAT(message_of([&] { Session(setup, {.frozen = false, .dtype = DType::fp32}).fresh(); }),
              HasSubstr("fp16.enabled: no trainable parameter of the program is fp16"));
  setup.engine.weights_dtype = DType::bf16;
  EXPECT_THAT(message_of([&] { Session(setup).fresh(); }),
              HasSubstr("'unit0.matrix' is fp16, but the configuration asks"));
  setup.engine.weights_dtype = DType::fp32;
  EXPECT_THAT(message_of([&] { Session(setup).fresh(); }), HasSubstr("asks for fp32 weights (bf16.enabled is false)"));
  EXPECT_EQ(message_of([&] { Session(setup, {.frozen = false, .dtype = DType::fp32}).fresh(); }), "no error");
  setup.engine.weights_dtype.reset();
  EXPECT_EQ(message_of([&] { Session(setup).fresh(); }), "no error");
  Session run(setup);
  EXPECT_THAT(
      message_of([&] {
        run.initialize([](ParameterId, std::uint64_t, std::span<float> out) { std::ranges::fill(out, 65520.0f); });
      }),
      HasSubstr("65520 of parameter 'unit0.matrix' is too large for fp16"));
  setup.engine.loss_scale.hysteresis = 0;
  EXPECT_THAT(message_of([&] { Session(setup).fresh(); }), HasSubstr("fp16.hysteresis"));
}

// As in DeepSpeed the run ends; what was committed stays.
TEST(Fp16Refusals, AnOverflowAtTheSmallestScaleEndsTheRun) {
  const TempDirectory directory;
  ToySetup setup = fp16_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.engine.loss_scale.scale_min = 32768;
  Digests before;
  {
    Session run(setup);
    run.fresh().attempt(1);
    before = run.digests();
    EXPECT_FALSE(run.attempt(2, kOverflow).applied);
    EXPECT_THAT(message_of([&] { run.attempt(3, kOverflow); }), HasSubstr("at the smallest loss scale, 32768"));
    EXPECT_THAT(message_of([&] { run.attempt(4); }), HasSubstr("at the smallest loss scale"));
  }
  Session run(setup);
  EXPECT_EQ(run.restore().step, 1u);
  EXPECT_EQ(run.digests(), before);
}

// Every rank says the same, the commit of the step before completes, and the ranks can still restore together.
TEST(Fp16Refusals, RanksThatEndAtTheSmallestScaleEndAlike) {
  for (int round = 0; round < 3; ++round) {
    const TempDirectory directory;
    ToySetup setup = fp16_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.engine.loss_scale.scale_min = 65536;
    on_ranks(2, [&](int, const Runtime::MakeCommunicator& join) {
      Runtime runtime(setup.runtime, join);
      {
        ToyModel model(runtime, setup.engine, kSmall);
        model.initialize();
        model.train(1, 2);
        model.gradient_scale = kOverflow;
        EXPECT_THAT(message_of([&] { model.train(3, 3); }), HasSubstr("at the smallest loss scale, 65536"));
        EXPECT_NO_THROW(model.reports.back().committed.wait());
      }
      ToyModel model(runtime, setup.engine, kSmall);
      EXPECT_EQ(model.restore().step, 2u);
    });
  }
}

// A parameter outside of the norm overflows as well as any other.
TEST(Fp16Skips, AParameterThatDoesNotCountInTheNormIsLookedAt) {
  const ToySetup setup = fp16_setup(Placement::pinned, Placement::pinned);
  Runtime runtime(setup.runtime);
  const ParameterSpec specs[] = {{.name = "counted", .shape = {64}, .dtype = DType::fp16},
                                 {.name = "replica", .shape = {64}, .dtype = DType::fp16, .counts_in_norm = false}};
  Model model;
  const UnitId unit = model.add_unit("unit", specs);
  Engine engine = Engine::create(runtime, setup.engine, model, [](ParameterId, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, 0.25f);
  });
  const auto stream = runtime.device().create_stream("compute");
  const auto step_with = [&](float replica_gradient) {
    {
      const PassScope scope = engine.begin(Pass::train);
      Lease lease = engine.gather(unit, *stream);
      const GradientLease gradients = engine.gradients(unit, *stream);
      const TensorView counted = gradients.view(engine.parameter("counted"));
      const TensorView replica = gradients.view(engine.parameter("replica"));
      stream->launch("gradients", [=] {
        for (std::size_t i = 0; i < 64; ++i) {
          static_cast<std::uint16_t*>(counted.data)[i] = float_to_fp16(0.5f);
          static_cast<std::uint16_t*>(replica.data)[i] = float_to_fp16(replica_gradient);
        }
      });
      lease.release(*stream);
      engine.finish(unit, *stream);
    }
    return engine.step();
  };
  const StepReport good = step_with(1000.0f);
  EXPECT_TRUE(good.applied);
  EXPECT_NEAR(good.gradient_norm * 65536, 0.5 * 8, 1e-9) << "the replica's gradient is not in it";
  std::vector<float> before(64), after(64);
  engine.read(engine.parameter("replica"), State::master, 0, before);
  EXPECT_FALSE(step_with(std::numeric_limits<float>::infinity()).applied);
  EXPECT_FALSE(step_with(std::numeric_limits<float>::quiet_NaN()).applied);
  engine.read(engine.parameter("replica"), State::master, 0, after);
  EXPECT_EQ(before, after);
}

// --- bytes -----------------------------------------------------------------------------------------------------------

// Two bytes more each way than bf16, for the half of the master that the weight does not hold; but an update makes
// weights of masters alone, and does not read them.
TEST(Fp16Bytes, AreTheFormulas) {
  struct Case {
    Placement parameters;
    UpdateMode mode;
    double read, written;
  };
  for (const Case& c :
       {Case{Placement::pinned, UpdateMode::forward, 12, 14}, Case{Placement::nvme, UpdateMode::step, 16, 14},
        Case{Placement::nvme, UpdateMode::forward, 14, 14}, Case{Placement::nvme, UpdateMode::backward, 16, 14}}) {
    const TempDirectory directory;
    ToySetup setup = fp16_setup(c.parameters, Placement::nvme, directory / "store");
    setup.engine.update_mode = c.mode;
    if (c.mode == UpdateMode::backward) {
      setup.engine.gradient_clipping = 0;
      setup.engine.loss_scale = {};
    }
    setup.engine.reuse_distance_elements = 0;
    const ToyShape shape{
        .matrices = {1 << 19, 1 << 19}, .norm = 1, .frozen = false, .tied = false, .dtype = DType::fp16};
    Session run(setup, shape);
    run.fresh().train(1, 2);
    constexpr std::uint64_t kSteps = 3;
    const MovedBytes moved = run.bytes_moved(3, 2 + kSteps);
    for (const StepReport& report : run.reports) EXPECT_TRUE(report.applied);
    const auto parameters = static_cast<double>(run.model().parameter_count());
    EXPECT_NEAR(static_cast<double>(moved[Link::nvme_read]) / kSteps / parameters, c.read, 0.1);
    EXPECT_NEAR(static_cast<double>(moved[Link::nvme_write]) / kSteps / parameters, c.written, 0.1);
    EXPECT_NEAR(static_cast<double>(run.engine().formula_bytes().nvme_read) / parameters, c.read, 0.1);
    EXPECT_NEAR(static_cast<double>(run.engine().formula_bytes().nvme_write) / parameters, c.written, 0.1);
  }
}

}  // namespace
}  // namespace hoist::test::fp16_test
