// SPDX-License-Identifier: Apache-2.0
// The public face: what callers may do, what they are told when they may not, and state access on every tier.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/comm/communicator.hpp>
#include <hoist/core/error.hpp>
#include <hoist/platform/update_arrays.hpp>
#include <hoist/tests/support/message_of.hpp>

#include "toy_model.hpp"

namespace hoist::test::engine_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const Initializer kOnes = [](ParameterId, std::uint64_t, std::span<float> out) { std::ranges::fill(out, 1.0f); };

ToySetup in_memory() { return toy_setup(Placement::pinned, Placement::pinned); }

// --- passes ----------------------------------------------------------------------------------------------------------

// A stream that is being captured into a graph, as a GPU would have it. Whatever is enqueued on it fails the test.
class CapturedStream final : public platform::Stream {
 public:
  std::string_view name() const override { return "captured"; }
  bool capturing() const override { return true; }
  platform::StreamEvent record() override { return touched<platform::StreamEvent>(); }
  void wait(const platform::StreamEvent&, WaitCause) override { touched<int>(); }
  void copy(std::byte*, const std::byte*, std::uint64_t, platform::CopyKind) override { touched<int>(); }
  void fill(std::byte*, std::uint8_t, std::uint64_t) override { touched<int>(); }
  void scale_into(std::byte*, DType, const std::byte*, DType, std::uint64_t, float, Combine) override {
    touched<int>();
  }
  void sums_of_squares(double*, const std::byte*, DType, std::uint64_t) override { touched<int>(); }
  void update(const UpdateFactors&, const platform::UpdateArrays&) override { touched<int>(); }
  void launch(std::string_view, std::function<void()>) override { touched<int>(); }
  void synchronize() override { touched<int>(); }
  std::function<void(CountIdle)> watch_idle() override {
    touched<int>();
    return {};
  }
  void* native() const override { return nullptr; }

 private:
  template <typename T>
  static T touched() {
    ADD_FAILURE() << "work was enqueued on a captured stream";
    return T();
  }
};

TEST(Engine, ACapturedStreamIsRefusedAndNothingHappened) {
  ToyProgram f(in_memory());
  CapturedStream captured;
  const auto stream = f.runtime().device().create_stream("program");
  const UnitId unit{0};
  const auto refused = [](const auto& call) {
    EXPECT_THAT(message_of<UsageError>(call), AllOf(HasSubstr("CUDA graph"), HasSubstr("End the capture")));
  };
  {
    const PassScope pass = f.engine().begin(Pass::train);
    refused([&] { static_cast<void>(f.engine().gather(unit, captured)); });
    Lease lease = f.engine().gather(unit, *stream);
    refused([&] { f.engine().gradients(unit, captured); });
    refused([&] { f.engine().finish(unit, captured); });
    refused([&] { lease.release(captured); });
    lease.release(*stream);  // still held until here
    stream->synchronize();
  }
  f.engine().discard();
  f.train(1, 3);
  EXPECT_EQ(digests_of(f), train_once(in_memory(), ToyShape{}, 3));
}

TEST(Engine, DiscardAfterAPassForgetsItsGradients) {
  ToyProgram f(in_memory());
  f.train(1, 2);
  f.pass(99);
  f.engine().discard();
  f.losses.pop_back();
  f.train(3, 4);
  EXPECT_EQ(digests_of(f), train_once(in_memory(), ToyShape{}, 4));
}

TEST(Engine, LeasesNestAndShareTheirMemory) {
  ToyProgram f(in_memory());
  const PassScope scope = f.engine().begin(Pass::evaluate);
  Lease outer = f.engine().gather(f.unit(0), f.stream());
  {
    Lease inner = f.engine().gather(f.unit(0), f.stream());
    EXPECT_EQ(inner.view(f.matrix(0)).data, outer.view(f.matrix(0)).data);
  }
  EXPECT_NE(outer.view(f.matrix(0)).data, nullptr);
  outer.release(f.stream());
  EXPECT_THROW(outer.release(f.stream()), UsageError);
  EXPECT_THROW(outer.view(f.matrix(0)), UsageError);
}

