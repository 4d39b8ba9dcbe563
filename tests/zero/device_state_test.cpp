// SPDX-License-Identifier: Apache-2.0
// Optimizer states in device memory that the CPU cannot read, as a GPU's: the device carries out the steps, everything
// else passes through buffers, and no bit differs. Here the device is the host device, which faults (where the
// processor has protection keys) when anybody but its streams touches its memory.
#include <array>
#include <cstring>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <hoist/core/error.hpp>
#include <hoist/core/rng.hpp>
#include <hoist/zero/predict/prediction.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::device_state_test {
namespace {

using optim::OptimizerKind;

ToySetup apart(const std::string& directory = "") {
  ToySetup setup = toy_setup(Placement::device, Placement::device, directory);
  setup.runtime.host_device.host_accessible = false;
  return setup;
}

// The simplest setup, for comparison: everything is in memory, and the CPU updates it in step().
ToySetup simplest(const ToySetup& like) {
  ToySetup setup = like;
  setup.runtime.host_device.host_accessible = true;
  setup.engine.parameters = setup.engine.optimizer = Placement::pinned;
  setup.engine.update_mode = UpdateMode::step;
  setup.engine.store_directory.clear();
  return setup;
}

TEST(DeviceState, RanksMicroBatchesAndChaosChangeNothing) {
  for (const int ranks : {1, 3}) {
    for (const int micro_batches : {1, 2}) {
      for (const MicroBatchOrder order : {MicroBatchOrder::horizontal, MicroBatchOrder::vertical}) {
        ToySetup setup = apart();
        setup.engine.micro_batches_max = static_cast<unsigned>(micro_batches);
        setup.engine.micro_batch_order = order;
        const auto run = [&](const ToySetup& s) { return train_in_micro_batches(ranks, s, 5); };
        const Digests expected = run(simplest(setup));
        EXPECT_EQ(run(setup), expected) << ranks << " ranks, " << micro_batches << " micro-batches";
        setup.runtime.host_device.chaos_seed = 31;
        EXPECT_EQ(run(setup), expected) << ranks << " ranks, " << micro_batches << " micro-batches, chaos";
      }
    }
  }
}

TEST(DeviceState, GoesOnFromASave) {
  for (const int ranks : {1, 3}) {
    const TempDirectory directory;
    ToySetup setup = apart(directory / "store");
    setup.engine.keep_steps = 1;
    const auto run = [&](const ToySetup& s, std::uint64_t first, std::uint64_t last, bool restore, bool save) {
      Digests digests;
      on_ranks(ranks, [&](int rank, const Runtime::MakeCommunicator& join) {
        ToyModel model(s, join);
        if (restore) {
          EXPECT_EQ(model.restore({.from = "middle"}).step, first - 1);
        } else {
          model.initialize();
        }
        model.train(first, last);
        if (save) {
          const Completion saved = model.engine().save("middle", {});
          model.evaluate();  // while the save is running
          saved.wait();
        }
        const Digests mine = state_digests(model);
        if (rank == 0) digests = mine;
      });
      return digests;
    };
    const ToySetup reference = simplest(setup);
    ToySetup without_keeping = reference;
    without_keeping.engine.keep_steps = 0;
    const Digests middle = run(without_keeping, 1, 3, false, false);
    const Digests end = run(without_keeping, 1, 6, false, false);
    EXPECT_EQ(run(setup, 1, 3, false, true), middle) << ranks << " ranks";
    EXPECT_EQ(run(setup, 4, 6, true, false), end) << ranks << " ranks";
    // The CPU continues with the state that a device saved.
    ToySetup on_cpu = setup;
    on_cpu.runtime.host_device.host_accessible = true;
    on_cpu.engine.parameters = on_cpu.engine.optimizer = Placement::pinned;
    EXPECT_EQ(run(on_cpu, 4, 6, true, false), end) << ranks << " ranks";
  }
}

TEST(DeviceState, IsReadAndWritten) {
  const ToySetup setup = apart();
  ToyProgram there(setup), here(simplest(setup));
  const ParameterId frozen = there.engine().parameter("unit1.frozen");
  const std::vector<float> values{1.5f, -2.25f, 0.0078125f, 3.0f};
  for (ToyProgram* p : {&there, &here}) {
    p->train(1, 2);
    p->engine().write(p->matrix(1), State::master, 16'382, values);
    p->engine().write(p->matrix(1), State::moment2, 40'000, std::span(values).subspan(2));
    p->engine().write(frozen, State::master, 2'990, values);
    p->train(3, 4);
    p->pass(5);
  }
  for (const State state : {State::master, State::moment1, State::moment2, State::gradient}) {
    EXPECT_EQ(there.read(there.matrix(1), state, 16'000, 30'000), here.read(here.matrix(1), state, 16'000, 30'000))
        << static_cast<int>(state);
  }
  EXPECT_EQ(there.read(frozen, State::master, 0, 3'000), here.read(frozen, State::master, 0, 3'000));
  EXPECT_EQ(there.read(frozen, State::master, 2'990, 4), values);
}

TEST(DeviceState, CrossesNoLinkInAStep) {
  ToyProgram p(apart());
  p.train(1, 3);
  p.engine().settle();
  EXPECT_EQ(p.runtime().ledger().totals(Link::host_to_device).bytes, 0u);
  // A sum of 8 bytes a chunk, and one word.
  std::uint64_t chunks = 0;
  for (const std::int64_t elements : ToyShape{}.matrices)
    chunks += divide_up(static_cast<std::uint64_t>(elements), 65536) + 1;
  EXPECT_EQ(p.runtime().ledger().totals(Link::device_to_host).bytes, 3 * (8 * chunks + 4));
}

TEST(DeviceState, HoldsWhatIsPredicted) {
  for (const int ranks : {1, 3}) {
    const ToySetup setup = apart();
    on_ranks(ranks, [&](int, const Runtime::MakeCommunicator& join) {
      ToyModel model(setup, join);
      const Prediction predicted = predict(setup.runtime, setup.engine, model.model(), ranks);
      model.initialize();
      model.train(1, 2);
      EXPECT_EQ(model.runtime().device_budget().held_bytes(), predicted.device.bytes);
      EXPECT_EQ(model.runtime().pinned_budget().peak_bytes(), predicted.pinned.bytes);
    });
  }
}

TEST(DeviceState, AStateThatCannotBeCommittedIsNamed) {
  ToySetup setup = apart();
  setup.engine.optimizer_defaults = {.kind = OptimizerKind::sgd, .learning_rate = 1e38};
  setup.engine.gradient_clipping = 0;
  ToyProgram p(setup);
  EXPECT_THAT(
      [&] {
        for (std::uint64_t step = 1; step < 6; ++step) {
          p.gradient_scale = 1e4f;
          p.train(step, step);
        }
      },
      testing::ThrowsMessage<Error>(testing::HasSubstr("unit 'unit")));
  EXPECT_THROW(p.pass(9), Error);
}

TEST(DeviceState, OfEightBitsIsRefused) {
  ToySetup setup = apart();
  const GroupOptions moments{.moments = MomentType::fp8}, master{.remainder = RemainderType::int8};
  for (const GroupOptions& group : {moments, master}) {
    setup.engine.optimizer_defaults = group;
    Runtime runtime(setup.runtime);
    EXPECT_THROW(ToyModel(runtime, setup.engine).initialize(), ConfigError);
  }
  setup.engine.optimizer_defaults = {};
  Runtime runtime(setup.runtime);
  EXPECT_THROW(ToyModel(runtime, setup.engine, {.vectors = moments}).initialize(), ConfigError);
  EXPECT_THROW(ToyModel(runtime, setup.engine, {.vectors = master}).initialize(), ConfigError);
  EXPECT_NO_THROW(ToyModel(runtime, setup.engine).initialize());
}

TEST(DeviceState, WithOffloadedWeightsIsRefused) {
  for (const Placement parameters : {Placement::pinned, Placement::nvme}) {
    const TempDirectory directory;
    ToySetup setup = apart(directory / "store");
    setup.engine.parameters = parameters;
    EXPECT_THAT([&] { ToyModel(setup).initialize(); },
                testing::ThrowsMessage<ConfigError>(testing::HasSubstr("offload_optimizer.device")));
  }
}

// --- on whatever device there is -------------------------------------------------------------------------------------

// A program without kernels of its own: its gradients are numbers that it brings to the device. It trains on a GPU as
// on the host device.
struct WithoutKernels {
  explicit WithoutKernels(const ToySetup& setup) : runtime(setup.runtime) {
    scratch = runtime.device_arena().allocate(4 * static_cast<std::uint64_t>(kElements), "gradient");
    Model model;
    for (int u = 0; u < 3; ++u) {
      const std::string name = "unit" + std::to_string(u);
      const std::array<ParameterSpec, 2> specs{
          ParameterSpec{.name = name + ".matrix", .shape = {kElements}},
          ParameterSpec{.name = name + ".norm", .shape = {97}, .dtype = DType::fp32}};
      units.push_back(model.add_unit(name, specs));
    }
    engine = Engine::create(runtime, setup.engine, model,
                            [](ParameterId parameter, std::uint64_t first, std::span<float> out) {
                              for (std::size_t i = 0; i < out.size(); ++i)
                                out[i] = static_cast<float>(random_uniform(parameter.index, first + i) - 0.5);
                            });
  }

  void step(std::uint64_t number) {
    {
      const PassScope pass = engine->begin(Pass::train);
      for (const UnitId unit : units) engine->gather(unit, *stream).release(*stream);
      for (std::size_t u = units.size(); u-- > 0;) {
        Lease lease = engine->gather(units[u], *stream);
        for (const char* part : {".matrix", ".norm"}) accumulate("unit" + std::to_string(u) + part, number);
        lease.release(*stream);
        engine->finish(units[u], *stream);
      }
    }
    engine->step();
  }

  void accumulate(const std::string& name, std::uint64_t number) {
    const ParameterId parameter = engine->parameter(name);
    const std::vector<std::int64_t> shape = engine->model().parameters()[parameter.index].shape;
    std::vector<float> gradient(static_cast<std::size_t>(shape[0]));
    for (std::size_t i = 0; i < gradient.size(); ++i)
      gradient[i] = static_cast<float>(random_uniform(1000 * number + parameter.index, i) - 0.5);
    stream->copy(scratch.data(), reinterpret_cast<const std::byte*>(gradient.data()), 4 * gradient.size(),
                 platform::CopyKind::host_to_device);
    engine->accumulate(parameter, {.data = scratch.data(), .dtype = DType::fp32, .shape = shape}, *stream);
    stream->synchronize();
  }

  std::string trained(std::uint64_t steps) {
    for (std::uint64_t number = 1; number <= steps; ++number) step(number);
    std::string digests;
    for (const State state : {State::master, State::moment1, State::moment2})
      digests += state_digest(*engine, state) + " ";
    return digests;
  }

  static constexpr std::int64_t kElements = 150'001;
  Runtime runtime;
  std::optional<Engine> engine;
  tiers::DeviceBlock scratch;
  std::unique_ptr<platform::Stream> stream = runtime.device().create_stream("program");
  std::vector<UnitId> units;
};

struct Hardware {
  const char* name;
  platform::DeviceKind kind;
  bool host_accessible;
};

class EveryDevice : public testing::TestWithParam<Hardware> {};
INSTANTIATE_TEST_SUITE_P(Devices, EveryDevice,
                         testing::Values(Hardware{"host", platform::DeviceKind::host, true},
                                         Hardware{"host_apart", platform::DeviceKind::host, false},
                                         Hardware{"cuda", platform::DeviceKind::cuda, true}),
                         [](const auto& device) { return std::string(device.param.name); });

TEST_P(EveryDevice, EveryPlacementEndsInTheSameBits) {
  std::string why;
  if (GetParam().kind == platform::DeviceKind::cuda && platform::cuda_device_count(&why) == 0)
    GTEST_SKIP() << "no CUDA GPU: " << why;
  ToySetup setup = toy_setup(Placement::pinned, Placement::pinned);
  setup.engine.update_mode = UpdateMode::step;
  const std::string expected = WithoutKernels(setup).trained(4);
  constexpr Placement kDevice = Placement::device, kPinned = Placement::pinned, kNvme = Placement::nvme;
  for (const auto& [parameters, optimizer] :
       {std::pair{kDevice, kDevice}, std::pair{kDevice, kPinned}, std::pair{kPinned, kPinned},
        std::pair{kDevice, kNvme}, std::pair{kNvme, kNvme}}) {
    const TempDirectory directory;
    setup = toy_setup(parameters, optimizer, directory / "store");
    setup.runtime.device = GetParam().kind;
    setup.runtime.device_memory_bytes = 16 * kMiB;
    setup.runtime.host_device.host_accessible = GetParam().host_accessible;
    EXPECT_EQ(WithoutKernels(setup).trained(4), expected)
        << "parameters " << static_cast<int>(parameters) << ", optimizer " << static_cast<int>(optimizer);
  }
}

}  // namespace
}  // namespace hoist::test::device_state_test
