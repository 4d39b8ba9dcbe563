// SPDX-License-Identifier: Apache-2.0
// Things that end early, late or not at all: leases that outlive their pass or engine, engines destroyed in the middle,
// a start that is refused, a rank that fails alone.
#include <array>
#include <atomic>
#include <filesystem>
#include <limits>
#include <optional>
#include <thread>

#include <gtest/gtest.h>

#include <hoist/core/error.hpp>

#include "toy_ranks.hpp"

namespace hoist::test::lifetime_test {
namespace {

ToySetup in_memory() { return toy_setup(Placement::pinned, Placement::pinned); }

Digests trained(std::uint64_t steps) { return train_once(in_memory(), ToyShape{}, steps); }

float element(const TensorView& view, std::size_t i) { return to_float(static_cast<const bf16*>(view.data)[i]); }

// --- leases and scopes -----------------------------------------------------------------------------------------------

// Four units share gather memory for two, so units 0 and 2 have one home, and 1 and 3. While unit 0 is held, unit 2 has
// to lie where unit 1 does; work that reads it there may still run when the next pass fetches unit 2 to its home and
// unit 1 to its own.
TEST(Lifetime, AUnitThatReturnsToItsHomeIsWaitedForWhereItLay) {
  const ToyShape shape{.matrices = {100000, 100000, 100000, 100000}, .frozen = false, .tied = false};
  ToySetup setup = in_memory();
  setup.runtime.device_memory_bytes = 704 * kKiB;
  setup.engine.prefetch_elements = 0;
  ToyProgram f(setup, shape);
  platform::Stream& stream = f.stream();
  const auto gather = [&](std::size_t unit) { return f.engine().gather(f.unit(unit), stream); };
  const auto view = [&](const Lease& lease, std::size_t unit) { return lease.view(f.matrix(unit)); };
  std::array<void*, 4> homes{};
  float expected = 0;
  {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    for (std::size_t unit = 0; unit < homes.size(); ++unit) {
      const Lease lease = gather(unit);
      homes[unit] = view(lease, unit).data;
      stream.synchronize();
      if (unit == 2) expected = element(view(lease, unit), 99999);
    }
  }
  ASSERT_TRUE(homes[0] == homes[2] && homes[1] == homes[3] && homes[0] != homes[1]);
  float seen = 0;
  {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    Lease first = gather(0), moved = gather(2);
    ASSERT_EQ(view(moved, 2).data, homes[1]);
    first.release(stream);
    stream.launch("slow", [values = view(moved, 2), &seen] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      seen = element(values, 99999);
    });
    moved.release(stream);
  }
  {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    gather(2).release(stream);
    gather(1).release(stream);
  }
  stream.synchronize();
  EXPECT_EQ(seen, expected);
}

// A step changes weights in the memory that the device computes with, and evaluations may still be under way there.
TEST(Lifetime, AStepWaitsForWorkThatReadsTheWeights) {
  ToyProgram f(toy_setup(Placement::device, Placement::device),
               ToyShape{.matrices = {1000}, .frozen = false, .tied = false});
  platform::Stream& stream = f.stream();
  const auto look = [&](std::chrono::milliseconds late, float& seen) {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    Lease lease = f.engine().gather(f.unit(0), stream);
    stream.launch("look", [late, &seen, values = lease.view(f.matrix(0))] {
      std::this_thread::sleep_for(late);
      seen = element(values, 999);
    });
    lease.release(stream);
  };
  float expected = 0, seen = 0, changed = 0;
  f.pass(1);
  look(std::chrono::milliseconds(0), expected);
  stream.synchronize();
  look(std::chrono::milliseconds(100), seen);
  f.engine().step();
  look(std::chrono::milliseconds(0), changed);
  stream.synchronize();
  EXPECT_EQ(seen, expected);
  EXPECT_NE(changed, expected);
}

// Sets all of a gradient, `before` and `after` so much time.
void set_gradient(platform::Stream& stream, const TensorView& gradient, float value, std::chrono::milliseconds before,
                  std::chrono::milliseconds after) {
  stream.launch("gradient", [=] {
    std::this_thread::sleep_for(before);
    std::fill_n(static_cast<bf16*>(gradient.data), gradient.shape[0], to_bf16(value));
    std::this_thread::sleep_for(after);
  });
}

// The memory of dropped gradients has other uses at once, on other streams.
TEST(Lifetime, AKernelOfAPassThatWasLeftDoesNotWriteIntoTheNextGradients) {
  using std::chrono::milliseconds;
  ToyProgram f(in_memory(), ToyShape{.matrices = {1000}, .frozen = false, .tied = false});
  const auto other = f.runtime().device().create_stream("other");
  const auto gradient = [&](platform::Stream& stream) {
    return f.engine().gradients(f.unit(0), stream).view(f.matrix(0));
  };
  {
    const PassScope scope = f.engine().begin(Pass::train);
    set_gradient(*other, gradient(*other), 7, milliseconds(100), milliseconds(0));
    f.engine().discard();
  }
  {
    const PassScope scope = f.engine().begin(Pass::train);
    set_gradient(f.stream(), gradient(f.stream()), 0.25f, milliseconds(0), milliseconds(200));
    f.engine().finish(f.unit(0), f.stream());
  }
  std::vector<float> found(1000);
  f.engine().read(f.matrix(0), State::gradient, 0, found);
  EXPECT_EQ(found, std::vector<float>(1000, 0.25f));
}

// The memory of dropped gradients goes back with the engine.
TEST(Lifetime, AnEngineEndsAfterTheKernelsThatMakeDroppedGradients) {
  ToyProgram f(in_memory(), ToyShape{.matrices = {1000}, .frozen = false, .tied = false});
  std::atomic<bool> made{false};
  {
    const PassScope scope = f.engine().begin(Pass::train);
    const TensorView gradient = f.engine().gradients(f.unit(0), f.stream()).view(f.matrix(0));
    set_gradient(f.stream(), gradient, 7, std::chrono::milliseconds(100), std::chrono::milliseconds(0));
    f.stream().launch("made", [&made] { made = true; });
    f.engine().discard();
  }
  f.close();
  EXPECT_TRUE(made);
}

// In mode `backward` a unit's gradient may come from one stream while, on another, the copy of its weights still waits
// for the link.
TEST(Lifetime, AnUpdateInBackwardWaitsForTheCopyOfTheWeightsBeforeIt) {
  using std::chrono::milliseconds;
  ToySetup setup = in_memory();
  setup.engine.update_mode = UpdateMode::backward;
  setup.engine.gradient_clipping = 0;
  setup.runtime.device_memory_bytes = 16 * kMiB;
  setup.runtime.pinned_memory_bytes = 64 * kMiB;
  setup.runtime.host_device.link_bytes_per_second = 20'000'000;  // 100 ms for unit 1
  ToyProgram f(setup, ToyShape{.matrices = {1000, 1'000'000}, .frozen = false, .tied = false});
  const float expected = to_float(to_bf16(f.read(f.matrix(0), State::master, 999, 1).front()));
  const auto other = f.runtime().device().create_stream("other");
  float seen = 0;
  {
    const PassScope scope = f.engine().begin(Pass::train);
    f.engine().gather(f.unit(1), f.stream()).release(f.stream());
    Lease lease = f.engine().gather(f.unit(0), f.stream());
    f.stream().launch("look", [&seen, values = lease.view(f.matrix(0))] { seen = element(values, 999); });
    lease.release(f.stream());
    const TensorView gradient = f.engine().gradients(f.unit(0), *other).view(f.matrix(0));
    set_gradient(*other, gradient, 1, milliseconds(0), milliseconds(0));
    f.engine().finish(f.unit(0), *other);
    f.engine().finish(f.unit(1), f.stream());
  }
  EXPECT_TRUE(f.engine().step().applied);
  EXPECT_EQ(seen, expected);
  EXPECT_NE(to_float(to_bf16(f.read(f.matrix(0), State::master, 999, 1).front())), expected);
}

// In mode `forward` the last step's update still reads gradients in the next pass. A gather of the unit waits for it; a
// program that knows its gradients without the weights does not gather.
TEST(Lifetime, GradientsWithoutAGatherDoNotOvertakeTheUpdate) {
  constexpr std::int64_t kElements = 4'000'000;
  const auto run = [&](UpdateMode mode) {
    ToySetup setup = in_memory();
    setup.engine.update_mode = mode;
    setup.runtime.update_threads = 1;
    setup.runtime.device_memory_bytes = 64 * kMiB;
    setup.runtime.pinned_memory_bytes = 256 * kMiB;
    Runtime runtime(setup.runtime);
    Model model;
    const UnitId unit = model.add_unit("unit", {{.name = "w", .shape = {kElements}, .dtype = DType::bf16}});
    Engine engine = Engine::create(runtime, setup.engine, model, [](ParameterId, std::uint64_t, std::span<float> out) {
      std::ranges::fill(out, 0.5f);
    });
    const auto stream = runtime.device().create_stream("compute");
    for (int step = 1; step <= 4; ++step) {
      {
        const PassScope scope = engine.begin(Pass::train);
        const TensorView gradient = engine.gradients(unit, *stream).view(engine.parameter("w"));
        const bf16 value = to_bf16(step % 2 == 0 ? -1.0f : 0.25f);
        stream->launch("gradient", [=] { std::fill_n(static_cast<bf16*>(gradient.data), kElements, value); });
        engine.finish(unit, *stream);
      }
      engine.step();
    }
    engine.settle();
    return state_digest(engine, State::master);
  };
  EXPECT_EQ(run(UpdateMode::forward), run(UpdateMode::step));
}

// Work that was enqueued under a lease still reads the weights when the lease's pass has ended.
TEST(Lifetime, ALeaseThatOutlivesItsPassKeepsItsWeightsForWorkAlreadyEnqueued) {
  const ToyShape shape{.matrices = {100000, 100000}, .frozen = false, .tied = false};
  ToySetup setup = in_memory();
  setup.runtime.device_memory_bytes = 512 * kKiB;  // one slot
  ToyProgram f(setup, shape);
  float expected = 0;
  {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    const Lease lease = f.engine().gather(f.unit(0), f.stream());
    f.stream().synchronize();
    expected = element(lease.view(f.matrix(0)), 99999);
  }
  float seen = 0;
  Lease late;
  {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    late = f.engine().gather(f.unit(0), f.stream());
    f.stream().launch("slow", [view = late.view(f.matrix(0)), &seen] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      seen = element(view, 99999);
    });
  }
  EXPECT_THROW(late.view(f.matrix(0)), UsageError);
  const auto other = f.runtime().device().create_stream("other");
  {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    f.engine().gather(f.unit(1), *other).release(*other);
  }
  other->synchronize();
  f.stream().synchronize();
  EXPECT_EQ(seen, expected);
  late.release(f.stream());  // of no effect
}