TEST(Engine, ADeviatingPassIsServedAndRecordedAnew) {
  const TempDirectory directory;
  ToyProgram f(toy_setup(Placement::nvme, Placement::nvme, (directory / "store")));
  const auto visit = [&](const std::vector<std::size_t>& order) {
    const PassScope scope = f.engine().begin(Pass::generate);
    for (const std::size_t u : order) f.engine().gather(f.unit(u), f.stream()).release(f.stream());
  };
  for (const auto& order :
       std::vector<std::vector<std::size_t>>{{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 2, 1}, {3, 3, 3}, {}, {1}, {0, 1, 2, 3}})
    visit(order);
  f.train(1, 3);
  EXPECT_EQ(digests_of(f), train_once(in_memory(), ToyShape{}, 3));
}

// PyTorch keeps views of weights from the forward pass for the backward pass.
TEST(Engine, AUnitThatIsStableInAPassHasOneAddressInIt) {
  ToySetup setup = in_memory();
  setup.engine.persistence_elements = 0;
  setup.engine.parameters = Placement::pinned;
  setup.runtime.device_memory_bytes = 64 * kKiB;  // four of the eight units' weights, and a gradient
  Runtime runtime(setup.runtime);
  Model model;
  std::vector<UnitId> units;
  for (int i = 0; i < 8; ++i) {
    const std::string name = "w" + std::to_string(i);
    units.push_back(model.add_unit(name, {{.name = name, .shape = {4000}}}, {.stable_in_pass = true}));
  }
  Engine engine = Engine::create(runtime, setup.engine, model, [](ParameterId, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, 1.0f);
  });
  const auto stream = runtime.device().create_stream("s");
  const auto address = [&](UnitId unit) {
    Lease lease = engine.gather(unit, *stream);
    const void* data = lease.view(engine.parameter("w" + std::to_string(unit.index))).data;
    lease.release(*stream);
    return data;
  };
  std::set<const void*> all;
  for (int pass = 0; pass < 3; ++pass) {
    const PassScope scope = engine.begin(Pass::evaluate);
    std::vector<const void*> first;
    for (const UnitId unit : units) first.push_back(address(unit));
    for (std::size_t u = units.size(); u-- > 0;) EXPECT_EQ(address(units[u]), first[u]) << u;
    all.insert(first.begin(), first.end());
    EXPECT_LT(all.size(), units.size()) << "they all fit, and nothing was shown";
  }
  // Two that share memory: held at once, the second one moves where it has not been used, and is refused otherwise.
  std::size_t other = 1;
  {
    const PassScope scope = engine.begin(Pass::evaluate);
    const void* home = address(units[0]);
    while (address(units[other]) != home) ++other;
    const Lease held = engine.gather(units[0], *stream);
    EXPECT_THROW((void)engine.gather(units[other], *stream), BudgetError);
  }
  const PassScope scope = engine.begin(Pass::generate);
  const Lease held = engine.gather(units[0], *stream);
  const Lease beside = engine.gather(units[other], *stream);
  EXPECT_NE(beside.view(engine.parameter("w" + std::to_string(other))).data, held.view(engine.parameter("w0")).data);
}