TEST(Lifetime, ALeaseMayOutliveItsStreamOnceItsPassHasEnded) {
  ToyProgram f(in_memory());
  auto stream = f.runtime().device().create_stream("short");
  std::optional<Lease> of_pass, of_engine;
  {
    const PassScope scope = f.engine().begin(Pass::evaluate);
    of_pass = f.engine().gather(f.unit(0), *stream);
  }
  const PassScope scope = f.engine().begin(Pass::evaluate);
  of_engine = f.engine().gather(f.unit(1), *stream);
  f.close();
  stream.reset();
  of_pass.reset();
  of_engine.reset();
}

TEST(Lifetime, AnEngineEndsInTheMiddleOfAPassUnderLeasesAndScopes) {
  for (const std::uint64_t chaos : {0u, 3u}) {
    const TempDirectory directory;
    ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
    setup.runtime.host_device.chaos_seed = chaos;
    ToyProgram f(setup);
    f.train(1, 2);
    {
      const PassScope scope = f.engine().begin(Pass::train);
      Lease lease = f.engine().gather(f.unit(0), f.stream());
      const Lease destroyed = f.engine().gather(f.unit(1), f.stream());
      const GradientLease gradients = f.engine().gradients(f.unit(2), f.stream());
      const ParameterId owned = f.matrix(0), other = f.matrix(2);
      f.close();
      EXPECT_THROW(lease.view(owned), UsageError);
      EXPECT_THROW(gradients.view(other), UsageError);
      lease.release(f.stream());
    }
    ASSERT_EQ(f.restore().step, 2u);
    f.train(3, 4);
    EXPECT_EQ(digests_of(f), trained(4));
  }
}

TEST(Lifetime, AScopeEndsItsOwnPassOnly) {
  ToyProgram f(in_memory());
  auto first = std::make_unique<PassScope>(f.engine().begin(Pass::evaluate));
  f.engine().discard();
  const PassScope second = f.engine().begin(Pass::evaluate);
  first.reset();
  f.engine().gather(f.unit(0), f.stream()).release(f.stream());  // the second pass goes on
}

TEST(Lifetime, GradientLeasesEndWithFinish) {
  ToyProgram f(in_memory());
  const PassScope scope = f.engine().begin(Pass::train);
  const GradientLease gradients = f.engine().gradients(f.unit(2), f.stream());
  EXPECT_NE(gradients.view(f.matrix(2)).data, nullptr);
  f.engine().finish(f.unit(2), f.stream());
  EXPECT_THROW(gradients.view(f.matrix(2)), UsageError);
}

TEST(Lifetime, GradientsWaitForTheStepThroughEvaluations) {
  ToyProgram f(in_memory());
  f.train(1, 1);
  f.pass(2);
  f.evaluate();
  f.in_forward = [&f](std::size_t unit) {
    if (unit != 1) return;
    f.stream().synchronize();  // enqueued work writes to a local of evaluate()
    throw std::runtime_error("the program's own");
  };
  EXPECT_THROW(f.evaluate(), std::runtime_error);
  f.in_forward = [](std::size_t) {};
  f.engine().step();
  f.train(3, 3);
  EXPECT_EQ(digests_of(f), trained(3));
}