TEST(Engine, MisuseIsNamed) {
  Runtime runtime(in_memory().runtime);
  Model model;
  const auto declared = [&](std::string unit, const ParameterSpec& spec) {
    return message_of<UsageError>([&] { model.add_unit(std::move(unit), {spec}); });
  };
  EXPECT_THAT(declared("u", {.name = std::string("a\0b", 3), .shape = {2}}), HasSubstr("control character"));
  EXPECT_THAT(declared("u", {.name = "a\tb", .shape = {2}}), HasSubstr("control character"));
  EXPECT_THAT(declared("u\n", {.name = "a", .shape = {2}}), HasSubstr("the name 'u\\x0a' of a unit holds a control"));
  EXPECT_THAT(declared("u", {.name = "a\n", .shape = {2}}), HasSubstr("the name 'a\\x0a' of a parameter of unit 'u'"));
  EXPECT_THAT(message_of<UsageError>([&] { model.add_group(GroupOptions{.learning_rate = -3}); }),
              HasSubstr("learning rate"));
  EXPECT_THAT(declared("u", {.name = "a", .shape = {std::int64_t{1} << 62}}), HasSubstr("more than 10000000000000"));
  EXPECT_THAT(declared("u", {.name = "a", .shape = {1 << 30, 1 << 30}}), HasSubstr("more than 10000000000000"));
  EXPECT_EQ(declared("größe", {.name = "gewicht.größe", .shape = {4}}), "no error");

  const auto create = [&](const Initializer& fill) { return Engine::create(runtime, in_memory().engine, model, fill); };
  EXPECT_THAT(message_of<UsageError>([&] { create({}); }), HasSubstr("needs an Initializer"));
  const auto filled_with = [&](float value) {
    return message_of<UsageError>(
        [&] { create([&](ParameterId, std::uint64_t, std::span<float> out) { std::ranges::fill(out, value); }); });
  };
  EXPECT_THAT(filled_with(std::numeric_limits<float>::quiet_NaN()), HasSubstr("'gewicht.größe' is not finite"));
  EXPECT_THAT(filled_with(3.4e38f), HasSubstr("too large for bf16"));
  EXPECT_EQ(filled_with(1.0f), "no error");

  Engine engine = create([](ParameterId, std::uint64_t, std::span<float> out) { std::ranges::fill(out, 1.0f); });
  const auto rate = [&](double value) {
    return message_of<UsageError>([&] { engine.set_learning_rate(GroupId{}, value); });
  };
  EXPECT_THAT(rate(std::numeric_limits<double>::infinity()), HasSubstr("inf is not a learning rate"));
  EXPECT_THAT(rate(std::numeric_limits<double>::quiet_NaN()), HasSubstr("nan is not a learning rate"));
  EXPECT_THROW(require_device_memory(runtime, in_memory().engine, model, ~std::uint64_t{0}), BudgetError);
}

TEST(Engine, WhatARuntimeCannotUseIsRefusedAtOnce) {
  ToySetup setup = in_memory();
  setup.runtime.update_threads = 1'000'000'000;
  EXPECT_THROW(Runtime runtime(setup.runtime), ConfigError);
  setup = in_memory();
  setup.runtime.trace_path = "/no/such/directory/trace.json";
  EXPECT_THROW(Runtime runtime(setup.runtime), IoError) << "and not when the run is over";
  setup = in_memory();
  setup.runtime.comm_timeout = std::chrono::milliseconds(0);
  EXPECT_THROW(Runtime runtime(setup.runtime), ConfigError);
  setup = in_memory();
  setup.runtime.comm_scratch_bytes = 0;
  EXPECT_NO_THROW(Runtime runtime(setup.runtime)) << "one rank reduces nothing";
  comm::ThreadGroup group(2);
  const auto join = [&](const comm::CommunicatorOptions& options) { return group.join(0, options); };
  EXPECT_THROW(Runtime runtime(setup.runtime, join), UsageError);
}

TEST(Engine, AccumulateTakesTheParametersShapeInDeviceMemory) {
  Runtime runtime(in_memory().runtime);
  Model model;
  const UnitId unit = model.add_unit("u", {{.name = "w", .shape = {2, 3}}});
  Engine engine = Engine::create(runtime, in_memory().engine, model, kOnes);
  const auto stream = runtime.device().create_stream("s");
  float values[6] = {};
  const std::vector<std::int64_t> own{2, 3}, transposed{3, 2}, flat{6}, negative{-2, -3};
  const ParameterId w = engine.parameter("w");
  const auto refusal = [&](const TensorView& gradient) {
    return message_of<UsageError>([&] { engine.accumulate(w, gradient, *stream); });
  };
  {
    const PassScope scope = engine.begin(Pass::train);
    EXPECT_EQ(refusal({values, DType::fp32, transposed, 0}),
              "the gradient of 'w' has the shape [3, 2], the parameter [2, 3]");
    EXPECT_THAT(refusal({values, DType::fp32, flat, 0}), HasSubstr("[6]"));
    EXPECT_THAT(refusal({values, DType::fp32, negative, 0}), HasSubstr("[-2, -3]"));
    EXPECT_THAT(refusal({nullptr, DType::fp32, own, 0}), HasSubstr("data is null"));
    EXPECT_THAT(refusal({values, DType::fp32, own, -1}), HasSubstr("host memory"));
    EXPECT_THAT(refusal({values, static_cast<DType>(9), own, 0}), HasSubstr("no type"));
    EXPECT_EQ(refusal({values, DType::fp32, own, 0}), "no error");
    engine.finish(unit, *stream);
    stream->synchronize();
  }
  EXPECT_TRUE(engine.step().applied);
}

TEST(Engine, AccumulateAddsAnyDtypeAnyNumberOfTimes) {
  Runtime runtime(in_memory().runtime);
  Model model;
  const UnitId unit =
      model.add_unit("u", {{.name = "w", .shape = {3}}, {.name = "n", .shape = {2}, .dtype = DType::fp32}});
  Engine engine = Engine::create(runtime, in_memory().engine, model, kOnes);
  const auto stream = runtime.device().create_stream("s");
  tiers::DeviceBlock block = runtime.device_arena().allocate(4096, "gradients");
  auto* values = reinterpret_cast<float*>(block.data());
  for (int i = 0; i < 3; ++i) values[i] = static_cast<float>(i + 1);
  const std::vector<std::int64_t> three{3}, two{2};
  {
    const PassScope scope = engine.begin(Pass::train);
    for (int i = 0; i < 3; ++i) engine.accumulate(engine.parameter("w"), {values, DType::fp32, three, 0}, *stream);
    engine.accumulate(engine.parameter("n"), {values, DType::fp32, two, 0}, *stream);
    EXPECT_THROW(engine.accumulate(engine.parameter("n"), {values, DType::fp32, three, 0}, *stream), UsageError);
    auto* const odd = reinterpret_cast<std::byte*>(static_cast<void*>(values)) + 1;
    EXPECT_THROW(engine.accumulate(engine.parameter("n"), {odd, DType::fp32, two, 0}, *stream), UsageError);
    engine.finish(unit, *stream);
    EXPECT_THROW(engine.accumulate(engine.parameter("w"), {values, DType::fp32, three, 0}, *stream), UsageError);
  }
  std::vector<float> gradient(3);
  engine.read(engine.parameter("w"), State::gradient, 0, gradient);
  EXPECT_EQ(gradient, (std::vector<float>{3, 6, 9}));
  EXPECT_NEAR(engine.step().gradient_norm, std::sqrt(9.0 + 36 + 81 + 1 + 4), 1e-12);
}

// --- steps -----------------------------------------------------------------------------------------------------------

TEST(Engine, ReportsNormAndClipFactor) {
  ToyProgram f(in_memory());
  f.pass(1);
  double expected = 0;
  for (std::uint32_t p = 0; p < f.model().parameters().size(); ++p) {
    if (!f.model().parameters()[p].trainable) continue;
    std::vector<float> values(static_cast<std::size_t>(f.model().parameters()[p].shape[0]));
    f.engine().read(ParameterId{p}, State::gradient, 0, values);
    for (const float value : values) expected += static_cast<double>(value) * value;
  }
  const StepReport report = f.engine().step();
  EXPECT_NEAR(report.gradient_norm, std::sqrt(expected), 1e-9 * report.gradient_norm);
  EXPECT_DOUBLE_EQ(report.clip_factor, std::min(1.0, 0.5 / (report.gradient_norm + 1e-6)));
}

TEST(Engine, AStepsOwnLargestNormClipsAsTheOptionsDo) {
  for (const UpdateMode mode : {UpdateMode::step, UpdateMode::forward}) {
    ToySetup of_options = in_memory(), of_step = in_memory();
    for (ToySetup* setup : {&of_options, &of_step}) setup->engine.update_mode = mode;
    of_step.engine.gradient_clipping = 0;
    ToyProgram expected(of_options), found(of_step);
    expected.train(1, 4);
    for (std::uint64_t step = 1; step <= 4; ++step) {
      found.pass(step);
      const double norm = found.engine().gradient_norm();
      EXPECT_EQ(found.engine().gradient_norm(), norm);
      const StepReport report = found.engine().step({.gradient_norm_max = of_options.engine.gradient_clipping});
      EXPECT_EQ(report.gradient_norm, norm);
      EXPECT_EQ(report.clip_factor, expected.reports[step - 1].clip_factor);
      EXPECT_LT(report.clip_factor, 1);
    }
    EXPECT_EQ(digests_of(found), digests_of(expected));
  }
}