// --- starting --------------------------------------------------------------------------------------------------------

std::uint64_t held_bytes(Runtime& runtime) {
  return runtime.device_budget().held_bytes() + runtime.pinned_budget().held_bytes();
}

TEST(Lifetime, ARefusedStartLeavesNothingBehind) {
  const TempDirectory directory;
  const ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  const auto not_a_number = [](ParameterId, std::uint64_t, std::span<float> out) {
    std::ranges::fill(out, std::numeric_limits<float>::quiet_NaN());
  };
  {
    ToyModel f(setup);
    EXPECT_THROW(f.restore(), StoreError);  // there is nothing yet
    EXPECT_EQ(held_bytes(f.runtime()), 0u);
    EXPECT_THROW(f.initialize(not_a_number), UsageError);
    EXPECT_EQ(held_bytes(f.runtime()), 0u);
    f.initialize();
    f.train(1, 2);
    EXPECT_EQ(digests_of(f), trained(2));
  }
  ToyModel f(setup);
  EXPECT_THROW(f.initialize(), StoreError);  // it holds a commit
  EXPECT_THROW(f.restore({.from = "nobody kept it"}), StoreError);
  EXPECT_EQ(held_bytes(f.runtime()), 0u);
  EXPECT_EQ(f.restore().step, 2u);
  EXPECT_EQ(f.engine().committed_step(), 2u);
  f.losses = trained(2).losses;
  f.train(3, 3);
  EXPECT_EQ(digests_of(f), trained(3));
  f.close();
  EXPECT_EQ(held_bytes(f.runtime()), 0u);
}

TEST(Lifetime, ACommitThatWasWaitedForIsTheCommittedStep) {
  const TempDirectory directory;
  ToyProgram f(toy_setup(Placement::pinned, Placement::nvme, directory / "store"),
               {.matrices = {64}, .frozen = false, .tied = false});
  for (std::uint64_t step = 1; step <= 30; ++step) {
    f.train(step, step);
    f.reports.back().committed.wait();
    ASSERT_EQ(f.engine().committed_step(), step);
  }
}

// --- ranks -----------------------------------------------------------------------------------------------------------

// Runs `body` on every rank; the message of the error each ended with.
std::vector<std::string> errors_of_ranks(int size, const std::function<void(int rank, ToyModel&)>& body,
                                         const ToySetup& setup) {
  std::vector<std::string> errors(static_cast<std::size_t>(size));
  on_ranks(size, [&](int rank, const Runtime::MakeCommunicator& join) {
    ToyModel model(setup, join);
    try {
      body(rank, model);
    } catch (const Error& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  return errors;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Lifetime, RanksFailTogetherWhenOneCannotStart) {
  const TempDirectory directory;
  ToySetup setup = toy_setup(Placement::nvme, Placement::nvme, directory / "store");
  setup.runtime.comm_timeout = std::chrono::minutes(10);  // nobody waits that long
  const auto initialize = [&](int, ToyModel& model) {
    model.initialize();
    model.train(1, 2);
    model.engine().settle();
  };
  const auto failing_fill = [&](int rank, ToyModel& model) {
    model.initialize([&](ParameterId parameter, std::uint64_t first, std::span<float> out) {
      if (rank == 1) throw Error("no values here");
      model.fill()(parameter, first, out);
    });
  };
  auto errors = errors_of_ranks(3, failing_fill, setup);
  EXPECT_TRUE(contains(errors[1], "no values here")) << errors[1];
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}})
    EXPECT_TRUE(contains(errors[rank], "rank 1 could not make its initial state")) << errors[rank];

  errors = errors_of_ranks(3, initialize, setup);
  for (const std::string& error : errors) EXPECT_EQ(error, "");

  const auto restore = [&](int, ToyModel& model) { model.restore(); };
  const std::string data = (directory / "store") + "/rank-00001.data";
  std::filesystem::rename(data, data + ".away");
  errors = errors_of_ranks(3, restore, setup);
  EXPECT_TRUE(contains(errors[1], "has lost its data")) << errors[1];
  for (const std::size_t rank : {std::size_t{0}, std::size_t{2}})
    EXPECT_TRUE(contains(errors[rank], "rank 1 could not take its memory and open its store")) << errors[rank];
  std::filesystem::rename(data + ".away", data);

  const std::string manifest = (directory / "store") + "/rank-00002.manifest";
  std::filesystem::rename(manifest, manifest + ".away");
  errors = errors_of_ranks(3, restore, setup);
  for (const std::string& error : errors) EXPECT_TRUE(contains(error, "holds no commit that every rank has")) << error;
  std::filesystem::rename(manifest + ".away", manifest);

  errors = errors_of_ranks(3, restore, setup);
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace hoist::test::lifetime_test