// A norm belongs to its pass: it is not the next one's, and does not survive discard().
TEST(Engine, EveryPassHasItsOwnNorm) {
  for (const Placement placement : {Placement::device, Placement::pinned}) {
    ToySetup setup = toy_setup(placement, placement);
    ToyProgram f(setup), other(setup);
    f.pass(1);
    const double first = f.engine().gradient_norm();
    f.engine().discard();
    EXPECT_THROW(f.engine().gradient_norm(), UsageError);
    f.pass(2);
    const double second = f.engine().gradient_norm();
    other.pass(2);
    EXPECT_NE(first, second);
    EXPECT_EQ(second, other.engine().step().gradient_norm);
  }
}

TEST(Engine, TheSmallerOfTwoLargestNormsCounts) {
  ToyProgram f(in_memory());
  for (const double of_step : {0.25, 4.0}) {
    f.pass(f.engine().step_count() + 1);
    const StepReport report = f.engine().step({.gradient_norm_max = of_step});
    EXPECT_DOUBLE_EQ(report.clip_factor, std::min(of_step, 0.5) / (report.gradient_norm + 1e-6));
  }
}

TEST(Engine, TheNormIsAskedForBetweenPassAndStep) {
  ToyProgram f(in_memory());
  EXPECT_THROW(f.engine().gradient_norm(), UsageError);
  f.pass(1);
  EXPECT_THROW(f.engine().step({.gradient_norm_max = -1}), UsageError);
  EXPECT_THROW(f.engine().step({.gradient_norm_max = 0}), UsageError);
  EXPECT_THROW(f.engine().step({.gradient_norm_max = std::nan("")}), UsageError);
  EXPECT_TRUE(f.engine().step().applied);
  EXPECT_THROW(f.engine().gradient_norm(), UsageError);
}

TEST(Engine, AScheduleIsTheSameAsSettingItsRatesByHand) {
  const LearningRateSchedule schedule = WarmupRate{.min_rate = 1e-4, .max_rate = 3e-2, .steps = 4};
  const TempDirectory directory;
  const ToySetup by_hand = toy_setup(Placement::pinned, Placement::pinned);
  Digests expected;
  {
    ToyProgram model(by_hand);
    for (std::uint64_t step = 1; step <= 6; ++step) {
      for (const std::uint32_t group : {0u, 1u})
        model.engine().set_learning_rate(GroupId{group}, learning_rate(schedule, step - 1, 1.0));
      model.train(step, step);
    }
    expected = digests_of(model);
  }
  // Interrupted after three steps: the rate is a function of the steps applied, so nothing else has to be kept.
  ToySetup scheduled = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  scheduled.engine.learning_rate_schedule = schedule;
  std::vector<double> losses;
  for (const std::uint64_t first : {1u, 4u}) {
    ToyModel model(scheduled);
    if (first == 1) {
      model.initialize();
    } else {
      EXPECT_EQ(model.restore().step, 3u);
      model.losses = losses;
    }
    EXPECT_EQ(model.engine().learning_rate(GroupId{1}), learning_rate(schedule, first - 1, 1.0));
    model.train(first, first + 2);
    EXPECT_EQ(model.reports.back().learning_rate, learning_rate(schedule, first + 1, 1.0));
    losses = model.losses;
    if (first == 4) {
      EXPECT_EQ(digests_of(model), expected);
    }
    model.engine().settle();
  }
}

// --- state access ----------------------------------------------------------------------------------------------------

TEST(Engine, ReadAndWriteReachEveryTierAndSurviveARestart) {
  for (const Placement parameters : {Placement::device, Placement::pinned, Placement::nvme}) {
    for (const Placement optimizer : {Placement::device, Placement::pinned, Placement::nvme}) {
      const TempDirectory directory;
      ToySetup setup = toy_setup(parameters, optimizer, (directory / "store"));
      const bool nvme = parameters == Placement::nvme || optimizer == Placement::nvme;
      const std::vector<float> values{0.125f, -3.0f, 1e-20f, 7.7777777f};
      const auto check = [&](Engine& engine) {
        for (const char* name : {"unit3.matrix", "unit1.frozen", "unit0.norm"}) {
          std::vector<float> seen(6);
          engine.read(engine.parameter(name), State::master, 90, seen);
          for (std::size_t i = 0; i < values.size(); ++i) {
            const float expected = std::string(name) == "unit1.frozen" ? to_float(to_bf16(values[i])) : values[i];
            EXPECT_EQ(seen[i + 1], expected)
                << name << ' ' << i << " placement " << static_cast<int>(parameters) << static_cast<int>(optimizer);
          }
        }
        std::vector<float> moment(1);
        engine.read(engine.parameter("unit0.matrix"), State::moment2, 39999, moment);
        EXPECT_EQ(moment[0], 0.25f);
      };
      {
        ToyProgram f(setup);
        f.train(1, 1);
        for (const char* name : {"unit3.matrix", "unit1.frozen", "unit0.norm"})
          f.engine().write(f.engine().parameter(name), State::master, 91, values);
        const float quarter = 0.25f;
        f.engine().write(f.engine().parameter("unit0.matrix"), State::moment2, 39999, std::span(&quarter, 1));
        check(f.engine());
        if (!nvme) f.engine().save("here", {}).wait();
      }
      ToyModel again(setup);
      EXPECT_EQ(again.restore().step, 1u);
      EXPECT_EQ(again.runtime().ledger().totals(Link::nvme_read).bytes, 0u) << "restoring is not part of a step";
      check(again.engine());
    }
  }
}

TEST(Engine, WritesAreSeenByTheNextGather) {
  const TempDirectory directory;
  ToyProgram f(toy_setup(Placement::nvme, Placement::nvme, (directory / "store")));
  const double before = f.evaluate();
  std::vector<float> value(1);
  f.engine().read(f.matrix(2), State::master, 0, value);
  value[0] += 1024;
  f.engine().write(f.matrix(2), State::master, 0, value);
  EXPECT_NEAR(f.evaluate() - before, 1024, 8);
}

// --- shapes ----------------------------------------------------------------------------------------------------------

TEST(Engine, UnusualShapes) {
  std::vector<std::int64_t> many(300, 3);
  const std::vector<ToyShape> shapes{{.matrices = {1}, .norm = 1, .frozen = false, .tied = false},
                                     {.matrices = {104729, 2, 7919}, .norm = 31},
                                     {.matrices = many, .norm = 5},
                                     {.matrices = {16384, 16385, 16383, 32768, 32}, .norm = 32}};
  for (const ToyShape& shape : shapes) {
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, (directory / "store"));
    EXPECT_EQ(train_once(setup, shape, 3), train_once(in_memory(), shape, 3)) << shape.matrices.size() << " units";
  }
}

// --- contracts -------------------------------------------------------------------------------------------------------

TEST(Engine, BrokenContractsAreUsageErrorsAndHarmless) {
  ToyProgram f(in_memory());
  EXPECT_THROW(f.engine().parameter("nobody"), UsageError);
  EXPECT_THROW((void)f.engine().keeps_gathered(UnitId{123456}), UsageError);
  EXPECT_THROW(f.engine().set_learning_rate(GroupId{9}, 0.1), UsageError);
  Model model = describe({});
  const ParameterSpec repeated{.name = "unit0.matrix", .shape = {2}}, empty{.name = "e", .shape = {0}},
      lost{.name = "l", .shape = {2}, .group = GroupId{7}};
  for (const ParameterSpec& spec : {repeated, empty, lost}) {
    EXPECT_THROW(model.add_unit("bad", {spec}), UsageError) << spec.name;
  }
  EXPECT_THROW(model.add_unit("none", {}), UsageError);
  EXPECT_EQ(model.units().size(), f.model().units().size());
  EXPECT_THROW((void)f.engine().gather(f.unit(0), f.stream()), UsageError);
  EXPECT_THROW(f.engine().step(), UsageError);
  EXPECT_THROW(f.engine().save("x", {}), UsageError);
  {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    EXPECT_THROW((void)f.engine().begin(Pass::train), UsageError);
    EXPECT_THROW(f.engine().gradients(f.unit(0), f.stream()), UsageError);
    EXPECT_THROW((void)f.engine().gather(UnitId{99}, f.stream()), UsageError);
    std::vector<float> out(1);
    EXPECT_THROW(f.engine().read(f.matrix(0), State::master, 0, out), UsageError);
    Lease lease = f.engine().gather(f.unit(0), f.stream());
    EXPECT_THROW(lease.view(f.matrix(1)), UsageError);
  }
  EXPECT_THROW((void)f.engine().begin(Pass::train, {.micro_batches = 2}), UsageError);
  {
    const PassScope scope = f.engine().begin(Pass::train);
    f.engine().finish(f.unit(0), f.stream());
    EXPECT_THROW(f.engine().finish(f.unit(0), f.stream()), UsageError);
  }
  EXPECT_THROW(f.engine().step(), UsageError);  // three units were not finished
  f.engine().discard();
  std::vector<float> out(2);
  EXPECT_THROW(f.engine().read(f.matrix(0), State::master, 39999, out), UsageError);
  EXPECT_THROW(f.engine().read(f.engine().parameter("unit1.frozen"), State::moment1, 0, out), UsageError);
  out[0] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(f.engine().write(f.matrix(0), State::master, 0, out), UsageError);
  f.train(1, 2);
  EXPECT_EQ(digests_of(f), train_once(in_memory(), ToyShape{}, 2));
}

TEST(Engine, UnsupportedOptionsAreRefusedByName) {
  Runtime runtime(in_memory().runtime);
  const auto key_of = [&](auto change) {
    EngineOptions options = in_memory().engine;
    change(options);
    try {
      ToyModel(runtime, options).initialize();
    } catch (const ConfigError& error) {
      return error.key;
    }
    return std::string("accepted");
  };
  EXPECT_EQ(key_of([](EngineOptions& o) { o.stage = 4; }), "zero_optimization.stage");
  EXPECT_EQ(key_of([](EngineOptions& o) { o.optimizer = Placement::nvme; }),
            "zero_optimization.offload_optimizer.nvme_path");
  EXPECT_EQ(key_of([](EngineOptions& o) { o.update_buffer_count = 2; }),
            "zero_optimization.offload_optimizer.buffer_count");
  EXPECT_EQ(key_of([](EngineOptions& o) { o.gradient_clipping = -1; }), "gradient_clipping");
  EXPECT_EQ(key_of([](EngineOptions&) {}), "accepted");
}

// A cast, or a program in another language, may pass a value that the enumeration does not have.
TEST(Options, ValuesThatAreNoneAreRefusedByName) {
  constexpr auto kNone = static_cast<std::uint8_t>(200);
  const auto refusal = [&](const auto& change) -> std::string {
    ToySetup changed = in_memory();
    change(changed);
    try {
      ToyModel(changed).initialize();
    } catch (const ConfigError& error) {
      return error.what();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto names = [](const char* key) { return AllOf(HasSubstr(key), HasSubstr("200")); };
  EXPECT_THAT(refusal([](ToySetup& s) { s.runtime.device = platform::DeviceKind{kNone}; }), names("hoist.device"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.runtime.aio_backend = aio::BackendKind{kNone}; }), names("hoist.io_engine"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.runtime.communicator = CommunicatorKind{kNone}; }),
              names("hoist.communicator"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.parameters = Placement{kNone}; }), names("offload_param.device"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.optimizer = Placement{kNone}; }), names("offload_optimizer.device"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.durability = tiers::Durability{kNone}; }), names("hoist.durability"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.update_mode = UpdateMode{kNone}; }), names("hoist.update_mode"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.micro_batch_order = MicroBatchOrder{kNone}; }),
              names("hoist.micro_batch_order"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.weights_dtype = DType{kNone}; }), names("bf16.enabled"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.optimizer_defaults.kind = optim::OptimizerKind{kNone}; }),
              names("kind"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.optimizer_defaults.moments = MomentType{kNone}; }), names("moments"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.optimizer_defaults.remainder = RemainderType{kNone}; }),
              names("remainder"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.learning_rate_schedule = WarmupRate{.shape = WarmupShape{kNone}}; }),
              HasSubstr("warmup_type"));
  EXPECT_THAT(refusal([](ToySetup& s) { s.engine.optimizer_defaults.epsilon = 0; }), HasSubstr("optimizer.params.eps"));
  EXPECT_THAT(refusal([](ToySetup& s) {
                s.engine.optimizer_defaults = {
                    .kind = optim::OptimizerKind::adagrad, .epsilon = 0, .initial_accumulator = 1e-40};
              }),
              HasSubstr("optimizer.params.eps"));
  EXPECT_EQ(refusal([](ToySetup&) {}), "accepted");

  EXPECT_THROW(Model().add_unit("unit", {{.name = "w", .shape = {4}, .dtype = DType{kNone}}}), UsageError);
  EXPECT_THROW(ToyProgram(in_memory()).engine().begin(Pass{kNone}), UsageError);
}

}  // namespace
}  // namespace hoist::test::engine_test
